"""Engine options: one frozen dataclass, the only place where a default lives.

The CLI expands `EngineOptions` into each command's signature, the environment fills it (`CORELLM_<NAME>`), and
`EngineNode` takes its fields as keyword arguments.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from typing import Any

from corellm.errors import OptionError

DEVICES = ("auto", "cuda", "cpu")
DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHES = ("radix", "naive")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEMO_MODEL = "demo"


def _option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may say about an engine. `None` means: decided at start from the device and the model.

    Raises `OptionError`, naming the option, when a value is out of range.
    """

    model: str | None = _option(None, "Local folder, Hugging Face id, or 'demo'.")
    tp: int = _option(1, "Tensor-parallel ranks, one worker each.", low=1, high=64)
    device: str = _option("auto", "Where workers run.", choices=DEVICES)
    dtype: str = _option(
        "auto", "Of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU.", choices=DTYPES
    )
    max_model_len: int | None = _option(None, "Longest prompt + output, in tokens; at most the model's own.", low=1)
    max_batch_tokens: int | None = _option(None, "Token budget of one step.", low=1)
    max_seqs: int | None = _option(
        None, "Sequences that run at once; else what suits the GPU's size, 64 on a CPU.", low=1, high=4096
    )
    kv_cache: str = _option("radix", "radix reuses common prefixes; naive does not.", choices=KV_CACHES)
    page_size: int | None = _option(None, "Tokens in one KV block.", low=1, high=1024)
    gpu_memory: float = _option(0.9, "Fraction of a GPU's memory to use.", low=0.05, high=1.0)
    kv_blocks: int | None = _option(None, "KV blocks; overrides the memory budget.", low=1)
    load_format: str = _option("auto", "dummy: seeded random weights from a config.json alone.", choices=LOAD_FORMATS)
    seed: int = _option(0, "Seed of rows that do not say, and of dummy weights.", low=0, high=2**31 - 1)
    name: str | None = _option(None, "Name under which the engine registers.")
    log_level: str = _option("warning", "Log verbosity, on stderr.", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec, getattr(self, spec.name), flag_name(spec.name))

    @classmethod
    def from_env(cls, **given: Any) -> EngineOptions:
        """Options that are given (not None) win over `CORELLM_<NAME>`, which wins over the default."""
        values = {name: value for name, value in given.items() if value is not None}
        for spec in fields(cls):
            text = os.environ.get(env_name(spec.name))
            if spec.name not in values and text:
                values[spec.name] = parse_option(spec, text, env_name(spec.name))
        return cls(**values)


def env_name(option: str) -> str:
    return f"CORELLM_{option.upper()}"


def flag_name(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _kind(spec: Field[Any]) -> type:
    kinds: dict[str, type] = {"int": int, "int | None": int, "float": float, "str": str, "str | None": str}
    return kinds[str(spec.type)]


def parse_option(spec: Field[Any], text: str, source: str) -> Any:
    """The value of an option that came as text. Raises `OptionError`, naming `source`, the flag or the variable."""
    kind = _kind(spec)
    value: Any = text
    with suppress(ValueError):  # what is no number stays text, which the check refuses by name
        value = kind(text)
    _check(spec, value, source)
    return value


def _is_a(kind: type, value: Any) -> bool:
    """An int will do for a float, and a bool for neither."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _check(spec: Field[Any], value: Any, source: str) -> None:
    rule, kind = spec.metadata, _kind(spec)
    if value is None and spec.default is None:
        return
    if rule["choices"] and value not in rule["choices"]:
        raise OptionError(f"{source} is {value!r}; choose one of {', '.join(rule['choices'])}")
    allowed = _KINDS_IN_WORDS[kind] + _range(rule)
    if not _is_a(kind, value) or (kind is str and not value.strip()):
        raise OptionError(f"{source} is {value!r}; it must be {allowed}")
    low, high = rule["low"], rule["high"]
    # So written that NaN, which compares false with everything, is refused.
    if low is not None and not low <= value <= (math.inf if high is None else high):
        raise OptionError(f"{source} is {value}; it must be {allowed}")


_KINDS_IN_WORDS: dict[type, str] = {int: "an integer", float: "a number", str: "text"}


def _range(rule: Mapping[str, Any]) -> str:
    low, high = rule["low"], rule["high"]
    if low is None:
        return ""
    return f" of at least {low:.10g}" if high is None else f" from {low:.10g} to {high:.10g}"
