"""Llama as one plain function of weights, inputs and cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from corellm.kernels import Backend, PagedAttention
from corellm.kernels.inputs import Batch, Heads, KVCache
from corellm.layers.attention import AttentionStep, attention
from corellm.layers.embedding import embed
from corellm.layers.linear import row_parallel_add
from corellm.layers.parallel import ATTENTION, MLP, Collectives
from corellm.layers.rotary import RotaryTable, inverse_frequencies
from corellm.models.llama.spec import LlamaSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer's weights on this rank; the names and shapes are those of `weight_table`."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights of one rank, grouped as the graph walks them."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def from_table(cls, weights: Mapping[str, Tensor], layers: int) -> LlamaWeights:
        """Group `weights`, named as in `weight_table`; a tied head is `embed`."""
        names = LayerWeights.__slots__
        return cls(
            embed=weights["embed"],
            layers=tuple(LayerWeights(*(weights[f"layers.{i}.{name}"] for name in names)) for i in range(layers)),
            norm=weights["norm"],
            head=weights.get("head", weights["embed"]),
        )


class Llama:
    """The model on one rank: shapes, weights, backend and group, bound once."""

    def __init__(
        self,
        spec: LlamaSpec,
        weights: Mapping[str, Tensor],
        backend: Backend,
        group: Collectives,
        *,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self._weights = LlamaWeights.from_table(weights, spec.layers)
        self._backend = backend
        self._group = group
        self._eps = spec.eps
        self.heads = Heads(spec.heads // group.size, spec.kv_heads // group.size, spec.head_dim)
        frequencies = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self._rotary = RotaryTable(frequencies, max_model_len, weights["embed"].device, dtype)

    def forward(self, batch: Batch, attend: PagedAttention, kv: KVCache) -> Tensor:
        """What the layers make of the batch's n tokens, before the last norm: [n, hidden]; writes `kv`."""
        weights, backend, group, eps = self._weights, self._backend, self._group, self._eps
        residual = embed(batch.tokens, weights.embed, backend, group)
        step = AttentionStep(self.heads, self._rotary.lookup(batch.positions), batch.kv_slots, attend)
        for i, layer in enumerate(weights.layers):
            attended = attention(residual, layer.input_norm, eps, layer.qkv, kv.k[i], kv.v[i], step, backend)
            row_parallel_add(attended, layer.o, residual, backend, group, ATTENTION)
            gated = backend.norm_gated(residual, layer.post_norm, eps, layer.gate_up)
            row_parallel_add(gated, layer.down, residual, backend, group, MLP)
        return residual

    def rehearsals(self, rows: int, kv: KVCache) -> list[Callable[[], object]]:
        """The products of a layer and the head, each on `rows` rows of zeros: to compile what they need, in any order
        and at the same time. They write to the padding block of `kv`."""
        layer, backend, heads = self._weights.layers[0], self._backend, self.heads
        x = self._weights.embed.new_zeros(rows, len(layer.o))
        positions = torch.zeros(rows, dtype=torch.int64, device=x.device)
        kv_slots = positions + (kv.k.shape[1] - 1) * kv.page_size
        rope, cache = self._rotary.lookup(positions), (kv.k[0], kv.v[0])
        found: list[Callable[[], object]] = [
            partial(backend.norm_qkv, x, layer.input_norm, self._eps, layer.qkv, rope, heads, kv_slots, *cache),
            partial(backend.norm_gated, x, layer.post_norm, self._eps, layer.gate_up),
            partial(self.logits, x),
        ]
        for weight in (layer.o, layer.down):
            part = x.new_zeros(rows, weight.shape[1])
            alone = self._group.size == 1  # else every rank would have to reduce, and in one order
            found.append(partial(backend.linear_add if alone else backend.linear_to, part, weight, x.clone()))
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows of `forward`'s result [s, hidden] over this rank's part of the vocabulary: [s, v / size]."""
        return self._backend.norm_linear(hidden, self._weights.norm, self._eps, self._weights.head)
