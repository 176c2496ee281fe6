"""Triton kernels on a CPU: `test_triton.py` runs this file in a process with Triton's interpreter switched on.

Tiles are small, so that few tokens reach every loop and every split.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corellm.kernels.inputs import Heads
from corellm.kernels.triton_backend import TritonBackend
from corellm.kernels.tuning import AttentionTile, AttentionTuning
from tests.support.attention_cases import AttentionCase
from tests.support.executor_models import CPU
from tests.support.pointwise_checks import check_locate, check_norms, check_rope, check_silu_mul

# Numpy, which the interpreter computes with, warns of the infinities that stand for "nothing seen yet".
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TUNING = AttentionTuning(
    narrow=AttentionTile(16, 16, warps=1, stages=1, programs_per_sm=4, min_split=1),
    wide=AttentionTile(32, 16, warps=1, stages=1, programs_per_sm=4, min_split=1),
)
BACKEND = TritonBackend(CPU, torch.float32, TUNING, sms=2)


@pytest.mark.parametrize("page_size", [3, 16, 32])
@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(3, 1, 32)])
def test_attention_of_a_mix(heads: Heads, page_size: int) -> None:
    rows = [(0, 1), (37, 1), (15, 1), (0, 30), (16, 1), (40, 7), (3, 3), (31, 17)]
    assert AttentionCase.make(rows, heads, page_size, seed=page_size).worst_error(BACKEND) < 1e-5


@pytest.mark.parametrize(
    ("heads", "new"),
    [(Heads(3, 1, 16), 1), (Heads(2, 1, 16), 40), (Heads(4, 2, 16), 4), (Heads(8, 1, 16), 1), (Heads(20, 1, 16), 1)],
)
def test_attention_split_over_many_programs(heads: Heads, new: int) -> None:
    case = AttentionCase.make([(350 - new, new), (3, 1), (200, 2)], heads, 16)
    assert case.worst_error(TritonBackend(CPU, torch.float32, TUNING, sms=40)) < 1e-5


@pytest.mark.parametrize("rows", [[(350, 1), (90, 17)], [(350, 1)], [(700, 30), (2, 1), (40, 3)]])
def test_lists_stay_aligned(rows: list[tuple[int, int]]) -> None:
    """Triton compiles a kernel once more for pointers of another alignment: not in the middle of a step."""
    case = AttentionCase.make(rows, Heads(3, 1, 16), 16)
    plan = TritonBackend(CPU, torch.float32, TUNING, sms=40).plan_attention(case.rows, case.heads, 16)
    attend = plan.bind(torch.from_numpy(plan.words), case.block_table)
    assert all(part.storage_offset() % 4 == 0 for lists in attend._lists for part in lists)


@pytest.mark.parametrize("heads", [Heads(20, 1, 16), Heads(2, 1, 8), Heads(2, 1, 24)])
def test_attention_of_groups_wider_than_a_tile_and_of_other_head_sizes(heads: Heads) -> None:
    assert AttentionCase.make([(5, 1), (20, 3)], heads, 4).worst_error(BACKEND) < 1e-5


def test_a_row_with_nan_in_its_own_cache_spoils_no_other() -> None:
    case = AttentionCase.make([(30, 1), (30, 1), (8, 9)], Heads(2, 1, 16), 16)
    case.k[case.block_table[1, 0], 3] = torch.nan
    out = case.planned(BACKEND)(case.q, case.k, case.v)
    assert out[1].isnan().all()
    assert not out[np.r_[0, 2:11]].isnan().any()


@pytest.mark.parametrize("width", [64, 96])
def test_norms(width: int) -> None:
    check_norms(BACKEND, 3, width, torch.float32)


@pytest.mark.parametrize(("count", "page_size"), [(1, 16), (300, 3)])
def test_locate(count: int, page_size: int) -> None:
    check_locate(BACKEND, count, page_size)


def test_silu_mul() -> None:
    check_silu_mul(BACKEND, 3, 1100, torch.float32)


@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(9, 3, 8), Heads(2, 1, 24)])
def test_rope(heads: Heads) -> None:
    check_rope(BACKEND, 5, heads, 4, torch.float32)
