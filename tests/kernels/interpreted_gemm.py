"""Products of few rows on a CPU: `test_triton_gemm.py` runs this file with Triton's interpreter switched on.

Shapes divide by no tile, so that every mask is met.
"""

from __future__ import annotations

import pytest
import torch

from corellm.kernels.gemm_tuning import WIDTHS, GemmTile, HeldTile, PipedTile, Tile
from corellm.kernels.inputs import Heads
from corellm.kernels.skinny_products import SkinnyProducts
from tests.support.skinny_checks import SkinnyCase, poison_outputs

HELD = [HeldTile(4, warps=1, steps=1), HeldTile(4, warps=1, steps=3), HeldTile(2, warps=1, steps=2, registers=64)]
PIPED = [PipedTile(4, 32, warps=1, stages=3), PipedTile(8, 16, warps=1, stages=3)]
GEMM = GemmTile(16, 32, warps=1, stages=2)
DTYPES = [
    torch.float32,
    torch.float16,
]  # float16 for its roundings; bfloat16 is cut off, not rounded, by the interpreter


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_outputs(monkeypatch)


def case(tile: Tile, m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> SkinnyCase:
    products = SkinnyProducts(torch.device("cpu"), dtype, {(n, k): (tile,) * len(WIDTHS)})
    return SkinnyCase(products, m, n, k, dtype, "cpu")


@pytest.mark.parametrize("tile", HELD + PIPED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(tile: Tile, dtype: torch.dtype) -> None:
    case(tile, 1, 26, 96, dtype).check_linear()
    case(tile, 2, 26, 96, dtype).check_linear_add()


@pytest.mark.parametrize("m", [1, 7, 16, 19, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm(m: int, dtype: torch.dtype) -> None:
    case(GEMM, m, 70, 96, dtype).check_linear()
    case(GEMM, m, 70, 96, dtype).check_linear_add()


@pytest.mark.parametrize("tile", HELD, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused(tile: HeldTile, dtype: torch.dtype) -> None:
    case(tile, 1, 26, 96, dtype).check_norm_linear()
    case(tile, 2, 26, 96, dtype).check_norm_gated()
    case(tile, 1, 26, 128, dtype).check_norm_gated()


@pytest.mark.parametrize(
    ("heads", "tile"), [(Heads(4, 2, 8), HELD[0]), (Heads(3, 1, 16), HELD[1]), (Heads(2, 2, 12), HELD[2])], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_qkv(heads: Heads, tile: HeldTile, dtype: torch.dtype) -> None:
    for m in (1, 2):
        case(tile, m, (heads.count + 2 * heads.kv) * heads.dim, 96, dtype).check_norm_qkv(heads)


def test_small_activations_meet_eps() -> None:
    tiny = case(HELD[0], 2, 26, 96)
    tiny.x *= 1e-3
    tiny.check_norm_linear()
