"""What lies between the matrix products, one pass over memory each: norms, rotation with KV write, gated activation.

Arithmetic is in float32; results are rounded where the reference backend rounds a norm, and once elsewhere. With PDL
a kernel starts while the one before it ends, and touches what others write only behind `gdc_wait`, in every program: a
kernel whose programs did not all wait might end before the one ahead of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from corellm.kernels.inputs import Heads, Rope

ROPE_HEADS = 8
SILU_BLOCK = 1024
LOCATE_BLOCK = 128  # tokens


@triton.jit
def rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: rows of x [n, WIDTH]."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)).to(value.dtype)
    tl.store(out + at, (normed.to(tl.float32) * factor).to(value.dtype), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: rows, blocks of `width`. gate_up [n, 2 * width], gate in front; out [n, width]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_write_kv_kernel(
    qkv,
    cos,
    sin,
    kv_slots,
    q,
    k,
    v,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: tokens, blocks of BLOCK_H among the HEADS + 2 * KV_HEADS heads of a token. cos and sin as in `Rope`."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    source = qkv + token * ALL * DIM + head * DIM + pair
    low = tl.load(source, mask=head < ALL, other=0.0)
    high = tl.load(source + HALF, mask=head < ALL, other=0.0)
    c = tl.load(cos + token * DIM + pair).to(tl.float32)
    s = tl.load(sin + token * DIM + HALF + pair).to(tl.float32)  # the half that is not negated
    turned_low = (low.to(tl.float32) * c - high.to(tl.float32) * s).to(low.dtype)
    turned_high = (high.to(tl.float32) * c + low.to(tl.float32) * s).to(low.dtype)

    to_q = q + (token * HEADS + head) * DIM + pair
    tl.store(to_q, turned_low, mask=head < HEADS)
    tl.store(to_q + HALF, turned_high, mask=head < HEADS)
    slot = tl.load(kv_slots + token) * KV_HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    to_k = k + (slot + head - HEADS) * DIM + pair
    tl.store(to_k, turned_low, mask=is_key)
    tl.store(to_k + HALF, turned_high, mask=is_key)
    is_value = (head >= HEADS + KV_HEADS) & (head < ALL)
    to_v = v + (slot + head - HEADS - KV_HEADS) * DIM + pair
    tl.store(to_v, low, mask=is_value)
    tl.store(to_v + HALF, high, mask=is_value)


@triton.jit(do_not_specialize=["count"])
def locate_kernel(
    slots, positions, tokens, table, found, places, kv_slots, count, tokens_stride, table_stride,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of the step's `count` tokens; see `Backend.locate`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    slot = tl.load(slots + at, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + at, mask=inside, other=0).to(tl.int64)
    tl.store(found + at, tl.load(tokens + slot * tokens_stride + position, mask=inside, other=0), mask=inside)
    tl.store(places + at, position, mask=inside)
    block = tl.load(table + slot * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(kv_slots + at, block * PAGE + position % PAGE, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool) -> Tensor:
    """See `Backend.rms_norm`."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(x.numel() // width,)](
        x, weight, out, eps, WIDTH=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out


def locate(
    slots: Tensor, positions: Tensor, tokens: Tensor, block_table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.locate`."""
    count = len(slots)
    found = torch.empty_like(slots)
    places, kv_slots = torch.empty(2, count, dtype=torch.int64, device=slots.device)
    locate_kernel[(triton.cdiv(count, LOCATE_BLOCK),)](
        slots, positions, tokens, block_table, found, places, kv_slots, count, tokens.stride(0), block_table.stride(0),
        PAGE=page_size, BLOCK=LOCATE_BLOCK, num_warps=1,
    )  # fmt: skip
    return found, places, kv_slots


def silu_mul(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """See `Backend.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        gate_up, out, width, BLOCK=SILU_BLOCK, PDL=pdl, launch_pdl=pdl
    )  # fmt: skip
    return out


def rope_write_kv(
    qkv: Tensor, rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor, *, pdl: bool
) -> Tensor:
    """See `Backend.rope_write_kv`. head_dim is a power of 2."""
    tokens, every = qkv.shape[0], heads.count + 2 * heads.kv
    q = qkv.new_empty(tokens, heads.count, heads.dim)
    rope_write_kv_kernel[(tokens, triton.cdiv(every, ROPE_HEADS))](
        qkv, rope.cos, rope.sin, kv_slots, q, k, v,
        HEADS=heads.count, KV_HEADS=heads.kv, DIM=heads.dim, BLOCK_H=ROPE_HEADS, num_warps=2,
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return q
