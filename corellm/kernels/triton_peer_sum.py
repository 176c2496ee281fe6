"""The sum of a tensor over the ranks of a tensor-parallel group, in one kernel that reads every rank's part itself.

For the few rows of a decode step this takes a fraction of what a ring takes: each rank tells the others that its part
is written, waits until theirs are, reads them over NVLink, and adds in the order of ranks, so that all ranks get the
same bits. There is no second round to say that reading is over: see `add_peer_sum_kernel` for what stands in for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024  # elements
MAX_PROGRAMS = 256  # all of them run at the same time on any card that this is for


@triton.jit(do_not_specialize=["part", "flags"])
def add_peer_sum_kernel(
    peers,
    residual,
    part,
    flags,
    count,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: programs that take the blocks of residual [count] in turn, the same number on every rank.

    peers: SIZE addresses, of each rank's memory. At byte `part` of it are `count` elements of residual's dtype, aligned
    to 16 bytes, and at byte `flags` int32 [programs, SIZE], which are 0 before and after.

    A rank raises its flag in the others' memory and lowers those in its own. Flags and part of one call must not be
    those of the call before or after it on the same ranks. Then nothing is overwritten that is still read: who gets
    through the next call knows that all others have begun it, and so have ended this one.
    """
    program = tl.program_id(0)
    own = peers[RANK] + flags + program * SIZE * 4
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            raised = peers[peer] + flags + (program * SIZE + RANK) * 4
            tl.atomic_xchg(raised.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            lowered = (own + peer * 4).to(tl.pointer_type(tl.int32))
            while tl.atomic_cas(lowered, 1, 0, sem="acquire", scope="sys") == 0:
                pass
    element: tl.constexpr = residual.dtype.element_ty
    for start in range(program * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.zeros([BLOCK], tl.float32)
        for peer in tl.static_range(SIZE):
            values = tl.multiple_of((peers[peer] + part).to(tl.pointer_type(element)), 16)
            total += tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + at, total.to(element), mask=inside)


def add_peer_sum(residual: Tensor, peers: tuple[int, ...], part: int, flags: int, rank: int, *, pdl: bool) -> None:
    """Add the ranks' parts to residual, contiguous and of any shape; see `add_peer_sum_kernel`."""
    count = residual.numel()
    programs = min(triton.cdiv(count, BLOCK), MAX_PROGRAMS)
    add_peer_sum_kernel[(programs,)](
        peers, residual, part, flags, count,
        RANK=rank, SIZE=len(peers), BLOCK=BLOCK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
