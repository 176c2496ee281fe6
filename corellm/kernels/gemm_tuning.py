"""How to multiply few rows of activations with a weight, by device and shape: data that `benchmarks.tune_gemm` makes.

Where a shape has no tile for a number of rows, cuBLAS is as fast or faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WIDTHS = (1, 2, 8, 16, 32)  # rows of activations that a kernel is compiled for; fewer are padded
_HELD_K = 8192  # elements of a row of x that a program can keep in its registers beside the weight


@dataclass(frozen=True, slots=True)
class HeldTile:
    """A program holds x whole, in registers, and multiplies it with `rows` rows of the weight, `steps` times.

    These are the kernels into which norm, rotation and gated activation are folded.
    """

    rows: int
    warps: int
    steps: int
    registers: int | None = None  # a thread may use; fewer let more programs share a multiprocessor


@dataclass(frozen=True, slots=True)
class PipedTile:
    """x and `rows` rows of the weight pass through shared memory in pieces of `block_k`, `stages` of them in flight."""

    rows: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class GemmTile:
    """The tensor cores multiply `block_n` rows of the weight with x, in pieces of `block_k`, `stages` in flight."""

    block_n: int
    block_k: int
    warps: int
    stages: int


Tile = HeldTile | PipedTile | GemmTile
Tiles = tuple[Tile | None, ...]
"""One for each of WIDTHS."""
NO_TILES: Tiles = (None,) * len(WIDTHS)
Shapes = Mapping[tuple[int, int], Tiles]
"""By the weight's (n, k)."""

# fmt: off
BFLOAT16_BY_CAPABILITY: Mapping[tuple[int, int], Shapes] = {
    (9, 0): {  # H200
        # 8B: QKV, O, gate and up, down, head
        (6144, 4096): (HeldTile(4, 8, 2, 80), HeldTile(2, 4, 2),
            GemmTile(32, 256, 2, 4), GemmTile(64, 256, 4, 3), GemmTile(64, 256, 4, 3)),
        (4096, 4096): (HeldTile(4, 8, 2, 64), HeldTile(4, 8, 2, 104),
            GemmTile(32, 512, 2, 4), GemmTile(32, 512, 4, 4), None),
        (28672, 4096): (HeldTile(4, 8, 2, 80), HeldTile(2, 4, 2),
            GemmTile(32, 256, 2, 3), GemmTile(64, 128, 4, 4), GemmTile(128, 128, 8, 4)),
        (4096, 14336): (PipedTile(8, 1024, 2, 3), GemmTile(32, 512, 4, 4),
            GemmTile(32, 512, 4, 4), GemmTile(32, 512, 4, 4), None),
        (128256, 4096): (HeldTile(4, 8, 2, 80), GemmTile(32, 256, 2, 3),
            GemmTile(32, 256, 2, 4), GemmTile(128, 128, 8, 4), GemmTile(128, 128, 8, 4)),
        # 8B, half of each weight: QKV, O, gate and up, down, head
        (3072, 4096): (HeldTile(4, 8, 2, 80), HeldTile(2, 4, 2),
            GemmTile(32, 512, 4, 4), GemmTile(32, 512, 4, 4), None),
        (4096, 2048): (HeldTile(4, 8, 2, 64), HeldTile(4, 8, 2),
            GemmTile(32, 512, 4, 4), GemmTile(32, 512, 2, 4), None),
        (14336, 4096): (HeldTile(4, 8, 2, 80), HeldTile(2, 4, 2),
            GemmTile(32, 512, 4, 3), GemmTile(128, 128, 8, 4), None),
        (4096, 7168): (PipedTile(8, 1024, 2, 3), PipedTile(4, 512, 2, 4),
            GemmTile(32, 512, 4, 4), GemmTile(32, 512, 4, 4), None),
        (64128, 4096): (HeldTile(4, 8, 2, 80), GemmTile(32, 256, 2, 4),
            GemmTile(32, 256, 2, 4), GemmTile(128, 128, 8, 4), GemmTile(128, 128, 8, 4)),
        # 70B, half of each weight: QKV, O, gate and up, down, head
        (5120, 8192): (HeldTile(2, 16, 2, 64), HeldTile(2, 8, 2),
            GemmTile(32, 256, 2, 3), None, None),
        (8192, 4096): (HeldTile(4, 8, 2, 64), HeldTile(4, 8, 2),
            None, GemmTile(64, 256, 4, 3), GemmTile(64, 256, 4, 3)),
        (28672, 8192): (HeldTile(4, 16, 1), None,
            None, GemmTile(64, 128, 4, 4), GemmTile(128, 128, 8, 4)),
        (8192, 14336): (PipedTile(4, 2048, 4, 3), PipedTile(4, 512, 2, 4),
            GemmTile(32, 512, 4, 3), GemmTile(64, 256, 4, 3), GemmTile(64, 256, 4, 3)),
        (64128, 8192): (HeldTile(4, 16, 1), GemmTile(32, 256, 2, 4),
            GemmTile(32, 256, 2, 4), GemmTile(128, 128, 8, 4), GemmTile(128, 128, 8, 4)),
    },
}
# fmt: on


def tiles_for(capability: tuple[int, int], n: int, k: int) -> Tiles:
    """The tiles for a bfloat16 weight [n, k] on a device of this compute capability."""
    measured = BFLOAT16_BY_CAPABILITY.get(capability, {}).get((n, k))
    return measured if measured is not None else _safe_tiles(k)


def _safe_tiles(k: int) -> Tiles:
    """For a shape or device that nobody measured: one row, which gains by fusion alone; the rest by cuBLAS."""
    tile: Tile | None = None
    if 512 <= k <= _HELD_K and k % 8 == 0:
        block_k = 1 << (k - 1).bit_length()
        tile = HeldTile(rows=4, warps=block_k // 512, steps=1)  # 64 elements of the weight a thread
    elif k % 1024 == 0:
        tile = PipedTile(rows=8, block_k=1024, warps=2, stages=3)
    return (tile, *NO_TILES[1:])
