"""The seeded draw in one pass over the logits; `reference_sampling.gumbel` defines the noise, and says why so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corellm.kernels import reference_sampling

GOLDEN = tl.constexpr(reference_sampling.GOLDEN)
MIX_A = tl.constexpr(reference_sampling.MIX_A)
MIX_B = tl.constexpr(reference_sampling.MIX_B)
DRAW_BLOCK = 2048


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 13)) * MIX_B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(seed, position, ids):
    """Noise for ids (uint32 [b]) of one row: float32 [b]."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = _mix(_mix(_mix(low + GOLDEN) ^ high) + position.to(tl.uint32) * GOLDEN)
    k1 = _mix(k0 + GOLDEN)
    x = ids * GOLDEN + k0
    x = (x ^ (x >> 16)) * MIX_A + k1
    x = (x ^ (x >> 13)) * MIX_B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = tl.minimum((x.to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    # -log1p(-u): by its series where 1 - u would round away what matters.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u / 7))))))
    return -tl.log(tl.where(u < 0.0625, series, -tl.log(1 - u)))


@triton.jit
def draw_kernel(logits, seeds, positions, best, ids, vocab, blocks, BLOCK: tl.constexpr):
    """Grid: rows, blocks of the vocabulary. The largest logit + noise of each block, best [s, blocks], and its id."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    noise = _gumbel(tl.load(seeds + row), tl.load(positions + row), columns.to(tl.uint32))
    noisy = tl.load(logits + row * vocab + columns, mask=columns < vocab, other=-float("inf")) + noise
    value, index = tl.max(noisy, 0, return_indices=True)  # the first of equal ones
    tl.store(best + row * blocks + block, value)
    tl.store(ids + row * blocks + block, (block * BLOCK + index).to(tl.int64))


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `Backend.draw`; logits are contiguous float32."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, DRAW_BLOCK)
    best = logits.new_empty(rows, blocks)
    ids = torch.empty(rows, blocks, dtype=torch.int64, device=logits.device)
    draw_kernel[(rows, blocks)](logits, seeds, positions, best, ids, vocab, blocks, BLOCK=DRAW_BLOCK)
    return ids.masked_fill_(best < best.amax(-1, keepdim=True), vocab - 1).amin(-1)
