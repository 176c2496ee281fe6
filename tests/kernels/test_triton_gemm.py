"""Products of few rows without a GPU: interpreted, compiled for every target, and the table of tiles checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from corellm.kernels.gemm_tuning import BFLOAT16_BY_CAPABILITY, WIDTHS, GemmTile, HeldTile, PipedTile, Tile, tiles_for

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from corellm.kernels.skinny_products import SkinnyProducts  # noqa: E402
from corellm.kernels.triton_gemm import gemm_kernel  # noqa: E402
from corellm.kernels.triton_gemv import (  # noqa: E402
    held_gated_kernel,
    held_linear_kernel,
    held_qkv_kernel,
    piped_linear_kernel,
)

INTERPRETED = Path(__file__).with_name("interpreted_gemm.py")
SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227}  # KiB a program may use
INTEGERS = {"m": "i32", "n": "i32", "width": "i32", "eps": "fp32", "kv_slots": "*i64"}  # the rest are bfloat16 tensors
HEADS = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128}
QKV, DOWN = (6144, 4096), (4096, 14336)  # of Llama 3.1 8B
HELD, PIPED, GEMM = HeldTile(4, 8, 2, 80), PipedTile(8, 1024, 2, 3), GemmTile(64, 128, 4, 3)
MEASURED = [
    (capability, shape, width, tile)
    for capability, shapes in BFLOAT16_BY_CAPABILITY.items()
    for shape, tiles in shapes.items()
    for width, tile in zip(WIDTHS, tiles, strict=True)
]
CPU = torch.device("cpu")


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is settled when its module is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    ended = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


@pytest.fixture(autouse=True, scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(
    kernel: Any, capability: int, warps: int, stages: int, registers: int | None, sizes: dict[str, Any]
) -> Any:
    """The kernel in machine code; checked to fit the shared memory of a program."""
    sizes = sizes | {"PDL": capability >= 90}
    names = [name for name in kernel.arg_names if name not in sizes]
    signature = {name: INTEGERS.get(name, "*bf16") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in names and (signature[name].startswith("*") or name in ("n", "width"))
    }
    source = ASTSource(kernel, signature | dict.fromkeys(sizes, "constexpr"), sizes, aligned)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED_MEMORY[capability] << 10
    return made


def held_sizes(tile: HeldTile, k: int, width: int) -> dict[str, Any]:
    block_k = triton.next_power_of_2(k)
    return {"K": k, "BLOCK_M": width, "ROWS": tile.rows, "BLOCK_K": block_k, "STEPS": tile.steps}


def compiled_tile(tile: Tile, capability: int, k: int, width: int) -> Any:
    """The kernel of a plain product with `tile`."""
    match tile:
        case HeldTile():
            sizes = held_sizes(tile, k, width) | {"NORM": False, "ADD": False}
            return compiled(held_linear_kernel, capability, tile.warps, 1, tile.registers, sizes)
        case PipedTile():
            sizes = {"K": k, "BLOCK_M": width, "ROWS": tile.rows, "BLOCK_K": tile.block_k, "STAGES": tile.stages}
            return compiled(piped_linear_kernel, capability, tile.warps, 3, None, sizes | {"ADD": True})
        case GemmTile():
            sizes = {"K": k, "BLOCK_M": max(width, 8), "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
            sizes |= {"ADD": True, "PRECISION": "tf32"}
            return compiled(gemm_kernel, capability, tile.warps, tile.stages, None, sizes)


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_kernel_compiles(capability: int) -> None:
    held = tiles_for(divmod(capability, 10), *QKV)[0]
    assert isinstance(held, HeldTile)
    sizes = held_sizes(held, QKV[1], 1)
    compiled(held_gated_kernel, capability, held.warps, 1, held.registers, sizes)
    compiled(held_qkv_kernel, capability, held.warps, 1, held.registers, sizes | HEADS)
    compiled_tile(held, capability, QKV[1], 2)
    piped = tiles_for(divmod(capability, 10), *DOWN)[0]
    assert isinstance(piped, PipedTile)
    compiled_tile(piped, capability, DOWN[1], 1)
    for width in (8, 32):
        compiled_tile(GEMM, capability, QKV[1], width)


@pytest.mark.parametrize("tile", [HELD, PIPED, GEMM], ids=str)
def test_before_the_wait_nothing_is_read_but_weights(tile: Tile) -> None:
    ptx = compiled_tile(tile, 90, 14336 if tile == PIPED else 4096, 1).asm["ptx"]
    before, behind = ptx.split("griddepcontrol.wait", 1)
    assert "griddepcontrol.launch_dependents" in before
    early = [line for line in before.splitlines() if "ld.global" in line or "cp.async" in line]
    assert all("evict_first" in line for line in early)
    assert bool(early) == (tile != GEMM)
    assert "ld.global.v4" in behind or "cp.async" in behind


@pytest.mark.parametrize(("capability", "shape", "width", "tile"), MEASURED, ids=str)
def test_a_measured_tile_fits_its_shape(
    capability: tuple[int, int], shape: tuple[int, int], width: int, tile: Tile | None
) -> None:
    check_tile(tile, *shape, width, SHARED_MEMORY[capability[0] * 10 + capability[1]])


@pytest.mark.parametrize("k", [512, 576, 1024, 3072, 5120, 8192, 14336, 28672])
def test_a_tile_for_an_unknown_shape_fits_any_card(k: int) -> None:
    tiles = tiles_for((8, 9), 4096, k)
    assert tiles[0]
    for width, tile in zip(WIDTHS, tiles, strict=True):
        check_tile(tile, 4096, k, width, SHARED_MEMORY[89])


def check_tile(tile: Tile | None, n: int, k: int, width: int, shared: int) -> None:
    """`shared`: KiB that a program may use."""
    match tile:
        case HeldTile():
            assert width <= 2
            assert tile.rows % 2 == 0
            assert triton.next_power_of_2(k) >= 256 * tile.warps
        case PipedTile():
            assert width <= 2
            assert k % tile.block_k == 0
            assert tile.block_k >= 256 * tile.warps
            assert (tile.rows + width) * tile.block_k * 2 * tile.stages <= shared << 10
        case GemmTile():
            assert k % tile.block_k == 0
            assert tile.block_n <= n
            assert (tile.block_n + max(width, 8)) * tile.block_k * 2 * tile.stages <= shared << 10


def test_which_products_are_covered() -> None:
    products = SkinnyProducts(CPU, torch.bfloat16)
    assert products.covers(1, *QKV)
    assert products.fuses(1, *QKV)
    assert products.covers(1, *DOWN)
    assert not products.fuses(1, *DOWN)
    assert not products.covers(0, *QKV)
    assert not products.covers(33, *QKV)
    assert not products.covers(1, 4096, 1000 * 8192 + 8)
    assert not SkinnyProducts(CPU, torch.float16).covers(1, *QKV)


def test_what_is_not_covered_is_an_ordinary_product() -> None:
    products = SkinnyProducts(CPU, torch.float32)
    x, weight, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    torch.testing.assert_close(products.linear(x, weight), x @ weight.T)
    expected = residual + x @ weight.T
    products.linear_add(x, weight, residual)
    torch.testing.assert_close(residual, expected)
    with pytest.raises(ValueError, match=r"3 rows and a weight \[5, 8\]"):
        products.norm_linear(x, x[0], 1e-5, weight)
