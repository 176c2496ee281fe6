"""Changes to logits before a draw, in place and without the host: penalties, and the bit mask of a grammar."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INFINITY = tl.constexpr(float("inf"))
BLOCK = 4096  # logits of a program
SPAN = 1024  # tokens that a program looks at together
WARPS = 8
PROGRAMS = 1024  # at most; each has memory of its own for the counts of one block
SEEN = tl.constexpr(1 << 30)  # in a count: the token is in the prompt. Below it, how often it is in the output


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["slots", "lengths", "prompt_lengths", "penalties"],
)
def penalize_kernel(
    logits, vocab, rows, table, table_stride, slots, lengths, prompt_lengths, penalties, counts,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid: programs, which share blocks of rows. counts: int32 [programs, BLOCK] memory to work in."""
    lane = tl.arange(0, BLOCK)
    blocks = tl.cdiv(vocab, BLOCK)
    counts += tl.program_id(0).to(tl.int64) * BLOCK
    for item in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0)):
        row, first = (item // blocks).to(tl.int64), item % blocks * BLOCK
        repetition = tl.load(penalties + row)
        presence = tl.load(penalties + rows + row)
        frequency = tl.load(penalties + 2 * rows + row)
        if (repetition != 1) | (presence != 0) | (frequency != 0):
            tl.debug_barrier()  # every thread has read the counts of the block before
            tl.store(counts + lane, tl.zeros([BLOCK], tl.int32))
            tl.debug_barrier()
            tokens = table + tl.load(slots + row) * table_stride
            length, prompt = tl.load(lengths + row), tl.load(prompt_lengths + row)
            for start in tl.range(0, length, SPAN):
                at = start + tl.arange(0, SPAN)
                place = tl.load(tokens + at, mask=at < length, other=-1) - first
                here = (place >= 0) & (place < BLOCK)
                tl.atomic_or(counts + place, SEEN, mask=here & (at < prompt), sem="relaxed")
                tl.atomic_add(counts + place, 1, mask=here & (at >= prompt), sem="relaxed")
            tl.debug_barrier()
            count = tl.load(counts + lane)
            pointers = logits + row * vocab + first + lane
            value = tl.load(pointers, mask=first + lane < vocab, other=0.0)
            repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
            value = tl.where(count != 0, repeated, value)
            outputs = count & (SEEN - 1)
            value -= frequency * outputs.to(tl.float32) + tl.where(outputs > 0, presence, 0.0)
            tl.store(pointers, value, mask=(count != 0) & (first + lane < vocab))


@triton.jit(do_not_specialize_on_alignment=["mask"])
def apply_bitmask_kernel(logits, vocab, mask, words, BLOCK: tl.constexpr):
    """Grid: rows, blocks. mask: int32 [s, words]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    bits = tl.load(mask + row * words + columns // 32, mask=inside, other=0)
    at = logits + row * vocab + columns
    allowed = ((bits >> (columns % 32)) & 1) != 0
    tl.store(at, tl.where(allowed, tl.load(at, mask=inside, other=0.0), -INFINITY), mask=inside)


def penalize(
    logits: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor, penalties: Tensor
) -> Tensor:
    """See `reference_sampling.penalize`; logits and penalties are contiguous."""
    rows, vocab = logits.shape
    programs = min(rows * triton.cdiv(vocab, BLOCK), PROGRAMS)
    counts = torch.empty(programs, BLOCK, dtype=torch.int32, device=logits.device)
    penalize_kernel[(programs,)](
        logits, vocab, rows, table, table.stride(0), slots, lengths, prompt_lengths, penalties, counts,
        BLOCK=BLOCK, SPAN=SPAN, num_warps=WARPS,
    )  # fmt: skip
    return logits


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """See `reference_sampling.apply_bitmask`; both are contiguous."""
    rows, vocab = logits.shape
    apply_bitmask_kernel[(rows, triton.cdiv(vocab, BLOCK))](logits, vocab, mask, mask.shape[1], BLOCK=BLOCK)
    return logits
