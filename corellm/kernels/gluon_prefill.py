"""Paged attention of many new tokens on Hopper, in Gluon: what Triton's own scheduling leaves of the tensor cores idle.

A program stays on its multiprocessor and takes one unit of work after another: an item of `attention_work` with one KV
head. Its warps have roles. One producer warp copies tiles of Q, K and V to shared memory through the tensor memory
accelerator (TMA). Two consumer warpgroups hold 64 packed query rows each and share the tiles of K and V.

Tiles of all units form one stream. Stage n of it holds K of tile n and V of tile n - 1, so that a consumer issues the
scores of a tile together with the weighted values of the tile before, across the border of two units too, and computes
its exponentials while the tensor cores work on. A unit's tiles run from its last positions to its first: the tiles that
need a causal mask come first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from corellm.kernels.attention_work import ITEM_FIELDS

# Renamed after Triton 3.6.
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

WARPGROUPS = 2
ROWS = 64  # packed query rows of a warpgroup: tokens times the query heads of one KV head
BLOCK_M = WARPGROUPS * ROWS
BLOCK_N = 128  # positions of K and V in a tile
DIM = 128
STAGES = 2  # tiles of K and V in flight
Q_STAGES = 2  # units whose Q is in shared memory: the one at work and the next
CONSUMER_REGISTERS = 232
PRODUCER_REGISTERS = 40

_ITEM_FIELDS = gl.constexpr(ITEM_FIELDS)
_WARPGROUPS = gl.constexpr(WARPGROUPS)
_ROWS = gl.constexpr(ROWS)
_BLOCK_M = gl.constexpr(BLOCK_M)
_BLOCK_N = gl.constexpr(BLOCK_N)
_DIM = gl.constexpr(DIM)
_STAGES = gl.constexpr(STAGES)
_Q_STAGES = gl.constexpr(Q_STAGES)
_TILE_BYTES = gl.constexpr(BLOCK_N * DIM * 2)
_Q_BYTES = gl.constexpr(BLOCK_M * DIM * 2)
_CONSUMER_REGISTERS = gl.constexpr(CONSUMER_REGISTERS)
_PRODUCER_REGISTERS = gl.constexpr(PRODUCER_REGISTERS)
_REPAIRED = gl.constexpr(8)  # rows of V cleared at a time: what a swizzle pattern spans

# Scores [ROWS, BLOCK_N] and outputs [ROWS, DIM] are laid out alike, and scores become weights without a move.
MMA = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
Q_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
KV_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_MMA = gl.constexpr(MMA)
_ROW = gl.constexpr(gl.SliceLayout(1, MMA))
_COLUMN = gl.constexpr(gl.SliceLayout(0, MMA))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
# 16 bytes a thread, rows kept in their warp: what a store to memory wants.
_STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, DIM],
    )
)
_REPAIR = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
_KV_LAYOUT = gl.constexpr(KV_LAYOUT)


@gluon.jit
def _unit(turn):
    """The unit of this program's turn. Items are sorted by length, so every other round deals them out in reverse."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _turns(units):
    """How many of `units` this program takes."""
    programs = gl.num_programs(0)
    rounds = (units + programs - 1) // programs
    return gl.where(_unit(rounds - 1) < units, rounds, rounds - 1)


@gluon.jit
def _item(items, unit, KV_HEADS: gl.constexpr):
    """The first seven fields of a unit's item, as `attention_work` says; the producer alone reads the eighth."""
    item = items + unit // KV_HEADS * _ITEM_FIELDS
    return (
        gl.load(item), gl.load(item + 1), gl.load(item + 2), gl.load(item + 3),
        gl.load(item + 4), gl.load(item + 5), gl.load(item + 6),
    )  # fmt: skip


@gluon.jit
def _cache_rows(table, first, last, PAGE: gl.constexpr, BOX: gl.constexpr):
    """Where in the cache, in tokens, the boxes of a tile begin. Boxes past `last` repeat its own."""
    rows = ()
    for i in gl.static_range(_BLOCK_N // BOX):
        position = gl.minimum(first + i * BOX, last)
        rows = rows + (gl.load(table + position // PAGE) * PAGE + position % PAGE // BOX * BOX,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _load_tile(cache, rows, kv_head, ready, tile, BOX: gl.constexpr):
    for i in gl.static_range(_BLOCK_N // BOX):
        _tma_load(cache, [rows[i], kv_head * _DIM], ready, tile.slice(i * BOX, BOX, 0))


@gluon.jit
def _load_queries(q, token, kv_head, queries, stage, GROUP: gl.constexpr):
    tiles, ready, _free = queries
    mbarrier.expect(ready.index(stage), _Q_BYTES)
    for i in gl.static_range(_WARPGROUPS):
        at = [token + i * (_ROWS // GROUP), kv_head * GROUP, 0]
        _tma_load(q, at, ready.index(stage), tiles.index(stage * _WARPGROUPS + i))


@gluon.jit
def _clear_after(tile, count):
    """Zero the rows of a tile of V from `count` on: a weight of 0 would not undo a NaN that lies there."""
    rows = gl.expand_dims(gl.arange(0, _REPAIRED, gl.SliceLayout(1, _REPAIR)), 1)
    for i in gl.static_range(_BLOCK_N // _REPAIRED):
        if count < (i + 1) * _REPAIRED:
            part = tile.slice(i * _REPAIRED, _REPAIRED, 0)
            values = part.load(_REPAIR)
            part.store(gl.where(rows + i * _REPAIRED < count, values, gl.full_like(values, 0)))
    fence_async_shared()


@gluon.jit
def _produce(
    q, k, v, items, table, table_stride, units, queries, stages, repaired,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Fill stages as they come free. After the last unit its first tile of K comes once more, for consumers to skip."""
    _q_tiles, _q_ready, q_free = queries
    k_tiles, v_tiles, ready, free = stages
    BOX: gl.constexpr = PAGE if PAGE < _BLOCK_N else _BLOCK_N
    turns = _turns(units)
    if turns > 0:
        unit = _unit(0)
        token, _tokens, row, _visible, start, stop, _slot = _item(items, unit, KV_HEADS)
        context = gl.load(items + unit // KV_HEADS * _ITEM_FIELDS + 7)
        kv_head = unit % KV_HEADS
        blocks = row.to(gl.int64) * table_stride
        first = (stop - 1) // _BLOCK_N * _BLOCK_N
        _load_queries(q, token, kv_head, queries, 0, GROUP)
        mbarrier.expect(ready.index(0), _TILE_BYTES)
        rows = _cache_rows(table + blocks, first, stop - 1, PAGE, BOX)
        _load_tile(k, rows, kv_head, ready.index(0), k_tiles.index(0), BOX)
        n = 1
        repairs = 0
        for turn in range(turns):
            next_unit = _unit(gl.minimum(turn + 1, turns - 1))
            token, _tokens, row, _visible, next_start, next_stop, _slot = _item(items, next_unit, KV_HEADS)
            next_context = gl.load(items + next_unit // KV_HEADS * _ITEM_FIELDS + 7)
            next_blocks = row.to(gl.int64) * table_stride
            tiles = (first - start) // _BLOCK_N
            for i in range(tiles + 1):
                v_rows = _cache_rows(table + blocks, first, stop - 1, PAGE, BOX)
                v_first, v_head, v_context = first, kv_head, context
                if i == tiles:
                    q_stage = (turn + 1) % _Q_STAGES
                    mbarrier.wait(q_free.index(q_stage), (turn + 1) // _Q_STAGES + 1 & 1)
                    kv_head = next_unit % KV_HEADS
                    _load_queries(q, token, kv_head, queries, q_stage, GROUP)
                    blocks, start, stop, context = next_blocks, next_start, next_stop, next_context
                    first = (stop - 1) // _BLOCK_N * _BLOCK_N
                else:
                    first -= _BLOCK_N
                k_rows = _cache_rows(table + blocks, first, stop - 1, PAGE, BOX)
                stage = n % _STAGES
                mbarrier.wait(free.index(stage), n // _STAGES + 1 & 1)
                v_tile = v_tiles.index(stage)
                if v_context - v_first < _BLOCK_N:
                    mbarrier.expect(repaired, _TILE_BYTES)
                    _load_tile(v, v_rows, v_head, repaired, v_tile, BOX)
                    mbarrier.wait(repaired, repairs & 1)
                    _clear_after(v_tile, v_context - v_first)
                    repairs += 1
                    mbarrier.expect(ready.index(stage), _TILE_BYTES)
                    _load_tile(k, k_rows, kv_head, ready.index(stage), k_tiles.index(stage), BOX)
                else:
                    mbarrier.expect(ready.index(stage), 2 * _TILE_BYTES)
                    _load_tile(k, k_rows, kv_head, ready.index(stage), k_tiles.index(stage), BOX)
                    _load_tile(v, v_rows, v_head, ready.index(stage), v_tile, BOX)
                n += 1


@gluon.jit
def _exp2(x):
    """2 ** x, to 0 where that would be denormal, which spares three instructions an element."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _pin(x):
    """int32 x, handed on by a shuffle with oneself: what is made of it cannot be computed ahead of a wait before."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _softmax(scores, peak, visible, first, scale, MASKED: gl.constexpr):
    """Weights [ROWS, BLOCK_N], decay of what was summed so far and new peak, both [ROWS], in units of log2."""
    if MASKED:
        # Or else 64 predicates are computed and spilled before the scores are even started.
        shown = gl.expand_dims(_pin(visible - first), 1)
        scores = gl.where(gl.expand_dims(gl.arange(0, _BLOCK_N, _COLUMN), 0) < shown, scores, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    base = new_peak
    if MASKED:  # a query that has seen nothing yet
        base = gl.where(new_peak == -float("inf"), 0.0, new_peak)
    return _exp2(scores * scale - gl.expand_dims(base, 1)), _exp2(peak - base), new_peak


@gluon.jit
def _advance(query, weights, acc, peak, total, n, visible, first, scale, stages, MASKED: gl.constexpr):
    """Stage n: add the values of tile n - 1, for which there are `weights`, and turn the scores of tile n into weights.

    Returns acc before the decay that belongs to the new weights, these weights, peak, total and decay.
    """
    k_tiles, v_tiles, ready, free = stages
    stage, phase = n % _STAGES, n // _STAGES & 1
    mbarrier.wait(ready.index(stage), phase)
    scores = gl.full([_ROWS, _BLOCK_N], 0.0, gl.float32, _MMA)
    scores = warpgroup_mma(query, k_tiles.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    new, decay, peak = _softmax(scores, peak, visible, first, scale, MASKED)
    total = total * decay + gl.sum(new, 1)
    new = gl.convert_layout(new.to(weights.dtype), _WEIGHTS)
    # This barrier is open already. Without a wait here, ptxas moves the next one ahead of the exponentials.
    mbarrier.wait(ready.index(stage), phase)
    acc, new, _weights = warpgroup_mma_wait(0, deps=[acc, new, weights])  # weights: in registers, read until here
    mbarrier.arrive(free.index(stage), count=1)
    return acc, new, peak, total, decay


@gluon.jit
def _store(out, acc, token, tokens, kv_head, first_local, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Write acc [ROWS, DIM], whose first token is `first_local` within its item, to `out` [n, HEADS * DIM]."""
    m = gl.arange(0, _ROWS, gl.SliceLayout(1, _STORED))
    dims = gl.arange(0, _DIM, gl.SliceLayout(0, _STORED))
    local = first_local + m // GROUP
    at = ((token + local).to(gl.int64) * HEADS + kv_head * GROUP + m % GROUP) * _DIM
    values = gl.convert_layout(acc.to(out.dtype.element_ty), _STORED)
    gl.store(out + gl.expand_dims(at, 1) + gl.expand_dims(dims, 0), values, mask=gl.expand_dims(local < tokens, 1))


@gluon.jit
def _store_partial(partials, stats, acc, stat, first):
    """Write acc [ROWS, DIM] and stat [ROWS] to rows `first`... of partials and stats."""
    m, dims = gl.arange(0, _ROWS, _ROW), gl.arange(0, _DIM, _COLUMN)
    gl.store(partials + first * _DIM + gl.expand_dims(m * _DIM, 1) + gl.expand_dims(dims, 0), acc)
    gl.store(stats + first + m, stat)


@gluon.jit
def _consume(
    items, out, partials, stats, units, scale, queries, stages, WARPGROUP: gl.constexpr,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Attention of this warpgroup's query rows, for all units of the program."""
    q_tiles, q_ready, q_free = queries
    k_tiles, _v_tiles, ready, free = stages
    first_local: gl.constexpr = WARPGROUP * (_ROWS // GROUP)
    local = first_local + gl.arange(0, _ROWS, _ROW) // GROUP
    nothing = gl.full([_ROWS], -float("inf"), gl.float32, _ROW)
    turns = _turns(units)
    if turns > 0:
        unit = _unit(0)
        token, tokens, _row, visible, start, stop, slot = _item(items, unit, KV_HEADS)
        first = (stop - 1) // _BLOCK_N * _BLOCK_N
        mbarrier.wait(q_ready.index(0), 0)
        mbarrier.wait(ready.index(0), 0)
        scores = gl.full([_ROWS, _BLOCK_N], 0.0, gl.float32, _MMA)
        query = q_tiles.index(WARPGROUP).reshape([_ROWS, _DIM])
        scores = warpgroup_mma(query, k_tiles.index(0).permute((1, 0)), scores, use_acc=False)
        mbarrier.arrive(free.index(0), count=1)
        weights, decay, peak = _softmax(scores, nothing, visible + gl.minimum(local, tokens - 1), first, scale, True)
        total = gl.sum(weights, 1)
        weights = gl.convert_layout(weights.to(k_tiles.dtype), _WEIGHTS)
        n = 1
        for turn in range(turns):
            next_unit = _unit(gl.minimum(turn + 1, turns - 1))
            next_token, next_tokens, _row, next_visible, next_start, stop, next_slot = _item(items, next_unit, KV_HEADS)
            q_stage = turn % _Q_STAGES
            query = q_tiles.index(q_stage * _WARPGROUPS + WARPGROUP).reshape([_ROWS, _DIM])
            acc = gl.full([_ROWS, _DIM], 0.0, gl.float32, _MMA)
            tiles = (first - start) // _BLOCK_N
            # Those that reach past what this warpgroup's first token sees, and one at least: ptxas 12.8 computes the
            # descriptors of `query` on the way into the masked loop, and the next one then reads what it never wrote.
            masked = gl.maximum(first - visible - first_local + _BLOCK_N - 1, _BLOCK_N) // _BLOCK_N
            masked = gl.minimum(masked, tiles)
            for i in range(masked):
                first -= _BLOCK_N
                limit = visible + gl.minimum(local, tokens - 1)
                acc, weights, peak, total, decay = _advance(
                    query, weights, acc, peak, total, n + i, limit, first, scale, stages, True
                )
                acc = acc * gl.expand_dims(decay, 1)
            for i in range(masked, tiles):
                acc, weights, peak, total, decay = _advance(
                    query, weights, acc, peak, total, n + i, local, first, scale, stages, False
                )
                acc = acc * gl.expand_dims(decay, 1)
            # Not counted inside the loops: Triton 3.6 drops from this one what only bounds inner ones (here `start`).
            n += tiles
            mbarrier.arrive(q_free.index(q_stage), count=1)

            # The last values of this unit, together with the first scores of the next.
            q_stage = (turn + 1) % _Q_STAGES
            mbarrier.wait(q_ready.index(q_stage), (turn + 1) // _Q_STAGES & 1)
            query = q_tiles.index(q_stage * _WARPGROUPS + WARPGROUP).reshape([_ROWS, _DIM])
            first = (stop - 1) // _BLOCK_N * _BLOCK_N
            limit = next_visible + gl.minimum(local, next_tokens - 1)
            acc, weights, next_peak, next_total, decay = _advance(
                query, weights, acc, nothing, gl.zeros_like(nothing), n, limit, first, scale, stages, True
            )
            n += 1
            acc = acc * gl.expand_dims(1.0 / gl.where(total == 0.0, 1.0, total), 1)
            if slot < 0:
                _store(out, acc, token, tokens, unit % KV_HEADS, first_local, HEADS, GROUP)
            else:
                part = (slot * KV_HEADS + unit % KV_HEADS).to(gl.int64) * _BLOCK_M + WARPGROUP * _ROWS
                _store_partial(partials, stats, acc, peak + gl.log2(total), part)
            unit, token, tokens, visible = next_unit, next_token, next_tokens, next_visible
            start, slot, peak, total = next_start, next_slot, next_peak, next_total


@gluon.jit(do_not_specialize=["table_stride"])
def prefill_attention_kernel(
    q, k, v, out, partials, stats, items, count, table, table_stride, scale,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Grid: any number of programs. out [n, HEADS * DIM]; `scale` holds log2(e).

    TMA descriptors: q of [n, HEADS, DIM] in boxes [ROWS // group, group, DIM]; k and v of the cache as
    [blocks * PAGE, KV_HEADS * DIM] in boxes [min(PAGE, BLOCK_N), DIM]. items: `count[0]` rows as `attention_work` says,
    longest first; table [r, table_stride] of block ids. partials [slots, KV_HEADS, BLOCK_M, DIM] and stats
    [slots, KV_HEADS, BLOCK_M], both float32.
    """
    GROUP: gl.constexpr = HEADS // KV_HEADS
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(q.dtype, [_Q_STAGES * _WARPGROUPS, _ROWS // GROUP, GROUP, _DIM], q.layout)
    k_tiles = gl.allocate_shared_memory(q.dtype, [_STAGES, _BLOCK_N, _DIM], _KV_LAYOUT)
    v_tiles = gl.allocate_shared_memory(q.dtype, [_STAGES, _BLOCK_N, _DIM], _KV_LAYOUT)
    q_ready = gl.allocate_shared_memory(gl.int64, [_Q_STAGES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [_Q_STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], BARRIER)
    repaired = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(repaired, count=1)
    for i in gl.static_range(_Q_STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_free.index(i), count=_WARPGROUPS)
    for i in gl.static_range(_STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=_WARPGROUPS)
    fence_async_shared()
    queries, stages = (q_tiles, q_ready, q_free), (k_tiles, v_tiles, ready, free)
    units = gl.load(count) * KV_HEADS
    gl.warp_specialize(
        [
            (_consume, (items, out, partials, stats, units, scale, queries, stages, 0, HEADS, KV_HEADS, GROUP)),
            (_consume, (items, out, partials, stats, units, scale, queries, stages, 1, HEADS, KV_HEADS, GROUP)),
            (_produce, (q, k, v, items, table, table_stride, units, queries, stages, repaired, KV_HEADS, GROUP, PAGE)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
