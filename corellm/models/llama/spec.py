"""Llama's shapes and the one table of its weights, without torch.

`LlamaSpec` is a checked `config.json`. `weight_table` lists, for one rank, every weight in slab order: the name the
graph uses, its local shape, and which part of which checkpoint tensors it is made of. Slab, loader, graph, tensor
parallelism and tests all read this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from corellm.errors import CheckpointError, OptionError, UnsupportedModelError

ARCHITECTURE = "LlamaForCausalLM"
ALIGN = 256  # bytes; a slab entry starts where TMA and wide vector loads may


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency bands: `rope_type` "llama3" of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSpec:
    """The shapes of one model. Sizes are counts of elements; `max_positions` is in tokens."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    dtype: str  # the checkpoint's: bfloat16, float16 or float32

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LlamaSpec:
        """Read a Hugging Face `config.json`.

        Raises `UnsupportedModelError` for another architecture, `CheckpointError` for a field that is missing or wrong.
        """
        found = config.get("architectures")
        if not isinstance(found, list) or not found:
            found = [config.get("model_type", "none named")]
        if ARCHITECTURE not in found:
            raise UnsupportedModelError(
                f"architecture {found[0]} is not supported; CoreLLM runs {ARCHITECTURE}, rope type llama3 or default"
            )
        for name in ("attention_bias", "mlp_bias"):
            if config.get(name):
                raise UnsupportedModelError(f"{name} is true in config.json; only Llama without biases is supported")
        if config.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported; only silu is")
        hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
        theta, scaling = _rope(config)
        spec = cls(
            hidden=hidden,
            layers=_positive(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_positive(config, "num_key_value_heads", heads),
            head_dim=_positive(config, "head_dim", hidden // heads),
            intermediate=_positive(config, "intermediate_size"),
            vocab=_positive(config, "vocab_size"),
            max_positions=_positive(config, "max_position_embeddings"),
            eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch."),
        )
        if spec.heads % spec.kv_heads:
            raise CheckpointError(
                f"num_attention_heads {spec.heads} is not a multiple of num_key_value_heads {spec.kv_heads}"
            )
        if spec.head_dim % 2:
            raise CheckpointError(f"head_dim {spec.head_dim} is odd; rotary embedding needs pairs")
        if spec.dtype not in ("bfloat16", "float16", "float32"):
            raise UnsupportedModelError(f"dtype {spec.dtype} is not supported; use bfloat16, float16 or float32")
        return spec

    def check_tp(self, tp: int) -> None:
        """Raise `OptionError` unless `tp` ranks can share the heads evenly."""
        allowed = [n for n in range(1, self.kv_heads + 1) if self.kv_heads % n == 0 and self.intermediate % n == 0]
        if tp not in allowed:
            names = ", ".join(map(str, allowed))
            raise OptionError(f"--tp is {tp}; this model has {self.kv_heads} KV heads, so it can be {names}")

    def kv_bytes_per_token(self, itemsize: int, tp: int = 1) -> int:
        """Bytes of K and V of one token in all layers of one rank."""
        return 2 * self.layers * (self.kv_heads // tp) * self.head_dim * itemsize


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} is {value!r} in config.json; it must be a positive integer")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{name} is {value!r} in config.json; it must be a positive number")
    return float(value)


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes one `rope_parameters` mapping; older checkpoints have `rope_theta` and `rope_scaling`.
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"rope_scaling is {parameters!r} in config.json; it must be an object")
    theta = _number({"rope_theta": 10000.0, **config, **parameters}, "rope_theta")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; CoreLLM runs llama3 and default")
    return theta, RopeScaling(
        factor=_number(parameters, "factor"),
        low_freq_factor=_number(parameters, "low_freq_factor"),
        high_freq_factor=_number(parameters, "high_freq_factor"),
        original_max_position_embeddings=_positive(parameters, "original_max_position_embeddings"),
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a checkpoint tensor: `start:stop` along `dim` of `tensor`, landing at `at` along `dim` of the entry."""

    tensor: str
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    dim: int
    start: int
    stop: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class WeightEntry:
    """One weight as the graph sees it: `shape` is local to the rank, `offset` in bytes from the start of the slab."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    offset: int
    nbytes: int

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of it: the norms."""
        return len(self.shape) == 1


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Every weight of one rank in slab order, and the bytes they take together."""

    entries: tuple[WeightEntry, ...]
    nbytes: int


def weight_table(spec: LlamaSpec, itemsize: int, tp: int = 1, rank: int = 0) -> WeightTable:
    """Lay out the weights of `rank` of `tp`.

    Column-parallel weights (QKV, gate/up) and the vocabulary (embedding, head) are split by rows of the checkpoint's
    [out, in] matrices, row-parallel ones (O, down) by columns. A vocabulary that does not divide is padded with zero
    rows at the last rank. A tied head has no entry of its own.
    """
    spec.check_tp(tp)
    entries: list[WeightEntry] = []
    offset = 0
    for name, shape, shards in _weights(spec, tp, rank):
        nbytes = math.prod(shape) * itemsize
        entries.append(WeightEntry(name, shape, shards, offset, nbytes))
        offset += -(-nbytes // ALIGN) * ALIGN
    return WeightTable(tuple(entries), offset)


def _weights(spec: LlamaSpec, tp: int, rank: int) -> Iterator[tuple[str, tuple[int, ...], tuple[Shard, ...]]]:
    hidden, inter = spec.hidden, spec.intermediate
    q, kv, ff = spec.heads * spec.head_dim // tp, spec.kv_heads * spec.head_dim // tp, inter // tp
    vocab = -(-spec.vocab // tp)

    def rows(tensor: str, full: tuple[int, ...], size: int, at: int = 0) -> Shard:
        return Shard(tensor, full, 0, min(rank * size, full[0]), min((rank + 1) * size, full[0]), at)

    def columns(tensor: str, full: tuple[int, int], size: int) -> Shard:
        return Shard(tensor, full, 1, rank * size, (rank + 1) * size)

    def norm(tensor: str) -> Shard:
        return Shard(tensor, (hidden,), 0, 0, hidden)

    yield "embed", (vocab, hidden), (rows("model.embed_tokens.weight", (spec.vocab, hidden), vocab),)
    for i in range(spec.layers):
        source, name = f"model.layers.{i}.", f"layers.{i}."
        yield name + "input_norm", (hidden,), (norm(source + "input_layernorm.weight"),)
        attention = source + "self_attn."
        yield (
            name + "qkv",
            (q + 2 * kv, hidden),
            (
                rows(attention + "q_proj.weight", (q * tp, hidden), q),
                rows(attention + "k_proj.weight", (kv * tp, hidden), kv, q),
                rows(attention + "v_proj.weight", (kv * tp, hidden), kv, q + kv),
            ),
        )
        yield name + "o", (hidden, q), (columns(attention + "o_proj.weight", (hidden, q * tp), q),)
        yield name + "post_norm", (hidden,), (norm(source + "post_attention_layernorm.weight"),)
        yield (
            name + "gate_up",
            (2 * ff, hidden),
            (
                rows(source + "mlp.gate_proj.weight", (inter, hidden), ff),
                rows(source + "mlp.up_proj.weight", (inter, hidden), ff, ff),
            ),
        )
        yield name + "down", (hidden, ff), (columns(source + "mlp.down_proj.weight", (hidden, inter), ff),)
    yield "norm", (hidden,), (norm("model.norm.weight"),)
    if not spec.tied:
        yield "head", (vocab, hidden), (rows("lm_head.weight", (spec.vocab, hidden), vocab),)
