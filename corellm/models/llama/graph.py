"""Llama as one plain function of weights, inputs and cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from corellm.kernels import Backend, PagedAttention
from corellm.kernels.inputs import Batch, Heads, KVCache
from corellm.layers.activation import gated_mlp
from corellm.layers.attention import AttentionStep, self_attention
from corellm.layers.embedding import embed, head
from corellm.layers.parallel import Collectives
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
        """What the layers make of the batch's n tokens, normed: [n, hidden]; writes `kv`."""
        weights, backend, group, eps = self._weights, self._backend, self._group, self._eps
        residual = embed(batch.tokens, weights.embed, backend, group)
        step = AttentionStep(
            heads=self.heads,
            rope=self._rotary.lookup(batch.positions),
            kv_slots=batch.kv_slots,
            attend=attend,
        )
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        x = backend.rms_norm(residual, weights.layers[0].input_norm, eps)
        for i, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            attended = self_attention(x, layer.qkv, layer.o, kv.k[i], kv.v[i], step, backend, group)
            x = backend.add_rms_norm(attended, residual, layer.post_norm, eps)
            x = gated_mlp(x, layer.gate_up, layer.down, backend, group)
            x = backend.add_rms_norm(x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden [s, hidden] over this rank's part of the vocabulary: [s, v / size]."""
        return head(hidden, self._weights.head, self._backend)
