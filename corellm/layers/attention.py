"""Self-attention over the paged cache: QKV projection, rotation and KV write, attention, output projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from corellm.kernels import Backend, PagedAttention
from corellm.kernels.inputs import Heads, Rope
from corellm.layers.linear import column_parallel, row_parallel
from corellm.layers.parallel import Collectives


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What all layers of one step share."""

    heads: Heads
    rope: Rope
    kv_slots: Tensor  # [n] int64
    attend: PagedAttention


def self_attention(
    x: Tensor,
    qkv: Tensor,
    o: Tensor,
    k: Tensor,
    v: Tensor,
    step: AttentionStep,
    backend: Backend,
    group: Collectives,
) -> Tensor:
    """x [n, hidden], normed; qkv and o are this rank's weights, k and v its cache of this layer: [n, hidden]."""
    projected = column_parallel(x, qkv, backend)
    q = backend.rope_write_kv(projected, step.rope, step.heads, step.kv_slots, k, v)
    return row_parallel(step.attend(q, k, v), o, backend, group)
