"""Launches the Gluon kernel for rows with many new tokens, where card, release of Triton and shapes allow it."""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import torch
from torch import Tensor

from corellm.kernels.inputs import Heads
from corellm.kernels.tuning import AttentionTile

TRITON_RELEASES = ((3, 6),)  # Gluon moves between releases; with these the kernel has run on the card
HEAD_DIM = 128
SMALLEST_PAGE = 64  # more boxes a tile than two spill the producer's registers
TILE = AttentionTile(block_m=128, block_n=128, warps=4, stages=2, programs_per_sm=1, min_split=4)
"""For `plan_work`: the sizes that `gluon_prefill` is written for."""


def supports(heads: Heads, dtype: torch.dtype, page_size: int, capability: tuple[int, int]) -> bool:
    """Whether `HopperPrefill` can take such rows. Elsewhere the portable kernel does."""
    return (
        capability == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and heads.dim == HEAD_DIM
        and _is_power_of_2(heads.group)
        and heads.group <= TILE.block_m // 2
        and _is_power_of_2(page_size)
        and page_size >= SMALLEST_PAGE
        and _triton_release() in TRITON_RELEASES
    )


class HopperPrefill:
    """The kernel for one geometry. `programs` is the number of multiprocessors: each keeps one program busy."""

    def __init__(self, heads: Heads, page_size: int, programs: int) -> None:
        from corellm.kernels import gluon_prefill

        self._heads, self._page_size, self._programs = heads, page_size, programs
        self._kernel = gluon_prefill.prefill_attention_kernel
        self._q_box = [TILE.block_m // 2 // heads.group, heads.group, heads.dim]
        self._kv_box = [min(page_size, TILE.block_n), heads.dim]
        self._q_layout, self._kv_layout = gluon_prefill.Q_LAYOUT, gluon_prefill.KV_LAYOUT

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        items: Tensor,
        count: Tensor,
        table: Tensor,
        partials: Tensor,
        stats: Tensor,
    ) -> None:
        """Attention of the first `count[0]` of `items`, which `plan_work` makes with `TILE`.

        q [n, heads, head_dim], its last two dimensions contiguous; k, v [blocks, page_size, kv_heads, head_dim] and out
        [n, heads * head_dim] contiguous; items int32 [i, ITEM_FIELDS]; table int32 [rows, blocks]; partials
        [slots, kv_heads, block_m, head_dim] and stats [slots, kv_heads, block_m], both float32.
        """
        heads = self._heads
        self._kernel[(self._programs,)](
            _descriptor(q, self._q_box, self._q_layout),
            _descriptor(k.view(-1, heads.kv * heads.dim), self._kv_box, self._kv_layout),
            _descriptor(v.view(-1, heads.kv * heads.dim), self._kv_box, self._kv_layout),
            out, partials, stats, items, count, table, table.stride(0), heads.scale * math.log2(math.e),
            HEADS=heads.count, KV_HEADS=heads.kv, PAGE=self._page_size, num_warps=TILE.warps,
        )  # fmt: skip


def _descriptor(x: Tensor, box: list[int], layout: Any) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, layout)


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _triton_release() -> tuple[int, int]:
    """(0, 0) where Triton is not installed."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
