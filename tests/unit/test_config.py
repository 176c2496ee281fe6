"""EngineOptions: ranges, the environment, and which source wins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from corellm.config import EngineOptions, env_name, flag_name
from corellm.errors import OptionError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in dataclasses.fields(EngineOptions):
        monkeypatch.delenv(env_name(spec.name), raising=False)


def test_defaults_are_valid_and_leave_the_machine_to_decide() -> None:
    options = EngineOptions()
    assert options.tp == 1
    assert (options.max_model_len, options.max_seqs, options.kv_blocks, options.page_size) == (None,) * 4


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("tp", (1, 64), (0, 65, -1)),
        ("max_model_len", (1, 131072), (0, -5)),
        ("max_batch_tokens", (1,), (0,)),
        ("max_seqs", (1, 4096), (0, 4097)),
        ("page_size", (1, 1024), (0, 1025)),
        ("gpu_memory", (0.05, 1.0, 1), (0.04, 1.01, -0.5)),
        ("kv_blocks", (1,), (0,)),
        ("seed", (0, 2**31 - 1), (-1, 2**31)),
        ("device", ("auto", "cuda", "cpu"), ("gpu", "")),
        ("dtype", ("auto", "bfloat16", "float16", "float32"), ("int8",)),
        ("kv_cache", ("radix", "naive"), ("lru",)),
        ("load_format", ("auto", "safetensors", "dummy"), ("pickle",)),
        ("log_level", ("debug", "info", "warning", "error"), ("loud",)),
    ],
)
def test_range_of_each_option(name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in allowed:
        assert getattr(EngineOptions(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(OptionError) as caught:
            EngineOptions(**{name: value})
        message = caught.value.message
        assert flag_name(name) in message
        assert str(value) in message
        assert "\n" not in message


@pytest.mark.parametrize("value", [True, "4", [4], 1.5, None])
def test_a_number_must_be_a_number(value: object) -> None:
    with pytest.raises(OptionError, match=r"--tp is .* must be an integer from 1 to 64"):
        EngineOptions(tp=value)  # type: ignore[arg-type]


def test_a_name_must_be_text() -> None:
    with pytest.raises(OptionError, match="--model is 7; it must be text"):
        EngineOptions(model=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "  "])
def test_a_name_must_not_be_blank(value: str) -> None:
    with pytest.raises(OptionError, match=r"--name is ' *'; it must be text"):
        EngineOptions(name=value)


def test_a_large_limit_is_given_in_full() -> None:
    with pytest.raises(OptionError, match="from 0 to 2147483647"):
        EngineOptions(seed=-1)


def test_nan_is_not_a_fraction_of_memory() -> None:
    with pytest.raises(OptionError, match="--gpu-memory"):
        EngineOptions(gpu_memory=float("nan"))


def test_every_option_reads_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {
        "model": "folder",
        "tp": 2,
        "device": "cpu",
        "dtype": "float16",
        "max_model_len": 77,
        "max_batch_tokens": 88,
        "max_seqs": 9,
        "kv_cache": "naive",
        "page_size": 8,
        "gpu_memory": 0.5,
        "kv_blocks": 11,
        "load_format": "dummy",
        "seed": 5,
        "name": "alpha",
        "log_level": "debug",
    }
    assert set(given) == {spec.name for spec in dataclasses.fields(EngineOptions)}
    for name, value in given.items():
        monkeypatch.setenv(f"CORELLM_{name.upper()}", str(value))
    assert dataclasses.asdict(EngineOptions.from_env()) == given


def test_an_argument_wins_over_the_environment_and_none_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORELLM_TP", "2")
    assert EngineOptions.from_env(tp=4).tp == 4
    assert EngineOptions.from_env(tp=None).tp == 2


def test_an_empty_variable_is_as_if_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORELLM_TP", "")
    assert EngineOptions.from_env().tp == 1


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORELLM_MAX_SEQS", "many")
    with pytest.raises(OptionError, match="CORELLM_MAX_SEQS is 'many'; it must be an integer from 1 to 4096"):
        EngineOptions.from_env()
    monkeypatch.setenv("CORELLM_MAX_SEQS", "0")
    with pytest.raises(OptionError, match="CORELLM_MAX_SEQS is 0; it must be an integer from 1 to 4096"):
        EngineOptions.from_env()
    monkeypatch.setenv("CORELLM_DTYPE", "int8")
    with pytest.raises(OptionError, match="CORELLM_DTYPE is 'int8'; choose one of auto, "):
        EngineOptions.from_env(max_seqs=1)


def test_options_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineOptions().tp = 2  # type: ignore[misc]
