"""Self-attention over the paged cache, up to its output projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from corellm.kernels import Backend, PagedAttention
from corellm.kernels.inputs import Heads, Rope


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What all layers of one step share."""

    heads: Heads
    rope: Rope
    kv_slots: Tensor  # [n] int64
    attend: PagedAttention


def attention(
    x: Tensor, norm: Tensor, eps: float, qkv: Tensor, k: Tensor, v: Tensor, step: AttentionStep, backend: Backend
) -> Tensor:
    """x [n, hidden] before its norm; norm and qkv are this rank's weights, k and v its cache of this layer.

    Returns [n, heads * head_dim] of this rank's heads.
    """
    q = backend.norm_qkv(x, norm, eps, qkv, step.rope, step.heads, step.kv_slots, k, v)
    return step.attend(q, k, v)
