"""Triton kernels on a GPU against float64: every dtype, ragged mixes, long contexts, memory of others poisoned."""

from __future__ import annotations

import random

import pytest
import torch

from corellm.kernels import load_backend
from corellm.kernels.inputs import Heads
from tests.support.attention_cases import AttentionCase
from tests.support.pointwise_checks import check_locate, check_norms, check_rope, check_silu_mul

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ERROR = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 3e-5}  # of the worst token and head
LLAMA_8B = Heads(32, 8, 128)
OTHERS = [Heads(64, 8, 128), Heads(32, 8, 64), Heads(8, 4, 16), Heads(3, 1, 32), Heads(4, 4, 64)]
# Each compiles kernels of its own, so the product of all would take minutes.
MIXES = [(LLAMA_8B, page_size, torch.bfloat16) for page_size in (16, 48, 64, 128)]
MIXES += [(heads, 16, torch.bfloat16) for heads in OTHERS]
MIXES += [(heads, 64, dtype) for heads in (LLAMA_8B, OTHERS[2]) for dtype in (torch.float16, torch.float32)]


def worst_error(rows: list[tuple[int, int]], heads: Heads, page_size: int, dtype: torch.dtype) -> float:
    case = AttentionCase.make(rows, heads, page_size, dtype=dtype, device="cuda", seed=page_size)
    return case.worst_error(load_backend("triton", torch.device("cuda", 0), dtype))


@pytest.mark.parametrize(("heads", "page_size", "dtype"), MIXES, ids=str)
def test_ragged_mix(heads: Heads, page_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(page_size)
    new = [1] * 20 + [2, 4, 5, 15, 16, 17, 63, 64, 65, 127, 200, 300]
    rows = [(rng.choice([0, 1, 15, 63, 64, 65, rng.randrange(1500)]), count) for count in rng.sample(new, len(new))]
    error = worst_error(rows, heads, page_size, dtype)
    assert error < ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows",
    [[(131071, 1)], [(131056, 16)], [(130000, 700), (5, 1)], [(9000, 1)] * 8, [(30000, 64), (0, 64), (70000, 1)]],
    ids=["decode 131072", "suffix 131072", "chunk 131072", "decode 8x9001", "mix"],
)
def test_long_contexts(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    assert worst_error(rows, LLAMA_8B, 64, dtype) < ERROR[dtype]


def test_many_rows() -> None:
    rng = random.Random(0)
    rows = [(int(2000 ** rng.random()), 1) for _ in range(1000)] + [(0, 2048), (1000, 1000)]
    assert worst_error(rows, LLAMA_8B, 16, torch.bfloat16) < ERROR[torch.bfloat16]


def test_steps_of_other_sizes_compile_nothing() -> None:
    from corellm.kernels import triton_attention as kernels

    def compiled() -> int:
        both = (kernels.paged_attention_kernel, kernels.merge_partials_kernel)
        return sum(len(kernel.device_caches[0][0]) for kernel in both)

    worst_error([(5000, 1), (3000, 100)], LLAMA_8B, 16, torch.bfloat16)
    before = compiled()
    assert before >= 4
    for rows in ([(0, 1)], [(15, 1), (0, 17)], [(16383, 1)] * 3, [(700, 16)] * 16, [(20000, 1), (2, 7), (999, 640)]):
        worst_error(rows, LLAMA_8B, 16, torch.bfloat16)
    assert compiled() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise(dtype: torch.dtype) -> None:
    backend = load_backend("triton", torch.device("cuda", 0), dtype)
    for rows, width in ((1, 4096), (300, 8192), (7, 96), (2, 16384)):
        check_norms(backend, rows, width, dtype, "cuda")
    for rows, width in ((1, 14336), (300, 4096), (3, 100)):
        check_silu_mul(backend, rows, width, dtype, "cuda")
    for count in (1, 100, 3000):
        check_locate(backend, count, 16, "cuda")
    for heads in (LLAMA_8B, *OTHERS):
        check_rope(backend, 333, heads, 64, dtype, "cuda")
