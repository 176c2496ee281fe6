"""Min-p, top-k and top-p without sorting and without the host: for each row one threshold on its logits.

What a threshold is worth (how many logits reach it, or how much probability) falls as it rises, so the right one is
found by bisection. Passes over the whole row, which stays in the L2 cache, narrow the range until few logits are left
in it; those move to registers, where bisection goes on down to neighbouring floats. Thresholds are held as keys:
int32 in the order of the floats, here widened to int64 so that differences do not overflow.

One program searches a row, so that sums are added in one order and a seed gives the same token every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

INFINITY = tl.constexpr(float("inf"))
BLOCK = 4096  # logits of a program where programs share a row
CHUNK = 4096  # logits of a step of a pass over a row
HELD = 8192  # logits that are bisected in registers
WARPS = 16
PER_ROW = ["top_k", "top_p", "min_p", "maxima", "minima", "masses"]  # lie anywhere, which must not compile anew


@triton.jit
def _key(value):
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """A key between two that are more than 1 apart, half-way between their values where that is one."""
    low_value = _value(low)
    middle = _key(low_value + (_value(high) - low_value) * 0.5)
    return tl.where((middle > low) & (middle < high), middle, low + (high - low) // 2)


@triton.jit
def _tail(row, vocab, key, largest, CHUNK: tl.constexpr):
    """Of the logits at or above a finite `key`: the sum of exp(logit - largest), and how many they are."""
    least = _value(key)
    mass = tl.zeros([CHUNK], tl.float32)
    count = tl.zeros([CHUNK], tl.int32)
    for start in tl.range(0, vocab, CHUNK, loop_unroll_factor=4):
        columns = start + tl.arange(0, CHUNK)
        value = tl.load(row + columns, mask=columns < vocab, other=-INFINITY)
        reached = value >= least
        mass += tl.where(reached, tl.exp(value - largest), 0.0)
        count += reached.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def _gather(row, vocab, low, high, held, CHUNK: tl.constexpr):
    """Write the logits from key `low` to below key `high` to `held`, in order. Returns how many they are."""
    least, most = _value(low), _value(high)
    found = 0
    for start in tl.range(0, vocab, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        value = tl.load(row + columns, mask=columns < vocab, other=-INFINITY)
        wanted = (value >= least) & (value < most)
        place = found + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(held + place, value, mask=wanted)
        found += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _search(
    row, vocab, held, low, high, count, target, largest, BY_MASS: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr
):  # fmt: skip
    """The highest key that is worth `target`: a number of logits, or with BY_MASS a sum of exp(logit - largest).

    low: a key that is worth it, reached by `count` logits; high: one above all logits.
    """
    above = target * 0  # what `high` is worth, and how many logits reach it
    beyond = count * 0
    while (high - low > 1) & (count - beyond > HELD):
        key = _middle(low, high)
        mass, reached = _tail(row, vocab, key, largest, CHUNK)
        worth = mass if BY_MASS else reached.to(tl.float32)
        if worth >= target:
            low, count = key, reached
        else:
            high, beyond, above = key, reached, worth
    if high - low > 1:
        found = _gather(row, vocab, low, high, held, CHUNK)
        at = tl.arange(0, HELD)
        value = tl.load(held + at, mask=at < found, other=-INFINITY)
        weight = tl.exp(value - largest) if BY_MASS else tl.full([HELD], 1.0, tl.float32)
        while high - low > 1:
            key = low + (high - low) // 2
            if above + tl.sum(tl.where(value >= _value(key), weight, 0.0), 0) >= target:
                low = key
            else:
                high = key
    return low


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def summarize_kernel(logits, vocab, top_k, top_p, min_p, maxima, minima, masses, BLOCK: tl.constexpr):
    """Grid: rows, blocks. Of rows to truncate, [s, blocks]: the largest logit, the least that is not -inf, and the sum
    of exp(logit - largest of the block)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1) | (tl.load(min_p + row) > 0):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + columns, mask=columns < vocab, other=-INFINITY)
        finite = value > -INFINITY
        largest = tl.max(value, 0)
        at = row * tl.num_programs(1) + block
        tl.store(maxima + at, largest)
        tl.store(minima + at, tl.min(tl.where(finite, value, INFINITY), 0))
        tl.store(masses + at, tl.sum(tl.where(finite, tl.exp(value - largest), 0.0), 0))


@triton.jit(do_not_specialize_on_alignment=PER_ROW)
def threshold_kernel(
    logits, vocab, top_k, top_p, min_p, maxima, minima, masses, blocks, held, thresholds,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Grid: rows. The least logit that is kept, thresholds [s]; -inf for rows with nothing to truncate.

    held: [s, HELD] memory to work in.
    """
    row = tl.program_id(0).to(tl.int64)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = -INFINITY
    if (k > 0) | (p < 1) | (least > 0):
        block = tl.arange(0, BLOCKS)
        at, inside = row * blocks + block, block < blocks
        peaks = tl.load(maxima + at, mask=inside, other=-INFINITY)
        largest = tl.max(peaks, 0)
        lowest = tl.min(tl.load(minima + at, mask=inside, other=INFINITY), 0)
        mass = tl.sum(tl.load(masses + at, mask=inside, other=0.0) * tl.exp(peaks - largest), 0)
        count = vocab
        logits += row * vocab
        held += row * HELD
        high = _key(largest) + 1
        low = _key(tl.maximum(lowest, largest + tl.log(least)))
        kept = low
        if (k > 0) | ((p < 1) & (least > 0)):
            mass, count = _tail(logits, vocab, low, largest, CHUNK)
        total = mass
        if (k > 0) & (k < count):
            kept = _search(logits, vocab, held, low, high, count, k.to(tl.float32), largest, False, CHUNK, HELD)
            low = kept + 1
            mass, count = _tail(logits, vocab, low, largest, CHUNK)
            total = mass + (k - count) * tl.exp(_value(kept) - largest)  # of equal ones, as many as k has room for
        if (p < 1) & (mass >= p * total):
            kept = _search(logits, vocab, held, low, high, count, p * total, largest, True, CHUNK, HELD)
        threshold = tl.minimum(_value(kept), largest)  # the likeliest stays, whatever top-p is
    tl.store(thresholds + row, threshold)


@triton.jit
def mask_kernel(logits, vocab, thresholds, BLOCK: tl.constexpr):
    """Grid: rows, blocks. -inf in place of the logits below their row's threshold."""
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.load(thresholds + row)
    if threshold > -INFINITY:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = logits + row * vocab + columns
        value = tl.load(at, mask=columns < vocab, other=0.0)
        tl.store(at, tl.where(value < threshold, -INFINITY, value), mask=columns < vocab)


def mask_unlikely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `reference_sampling.mask_unlikely`; logits are contiguous."""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    summary = logits.new_empty(3, rows, blocks)
    held, thresholds = logits.new_empty(rows, HELD), logits.new_empty(rows)
    summarize_kernel[(rows, blocks)](logits, vocab, top_k, top_p, min_p, *summary, BLOCK=BLOCK)
    threshold_kernel[(rows,)](
        logits, vocab, top_k, top_p, min_p, *summary, blocks, held, thresholds,
        BLOCKS=triton.next_power_of_2(blocks), CHUNK=CHUNK, HELD=HELD, num_warps=WARPS,
    )  # fmt: skip
    mask_kernel[(rows, blocks)](logits, vocab, thresholds, BLOCK=BLOCK)
    return logits
