"""Sizes of kernels by device: measured where a device is listed, safe elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One way to compile the attention kernel, and to share its work out."""

    block_m: int  # packed query rows: tokens times the query heads of one KV head
    block_n: int  # positions of K and V at a time
    warps: int
    stages: int  # tiles of K and V in flight
    programs_per_sm: int  # that run at a time
    min_split: int  # KV tiles; a shorter piece is not worth a merge
    max_splits: int = 64


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """narrow: rows with few new tokens, which memory bounds. wide: longer ones, which arithmetic bounds."""

    narrow: AttentionTile
    wide: AttentionTile


HALF = AttentionTuning(  # bfloat16 and float16, on a card with 100 KB of shared memory or more
    narrow=AttentionTile(16, 64, warps=2, stages=2, programs_per_sm=2, min_split=4),
    wide=AttentionTile(64, 64, warps=4, stages=2, programs_per_sm=2, min_split=4),
)
FLOAT = AttentionTuning(  # float32, exact: a check of the others rather than a fast path
    narrow=AttentionTile(16, 32, warps=4, stages=2, programs_per_sm=2, min_split=8),
    wide=AttentionTile(32, 32, warps=4, stages=2, programs_per_sm=2, min_split=8),
)
HALF_BY_CAPABILITY = {  # H200: the best of 27 narrow and 13 wide tiles over the shapes of a server
    (9, 0): AttentionTuning(
        narrow=AttentionTile(16, 64, warps=2, stages=2, programs_per_sm=2, min_split=1),
        wide=AttentionTile(128, 64, warps=8, stages=3, programs_per_sm=1, min_split=4),
    ),
}


def attention_tuning(capability: tuple[int, int], dtype: torch.dtype) -> AttentionTuning:
    """The tuning for a device of this compute capability."""
    return HALF_BY_CAPABILITY.get(capability, HALF) if dtype.itemsize == 2 else FLOAT
