"""Paged attention as a Triton kernel: tiles of queries against the KV blocks of their sequence.

One program takes one item of work: up to `BLOCK_M // group` query tokens of one sequence, with all query heads that
share a KV head packed into its rows, against a range of positions. A decode step and a prefill differ in the tile's
size alone. Where a sequence's positions are shared out over several programs, each leaves a partial result in
float32. The last one to do so merges them if the tile is narrow, and a second kernel does where there are many rows to
merge.

PDL is as in `triton_pointwise`, with three differences. The work list and the block table, which no kernel writes once
a step's first layer has begun, are read ahead of the wait. Programs without work, but for the first, do not wait. And
the next kernel is not launched before this one is done: the weights that it reads ahead would stand in the way of K, V
and the partial results.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from corellm.kernels.attention_work import ITEM_FIELDS, MERGE_FIELDS

_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_MERGE_FIELDS = tl.constexpr(MERGE_FIELDS)
_MERGED_AT_ONCE = tl.constexpr(16)  # splits, of no more than 64 rows in all


@triton.jit
def _cache_rows(table, first, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where K and V of positions first..first + BLOCK_N lie, in tokens from the cache's start.

    int64: one number where a tile lies within a block, else [BLOCK_N]. `first` is a multiple of BLOCK_N. Positions
    from `stop` on read no block table.
    """
    if PAGE % BLOCK_N == 0:
        rows = tl.load(table + first // PAGE, mask=first < stop, other=0).to(tl.int64) * PAGE + first % PAGE
    else:
        positions = first + tl.arange(0, BLOCK_N)
        pages = tl.load(table + positions // PAGE, mask=positions < stop, other=0).to(tl.int64)
        rows = pages * PAGE + positions % PAGE
    return rows


@triton.jit
def _attend_range(
    acc,
    peak,
    total,
    rows,
    query,
    k,
    v,
    table,
    visible,
    start,
    stop,
    end,
    scale,
    KV_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over positions start..stop: the new (acc [M, DIM], peak [M], total [M]), in units of log2.

    `rows` are those of the tile at `start`; they come back as those of the tile at `stop`, unless that is the `end`.
    Without MASKED every query sees every position, and stop - start is a multiple of BLOCK_N.
    """
    columns, dims = tl.arange(0, BLOCK_N), tl.arange(0, DIM)
    for first in range(start, stop, BLOCK_N):
        # Block ids are read one tile ahead, or the loads of K and V would each time wait for them.
        next_rows = _cache_rows(table, first + BLOCK_N, end, PAGE, BLOCK_N)
        if PAGE % BLOCK_N == 0:  # one address to compute, and offsets that do not change
            k_tile, v_tile = k + rows * KV_STRIDE, v + rows * KV_STRIDE
            offsets = columns * KV_STRIDE
        else:
            k_tile, v_tile = k, v
            offsets = rows * KV_STRIDE
        k_tile += offsets[None, :] + dims[:, None]
        v_tile += offsets[:, None] + dims[None, :]
        positions = first + columns
        if MASKED:
            # What lies past the end belongs to nobody: 0 times a NaN there would still be NaN.
            keys = tl.load(k_tile, mask=(positions < stop)[None, :], other=0.0)
            values = tl.load(v_tile, mask=(positions < stop)[:, None], other=0.0)
        else:
            keys = tl.load(k_tile)
            values = tl.load(v_tile)
        scores = tl.dot(query, keys, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(positions[None, :] < visible[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = new_peak
        if MASKED:  # a query that has seen nothing yet
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = tl.exp2(scores * scale - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        rows = next_rows
    return acc, peak, total, rows


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention_kernel(
    q,
    k,
    v,
    out,
    partials,
    stats,
    arrivals,
    work,
    counts,
    table,
    table_stride,
    q_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: items * KV_HEADS, or more. q [n, HEADS, DIM], rows q_stride apart; out [n, HEADS * DIM]; `scale` holds
    log2(e).

    k, v [blocks, PAGE, KV_HEADS, DIM]; work as `attention_work` says, counts [2] of its items and merges;
    table [slots, table_stride] of block ids.
    partials [slots, KV_HEADS, BLOCK_M, DIM] and stats [slots, KV_HEADS, BLOCK_M], both float32.
    With MERGE, arrivals int32 [slots, KV_HEADS] count, at a tile's first slot, its splits that are done: 0 before and
    after.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pid = tl.program_id(0)
    kv_head = pid % KV_HEADS  # neighbours read neighbouring heads of the same blocks
    item = work + (pid // KV_HEADS) * _ITEM_FIELDS
    inside = pid // KV_HEADS < tl.load(counts)
    token, tokens, row = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_visible, start, stop, slot = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    first_slot, splits = tl.load(item + 8), tl.load(item + 9)
    table += row.to(tl.int64) * table_stride
    rows = _cache_rows(table, start, tl.where(inside, stop, start), PAGE, BLOCK_N)
    if PDL and (inside | (pid == 0)):  # one in any case: the end of this kernel is to be that of those before it
        gdc_wait()
    if not inside:
        return

    m, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    local, head = m // GROUP, kv_head * GROUP + m % GROUP
    live = local < tokens
    at = token.to(tl.int64) + local
    query = tl.load(q + (at * q_stride + head * DIM)[:, None] + dims[None, :], mask=live[:, None], other=0.0)
    visible = first_visible + tl.minimum(local, tokens - 1)

    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k += kv_head * DIM
    v += kv_head * DIM
    for_all = first_visible // BLOCK_N * BLOCK_N  # up to here every query sees everything
    STRIDE: tl.constexpr = KV_HEADS * DIM
    middle = tl.maximum(tl.minimum(stop, for_all), start)
    acc, peak, total, rows = _attend_range(
        acc, peak, total, rows, query, k, v, table, visible, start, middle, stop, scale,
        STRIDE, DIM, PAGE, BLOCK_N, False, PRECISION,
    )  # fmt: skip
    acc, peak, total, rows = _attend_range(
        acc, peak, total, rows, query, k, v, table, visible, middle, stop, stop, scale,
        STRIDE, DIM, PAGE, BLOCK_N, True, PRECISION,
    )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if slot < 0:
        place = out + (at * HEADS + head)[:, None] * DIM + dims[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=live[:, None])
    else:
        part = (slot.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M + m
        tl.store(partials + part[:, None] * DIM + dims[None, :], acc, mask=live[:, None])
        tl.store(stats + part, peak + tl.log2(total), mask=live)
        if MERGE:
            arrived = arrivals + first_slot * KV_HEADS + kv_head
            tl.debug_barrier()  # the program's own part is written by all its threads, and announced by one
            if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(arrived, 0)
                origin = (first_slot.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_M
                for i in range(tokens):
                    _store_merged(
                        out + ((token + i).to(tl.int64) * HEADS + kv_head * GROUP) * DIM,
                        partials, stats, origin + i * GROUP, splits, KV_HEADS * BLOCK_M, GROUP, DIM,
                    )  # fmt: skip


@triton.jit
def _store_merged(out, partials, stats, origin, splits, STEP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr):
    """out [HEADS, DIM] of one query token from its `splits` partial results, in rows origin + split * STEP + head."""
    GROUP: tl.constexpr = triton.next_power_of_2(HEADS)
    AT_ONCE: tl.constexpr = _MERGED_AT_ONCE if GROUP <= 4 else triton.cdiv(64, GROUP)
    head, dims = tl.arange(0, GROUP), tl.arange(0, DIM)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    peak = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    for at in range(0, splits, AT_ONCE):
        split = at + tl.arange(0, AT_ONCE)
        part = (origin + split * STEP)[:, None] + tl.minimum(head, HEADS - 1)[None, :]
        inside = (split < splits)[:, None]
        # Not by way of the L1 cache, which may hold what an earlier layer left there.
        stat = tl.load(stats + part, mask=inside, other=-float("inf"), cache_modifier=".cg")
        place = partials + part[:, :, None] * DIM + dims[None, None, :]
        value = tl.load(place, mask=inside[:, :, None], other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(stat, 0))  # finite: every query sees position 0, in the first split
        weights = tl.exp2(stat - new_peak[None, :])
        decay = tl.exp2(peak - new_peak)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * value, 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * DIM + dims[None, :], result, mask=(head < HEADS)[:, None])


@triton.jit
def merge_partials_kernel(
    partials,
    stats,
    out,
    work,
    counts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: merges * HEADS, or more. One query token and head from the partial results of its splits; counts as in
    `paged_attention_kernel`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if pid // HEADS >= tl.load(counts + 1):
        return
    head = pid % HEADS
    merge = work + (pid // HEADS) * _MERGE_FIELDS
    token, local, first, splits = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3)
    origin = (first.to(tl.int64) * KV_HEADS + head // GROUP) * BLOCK_M + local * GROUP + head % GROUP
    place = out + (token.to(tl.int64) * HEADS + head) * DIM
    _store_merged(place, partials, stats, origin, splits, KV_HEADS * BLOCK_M, 1, DIM)
