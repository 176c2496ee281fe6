"""Matrix products of few rows on the tensor cores, bounded by the weight's way from memory.

The weight is the wide operand: out transposed [n, m] = weight [n, k] times x transposed [k, m]. So it is m, not n, that
is padded to what a matrix instruction takes, and n that is shared out over programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["m"])
def gemm_kernel(
    x,
    weight,
    out,
    m,
    n,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: blocks of BLOCK_N rows of weight [n, K]. out [m, n] = x [m, K] times weight transposed.

    With ADD the product, rounded, is added to what `out` holds. BLOCK_M is at least m, and BLOCK_K divides K.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    weight += tl.minimum(rows, n - 1).to(tl.int64)[:, None] * K + columns[None, :]
    x += tokens[None, :] * K + columns[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for at in range(0, K, BLOCK_K):
        tile = tl.load(weight + at, eviction_policy="evict_first")
        value = tl.load(x + at, mask=(tokens < m)[None, :], other=0.0)
        acc = tl.dot(tile, value, acc, input_precision=PRECISION)
    result = acc.to(out.dtype.element_ty)
    inside = (rows < n)[:, None] & (tokens < m)[None, :]
    place = out + tokens[None, :] * n + rows[:, None]
    if ADD:
        result = (result.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(result.dtype)
    tl.store(place, result, mask=inside)
