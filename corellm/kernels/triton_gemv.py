"""Matrix products of one or two rows, which memory bounds; what stands before and after a product is folded into it.

A program takes whole rows of the weight, and multiplies and adds in float32. Rounding is the reference's: normed
activations, every product and every sum of residuals are rounded to the activations' dtype.

With PDL (programmatic dependent launch) a kernel starts while the one before it still runs. It loads weights, which no
kernel writes, before `gdc_wait`; what other kernels write or still read it touches only behind that.

A thread holds 8 neighbouring elements of a tile at a time, so that tiles of x and of the weight are laid out alike, and
meet without a detour through shared memory, only where BLOCK_K is at least 256 a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["m"])
def held_linear_kernel(
    x,
    norm_weight,
    weight,
    out,
    m,
    n,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: blocks of ROWS * STEPS rows of weight [n, K]. out [m, n] = x [m, K], with NORM normed, times the weight.

    With ADD the product is added to what `out` holds. BLOCK_K is at least K, and BLOCK_M at least m.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    rows = tl.program_id(0) * ROWS * STEPS + tl.arange(0, ROWS)
    tile = _weight_rows(weight, rows, n, K, BLOCK_K)
    value = _activations(x, norm_weight, m, eps, K, BLOCK_M, BLOCK_K, NORM, PDL)
    for _ in range(STEPS - 1):
        following = _weight_rows(weight, rows + ROWS, n, K, BLOCK_K)  # on its way while this tile is multiplied
        _store_linear(out, _product(value, tile, dtype), rows, m, n, BLOCK_M, ADD)
        tile = following
        rows += ROWS
    _store_linear(out, _product(value, tile, dtype), rows, m, n, BLOCK_M, ADD)


@triton.jit(do_not_specialize=["m"])
def piped_linear_kernel(
    x,
    weight,
    out,
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: blocks of ROWS rows. As `held_linear_kernel` without NORM, for a K too wide to hold; BLOCK_K divides K."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    token = tl.arange(0, BLOCK_M)[:, None, None]
    weight += tl.minimum(rows, n - 1).to(tl.int64)[None, :, None] * K + columns
    x += token * K + columns
    first = tl.load(weight, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(x, mask=token < m, other=0.0).to(tl.float32) * first.to(tl.float32)
    for at in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        tile = tl.load(weight + at, eviction_policy="evict_first")
        value = tl.load(x + at, mask=token < m, other=0.0)
        total += value.to(tl.float32) * tile.to(tl.float32)
    result = tl.sum(total, 2).to(out.dtype.element_ty).to(tl.float32)
    _store_linear(out, result, rows, m, n, BLOCK_M, ADD)


@triton.jit(do_not_specialize=["m"])
def held_gated_kernel(
    x,
    norm_weight,
    weight,
    out,
    m,
    width,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: blocks of ROWS // 2 * STEPS columns of out [m, width] = silu(gate) * up of the normed x.

    weight [2 * width, K], the gate's rows in front: a program takes a row of the gate and its row of up side by side.
    """
    PAIRS: tl.constexpr = ROWS // 2
    dtype: tl.constexpr = out.dtype.element_ty
    first = tl.program_id(0) * PAIRS * STEPS
    columns = first + tl.arange(0, PAIRS)
    rows = first + tl.arange(0, ROWS) // 2 + tl.arange(0, ROWS) % 2 * width
    tile = _weight_rows(weight, rows, 2 * width, K, BLOCK_K)
    value = _activations(x, norm_weight, m, eps, K, BLOCK_M, BLOCK_K, True, PDL)
    for _ in range(STEPS - 1):
        rows += PAIRS
        following = _weight_rows(weight, rows, 2 * width, K, BLOCK_K)
        _store_gated(out, _product(value, tile, dtype), columns, m, width, BLOCK_M, PAIRS)
        tile = following
        columns += PAIRS
    _store_gated(out, _product(value, tile, dtype), columns, m, width, BLOCK_M, PAIRS)


@triton.jit(do_not_specialize=["m"])
def held_qkv_kernel(
    x,
    norm_weight,
    weight,
    cos,
    sin,
    kv_slots,
    q,
    k,
    v,
    m,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: blocks of ROWS // 2 * STEPS rotary pairs, over HEADS + 2 * KV_HEADS heads, of the normed x.

    weight [(HEADS + 2 * KV_HEADS) * DIM, K]; a program takes both rows of a pair. The rest as `rope_write_kv_kernel`.
    """
    HALF: tl.constexpr = DIM // 2
    N: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    PAIRS: tl.constexpr = ROWS // 2
    dtype: tl.constexpr = q.dtype.element_ty
    pairs = tl.program_id(0) * PAIRS * STEPS + tl.arange(0, PAIRS)
    of_row = tl.program_id(0) * PAIRS * STEPS + tl.arange(0, ROWS) // 2
    side = tl.arange(0, ROWS) % 2 * HALF
    tile = _weight_rows(weight, of_row // HALF * DIM + of_row % HALF + side, N, K, BLOCK_K)
    value = _activations(x, norm_weight, m, eps, K, BLOCK_M, BLOCK_K, True, PDL)
    for _ in range(STEPS - 1):
        of_row += PAIRS
        following = _weight_rows(weight, of_row // HALF * DIM + of_row % HALF + side, N, K, BLOCK_K)
        _store_rotated(
            _product(value, tile, dtype), pairs, cos, sin, kv_slots, q, k, v, m, HEADS, KV_HEADS, DIM, BLOCK_M, PAIRS
        )
        tile = following
        pairs += PAIRS
    _store_rotated(
        _product(value, tile, dtype), pairs, cos, sin, kv_slots, q, k, v, m, HEADS, KV_HEADS, DIM, BLOCK_M, PAIRS
    )


@triton.jit
def _weight_rows(weight, rows, n, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows [R] of weight [n, K], zeros from K on: [1, R, BLOCK_K]. A row beyond n reads the last one."""
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    at = weight + tl.minimum(rows, n - 1).to(tl.int64)[None, :, None] * K + columns
    if K == BLOCK_K:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=columns < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _activations(
    x,
    norm_weight,
    m,
    eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [m, K], with NORM its RMS norm, as float32 [BLOCK_M, 1, BLOCK_K]. Waits for the kernels before this one."""
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    if NORM:
        factor = tl.load(norm_weight + columns, mask=columns < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.arange(0, BLOCK_M)[:, None, None]
    value = tl.load(x + token * K + columns, mask=(token < m) & (columns < K), other=0.0)
    wide = value.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(wide * wide, 2) / K + eps)
        normed = (wide * scale[:, :, None]).to(value.dtype)
        wide = (normed.to(tl.float32) * factor).to(value.dtype).to(tl.float32)
    return wide


@triton.jit
def _product(x, tile, dtype: tl.constexpr):
    """x [M, 1, K] times tile [1, R, K]: float32 [M, R], rounded to `dtype`."""
    return tl.sum(x * tile.to(tl.float32), 2).to(dtype).to(tl.float32)


@triton.jit
def _store_linear(out, result, rows, m, n, BLOCK_M: tl.constexpr, ADD: tl.constexpr):
    token = tl.arange(0, BLOCK_M)[:, None]
    inside = (token < m) & (rows < n)[None, :]
    at = out + token * n + rows[None, :]
    if ADD:
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_gated(out, result, columns, m, width, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr):
    """result [BLOCK_M, 2 * PAIRS]: gate and up of each column side by side."""
    gate, up = tl.split(tl.reshape(result, [BLOCK_M, PAIRS, 2]))
    gated = gate / (1.0 + tl.exp(-gate)) * up
    token = tl.arange(0, BLOCK_M)[:, None]
    inside = (token < m) & (columns < width)[None, :]
    tl.store(out + token * width + columns[None, :], gated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_rotated(
    result,
    pairs,
    cos,
    sin,
    kv_slots,
    q,
    k,
    v,
    m,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """result [BLOCK_M, 2 * PAIRS]: the two values of each rotary pair side by side. Write them to q, k or v."""
    HALF: tl.constexpr = DIM // 2
    token = tl.arange(0, BLOCK_M)[:, None]
    head, place = (pairs // HALF)[None, :], (pairs % HALF)[None, :]
    live = token < m
    c = tl.load(cos + token * DIM + place, mask=live, other=0.0).to(tl.float32)
    s = tl.load(sin + token * DIM + HALF + place, mask=live, other=0.0).to(tl.float32)  # the half that is not negated
    slot = tl.load(kv_slots + token, mask=live, other=0)
    low, high = tl.split(tl.reshape(result, [BLOCK_M, PAIRS, 2]))
    is_value = head >= HEADS + KV_HEADS
    first = tl.where(is_value, low, low * c - high * s)
    second = tl.where(is_value, high, high * c + low * s)
    to_q = q + (token * HEADS + head) * DIM + place
    in_cache = (slot * KV_HEADS + (head - HEADS) % KV_HEADS) * DIM + place
    to = tl.where(head < HEADS, to_q, tl.where(is_value, v + in_cache, k + in_cache))
    inside = live & (head < HEADS + 2 * KV_HEADS)
    tl.store(to, first.to(q.dtype.element_ty), mask=inside)
    tl.store(to + HALF, second.to(q.dtype.element_ty), mask=inside)
