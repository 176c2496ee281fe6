"""Triton kernels on a CPU: `test_triton.py` runs this file in a process with Triton's interpreter switched on.

Tiles are small, so that few tokens reach every loop and every split.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corellm.kernels import reference_sampling
from corellm.kernels.inputs import Heads
from corellm.kernels.triton_backend import TritonBackend
from corellm.kernels.tuning import AttentionTile, AttentionTuning
from tests.support.attention_cases import AttentionCase
from tests.support.executor_models import CPU
from tests.support.pointwise_checks import check_norms, check_rope, check_silu_mul

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


@pytest.mark.parametrize("new", [1, 12, 40])
def test_attention_split_over_many_programs(new: int) -> None:
    case = AttentionCase.make([(350 - new, new), (3, 1)], Heads(2, 1, 16), 16)
    assert case.worst_error(TritonBackend(CPU, torch.float32, TUNING, sms=40)) < 1e-5


@pytest.mark.parametrize("heads", [Heads(20, 1, 16), Heads(2, 1, 8), Heads(2, 1, 24)])
def test_attention_of_groups_wider_than_a_tile_and_of_other_head_sizes(heads: Heads) -> None:
    assert AttentionCase.make([(5, 1), (20, 3)], heads, 4).worst_error(BACKEND) < 1e-5


def test_a_row_with_nan_in_its_own_cache_spoils_no_other() -> None:
    case = AttentionCase.make([(30, 1), (30, 1), (8, 9)], Heads(2, 1, 16), 16)
    case.k[case.batch.block_table[1, 0], 3] = torch.nan
    out = BACKEND.plan_attention(case.batch, case.heads)(case.q, case.k, case.v)
    assert out[1].isnan().all()
    assert not out[np.r_[0, 2:11]].isnan().any()


@pytest.mark.parametrize("width", [64, 96])
def test_norms(width: int) -> None:
    check_norms(BACKEND, 3, width, torch.float32)


def test_silu_mul() -> None:
    check_silu_mul(BACKEND, 3, 1100, torch.float32)


@pytest.mark.parametrize("heads", [Heads(4, 2, 16), Heads(9, 3, 8), Heads(2, 1, 24)])
def test_rope(heads: Heads) -> None:
    check_rope(BACKEND, 5, heads, 4, torch.float32)


def test_draw_takes_the_tokens_that_the_reference_takes() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(40, 5000, generator=generator)
    logits[:, 2000:2100] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    positions = torch.randint(2**17, (40,), generator=generator)
    tokens = BACKEND.draw(logits, seeds, positions)
    assert torch.equal(tokens, reference_sampling.draw(logits, seeds, positions))
    assert len(tokens.unique()) > 30


def test_draw_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4000, 300]] = torch.inf
    assert BACKEND.draw(logits, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).item() == 300


@pytest.mark.parametrize("sign", [-1, 1])
def test_noise_is_the_reference_s_down_to_the_rarest(sign: int) -> None:
    """Of two tokens, one made likelier than the other by just a little more or less than their noises differ."""
    seeds = torch.arange(1 << 17)
    noise = reference_sampling.gumbel(seeds, torch.zeros_like(seeds), 2)
    order = noise[:, 0].argsort()
    rows = torch.cat((order[:15], order[-15:], order[:: 1 << 13]))  # both sides of the switch to a series, and ends
    gap = (noise[rows, 1] - noise[rows, 0]).double()
    first = gap + sign * 1e-5 * gap.abs().clamp(min=1)
    logits = torch.stack((first, torch.zeros_like(first)), dim=1).float()
    drawn = BACKEND.draw(logits, seeds[rows], torch.zeros_like(rows))
    assert (drawn == (0 if sign > 0 else 1)).all()
