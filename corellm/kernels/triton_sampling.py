"""The seeded draw in one pass over the logits; `reference_sampling.gumbel` defines the noise, and says why so.

Arguments with one entry a row come from wherever an upload put them, so their alignment does not choose a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corellm.kernels import reference_sampling

COLDEST = tl.constexpr(reference_sampling.COLDEST)
GOLDEN = tl.constexpr(reference_sampling.GOLDEN)
MIX_A = tl.constexpr(reference_sampling.MIX_A)
MIX_B = tl.constexpr(reference_sampling.MIX_B)
INFINITY = tl.constexpr(float("inf"))
EXCLUDED, BROKEN = tl.constexpr(1), tl.constexpr(2)  # what a block may hold: -inf; NaN or +inf
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BLOCK = 2048


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * MIX_A
    x = (x ^ (x >> 13)) * MIX_B
    return x ^ (x >> 16)


@triton.jit
def _log(x):
    """Of a normal float: the GPU's own logarithm, good to 2^-22, since two full ones are half of a draw's work."""
    if INTERPRETED:
        log = tl.log(x)
    else:
        log = 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return log


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
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))))))
    return -_log(tl.where(u < 0.0625, series, -_log(1 - u)))


@triton.jit(do_not_specialize_on_alignment=["temperatures", "seeds", "positions"])
def best_of_block_kernel(
    logits, stride, vocab, temperatures, seeds, positions, best, ids, faults, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: rows, blocks of the vocabulary. Each block's largest value, its id, and the worst fault, each [s, blocks].

    A value is the logit of a cold row, else logit / temperature + noise.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    value = tl.load(logits + row * stride + columns, mask=inside, other=-INFINITY).to(tl.float32)
    value = tl.where(value != value, INFINITY, value)  # the largest of NaNs would have any id
    fault = tl.where(value == INFINITY, BROKEN, tl.where(inside & (value == -INFINITY), EXCLUDED, 0))
    temperature = tl.load(temperatures + row)
    if temperature >= COLDEST:
        noise = _gumbel(tl.load(seeds + row), tl.load(positions + row), columns.to(tl.uint32))
        value = tl.div_rn(value, temperature) + noise
    highest, index = tl.max(value, 0, return_indices=True)  # the first of equal ones
    at = row * tl.num_programs(1) + block
    tl.store(best + at, highest)
    tl.store(ids + at, block * BLOCK + index)
    tl.store(faults + at, tl.max(fault, 0))


@triton.jit
def best_of_row_kernel(best, ids, faults, tokens, failed, blocks, BLOCKS: tl.constexpr):
    """Grid: rows. From [s, blocks] to tokens and failed, each [s]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    fault = tl.max(tl.load(faults + row * blocks + block, mask=inside, other=0), 0)
    _, first = tl.max(tl.load(best + row * blocks + block, mask=inside, other=-INFINITY), 0, return_indices=True)
    token = tl.load(ids + row * blocks + first)
    tl.store(tokens + row, tl.where(fault == BROKEN, 0, token).to(tl.int64))
    tl.store(failed + row, fault > 0)


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference_sampling.sample`. Rows of logits may lie any stride apart; within a row they are contiguous."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    ids, faults = (torch.empty(rows, blocks, dtype=torch.int32, device=logits.device) for _ in range(2))
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(rows, dtype=torch.bool, device=logits.device)
    best_of_block_kernel[(rows, blocks)](
        logits, logits.stride(0), vocab, temperatures, seeds, positions, best, ids, faults, BLOCK=BLOCK
    )
    best_of_row_kernel[(rows,)](
        best, ids, faults, tokens, failed, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
    )  # fmt: skip
    return tokens, failed
