"""Triton kernels without a GPU: what they compute, in Triton's interpreter, and that they compile for every target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from corellm.errors import OptionError
from corellm.kernels import default_backend, load_backend
from corellm.kernels.tuning import AttentionTile, attention_tuning
from tests.support.executor_models import CPU

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from corellm.kernels import triton_attention, triton_peer_sum, triton_pointwise  # noqa: E402

INTERPRETED = Path(__file__).with_name("interpreted_triton.py")
SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227}  # KiB a program may use
POINTERS = {"q", "k", "v", "out", "x", "residual", "weight", "gate_up", "qkv", "cos", "sin"}
TYPES = {
    "work": "*i32", "counts": "*i32", "table": "*i32", "partials": "*fp32", "stats": "*fp32", "kv_slots": "*i64",
    "arrivals": "*i32",
    "positions": "*i64", "table_stride": "i32", "q_stride": "i32", "width": "i32",
    "slots": "*i32", "tokens": "*i32", "found": "*i32", "places": "*i64", "count": "i32",
    "tokens_stride": "i32", "scale": "fp32", "eps": "fp32", "peers": ("i64", "i64"), "part": "i32", "flags": "i32",
}  # fmt: skip
HEADS = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128}


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is settled when its module is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    ended = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


def shared_memory(kernel: object, capability: int, element: str, warps: int, stages: int, **sizes: object) -> int:
    """Compile to machine code; bytes of shared memory that a program takes."""
    if "PDL" in kernel.arg_names:
        sizes["PDL"] = capability >= 90
    names = [name for name in kernel.arg_names if name not in sizes]
    signature = {name: f"*{element}" if name in POINTERS else TYPES[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in names and (signature[name][0] == "*" or name == "q_stride")
    }
    source = ASTSource(kernel, signature | dict.fromkeys(sizes, "constexpr"), sizes, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.metadata.shared


@pytest.fixture(autouse=True, scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def attention_sizes(tile: AttentionTile, page_size: int = 64) -> dict[str, object]:
    return HEADS | {"PAGE": page_size, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "PRECISION": "tf32"}


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_attention_compiles_and_fits_shared_memory(capability: int, kind: str) -> None:
    tile = getattr(attention_tuning(divmod(capability, 10), torch.bfloat16), kind)
    sizes = attention_sizes(tile, 64 if kind == "wide" else 16) | {"MERGE": kind == "narrow"}
    used = shared_memory(triton_attention.paged_attention_kernel, capability, "bf16", tile.warps, tile.stages, **sizes)
    assert used <= SHARED_MEMORY[capability] << 10


def test_compiling_imports_nothing() -> None:
    """Threads that import the modules of one cycle at the same time end in a deadlock error, and a start with them."""
    script = """
import sys
from corellm.kernels import triton_attention, triton_backend
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
sizes = {"HEADS": 2, "KV_HEADS": 1, "DIM": 16, "BLOCK_M": 16, "PDL": True}
signature = {"partials": "*fp32", "stats": "*fp32", "out": "*fp32", "work": "*i32", "counts": "*i32"}
known = set(sys.modules)
compile(
    ASTSource(triton_attention.merge_partials_kernel, signature | dict.fromkeys(sizes, "constexpr"), sizes, {}),
    target=GPUTarget("cuda", 90, 32),
)
print(*(name for name in set(sys.modules) - known if name.startswith("triton")))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_small_kernels_compile(capability: int) -> None:
    shared_memory(triton_attention.merge_partials_kernel, capability, "bf16", 2, 2, **HEADS, BLOCK_M=16)
    shared_memory(triton_pointwise.rms_norm_kernel, capability, "bf16", 8, 2, WIDTH=4096, BLOCK=4096)
    shared_memory(triton_pointwise.locate_kernel, capability, "bf16", 1, 2, PAGE=64, BLOCK=128)
    shared_memory(triton_pointwise.silu_mul_kernel, capability, "bf16", 4, 2, BLOCK=1024)
    shared_memory(triton_pointwise.rope_write_kv_kernel, capability, "bf16", 2, 2, **HEADS, BLOCK_H=8)
    shared_memory(triton_peer_sum.add_peer_sum_kernel, capability, "bf16", 4, 2, RANK=1, SIZE=2, BLOCK=1024)


def test_backend_by_device() -> None:
    assert default_backend(CPU) == "reference"
    assert default_backend(torch.device("cuda:1")) == "triton"
    with pytest.raises(OptionError, match="'triton' needs an NVIDIA GPU, the device is cpu; use 'reference'"):
        load_backend("triton", CPU, torch.float32)
