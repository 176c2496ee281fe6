"""Which tiles `benchmarks.tune_gemm` tries for a product of few rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from corellm.kernels.gemm_tuning import GemmTile, HeldTile, PipedTile, Tile

_SHARED_BYTES = 225 << 10  # of a multiprocessor that one program may take
_LEAST_PROGRAMS = 96  # fewer leave too many multiprocessors without work
_PIPED = {
    1: ((4, 1024, 2, 3), (8, 1024, 2, 3), (8, 1024, 4, 3), (16, 1024, 4, 3), (4, 2048, 4, 3)),
    2: ((4, 512, 1, 4), (4, 512, 2, 4), (8, 512, 2, 4), (4, 1024, 2, 3), (4, 1024, 4, 3)),
}
_CAPS = {(1, 32): (64,), (1, 64): (64, 80), (2, 32): (80, None), (2, 64): (104, None)}  # registers by width, elements
_GEMM = (
    (16, 512, 2, 4), (32, 256, 2, 3), (32, 256, 2, 4), (32, 512, 2, 4), (32, 512, 4, 3), (32, 512, 4, 4),
    (64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 8, 4),
)  # fmt: skip


def candidates(n: int, k: int, width: int, *, fused: bool) -> Iterator[Tile]:
    """Tiles for `width` rows and a bfloat16 weight [n, k]; with `fused`, for one that has a fused form."""
    if width <= 2:
        yield from _held(k, width)
    if width in _PIPED and not fused:
        yield from (PipedTile(*sizes) for sizes in _PIPED[width] if k % sizes[1] == 0)
    if width > 1:
        yield from (tile for tile in (GemmTile(*sizes) for sizes in _GEMM) if _fits(tile, n, k, width))


def _held(k: int, width: int) -> Iterator[HeldTile]:
    """Tiles of which a thread holds 32 or 64 elements of the weight, and no more of a row of x."""
    block_k = 1 << (k - 1).bit_length()
    for rows, warps in product((2, 4, 8), (4, 8, 16)):
        each = rows * block_k // (warps * 32)
        if each not in (32, 64) or block_k < warps * 256 or warps > max(8, block_k // 512):
            continue
        yield HeldTile(rows, warps, steps=1)
        for registers in _CAPS[width, each]:
            yield HeldTile(rows, warps, steps=2, registers=registers)


def _fits(tile: GemmTile, n: int, k: int, width: int) -> bool:
    shared = (tile.block_n + width) * tile.block_k * 2 * tile.stages
    if tile.block_n < width:  # more bytes of x than of the weight
        return False
    return k % tile.block_k == 0 and shared <= _SHARED_BYTES and n >= _LEAST_PROGRAMS * tile.block_n
