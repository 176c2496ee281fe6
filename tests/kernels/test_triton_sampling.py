"""Sampling kernels without a GPU: what they compute, in Triton's interpreter, and that every target compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from corellm.kernels import triton_logits, triton_sampling, triton_truncation  # noqa: E402

INTERPRETED = Path(__file__).with_name("interpreted_sampling.py")
TYPES = {
    "logits": "*fp32", "stride": "i32", "vocab": "i32", "blocks": "i32", "rows": "i32", "words": "i32",
    "temperatures": "*fp32", "seeds": "*i64", "positions": "*i64", "best": "*fp32", "ids": "*i32",
    "faults": "*i32", "tokens": "*i64", "failed": "*i1", "top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32",
    "maxima": "*fp32", "minima": "*fp32", "masses": "*fp32", "held": "*fp32", "thresholds": "*fp32",
    "table": "*i32", "table_stride": "i32", "slots": "*i64", "lengths": "*i64", "prompt_lengths": "*i64",
    "penalties": "*fp32", "counts": "*i32", "mask": "*i32",
}  # fmt: skip
ALIGNED = {
    "logits",
    "stride",
    "vocab",
    "best",
    "ids",
    "faults",
    "held",
    "thresholds",
    "table",
    "table_stride",
    "counts",
}


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: whether a kernel is interpreted is settled when its module is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    ended = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]


def machine_code(kernel: object, capability: int, warps: int = 4, logits: str = "fp32", **sizes: object) -> str:
    """Compile for `capability` as a launch with a vocabulary of Llama 3.1 would; the machine code as text."""
    names = [name for name in kernel.arg_names if name not in sizes]
    signature = {name: TYPES[name] for name in names} | {"logits": f"*{logits}"} | dict.fromkeys(sizes, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in ALIGNED}
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, sizes, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["sass"]


@pytest.fixture(autouse=True, scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_kernels_compile_and_keep_their_values_in_registers(capability: int) -> None:
    draw, cut, edit = triton_sampling, triton_truncation, triton_logits
    codes = [
        machine_code(draw.best_of_block_kernel, capability, logits="bf16", BLOCK=draw.BLOCK),
        machine_code(draw.best_of_block_kernel, capability, BLOCK=draw.BLOCK),
        machine_code(draw.best_of_row_kernel, capability, 1, BLOCKS=64),
        machine_code(cut.summarize_kernel, capability, BLOCK=cut.BLOCK),
        machine_code(cut.threshold_kernel, capability, cut.WARPS, BLOCKS=32, CHUNK=cut.CHUNK, HELD=cut.HELD),
        machine_code(cut.mask_kernel, capability, BLOCK=cut.BLOCK),
        machine_code(edit.penalize_kernel, capability, edit.WARPS, BLOCK=edit.BLOCK, SPAN=edit.SPAN),
        machine_code(edit.apply_bitmask_kernel, capability, BLOCK=edit.BLOCK),
    ]
    for code in codes:
        assert "EXIT" in code
        assert "STL" not in code  # a store to local memory is a register spilled
