"""Sampling kernels on a CPU: `test_triton_sampling.py` runs this file with Triton's interpreter switched on.

Blocks are small, so that a small vocabulary reaches every loop.
"""

from __future__ import annotations

import pytest
import torch

from corellm.kernels import reference_sampling, triton_logits, triton_sampling, triton_truncation
from tests.support import sampling_checks as checks
from tests.support.sampling_checks import Operations, Rows

# Numpy, which the interpreter computes with, warns of the infinities that stand for "excluded".
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OPS = Operations.triton()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, size in [
        (triton_sampling, "BLOCK", 256),
        (triton_truncation, "BLOCK", 64),
        (triton_truncation, "CHUNK", 128),
        (triton_truncation, "HELD", 32),
        (triton_logits, "BLOCK", 64),
        (triton_logits, "SPAN", 16),
        (triton_logits, "PROGRAMS", 5),
    ]:
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_the_argmax_with_noise(dtype: torch.dtype) -> None:
    checks.check_sample(OPS, Rows.make(24, 1100, dtype, padding=24))


def test_tokens_are_the_reference_s() -> None:
    rows = Rows.make(32, 1500, torch.float32)
    assert torch.equal(OPS.sample(*rows)[0], reference_sampling.sample(*rows)[0])


def test_ties_and_excluded_tokens() -> None:
    checks.check_ties(OPS, 1100)


def test_a_broken_row_fails_alone() -> None:
    checks.check_faults(OPS, Rows.make(8, 1100, torch.float32, padding=8))
    checks.check_faults(OPS, Rows.make(8, 200, torch.float32))


@pytest.mark.parametrize("sign", [-1, 1])
def test_noise_is_the_reference_s_down_to_the_rarest(sign: int) -> None:
    checks.check_noise(OPS, sign)


def test_truncation_keeps_what_sorting_keeps() -> None:
    checks.check_truncation(OPS, 270, share=7)


def test_truncation_leaves_rows_without_limits_and_ends_on_broken_ones() -> None:
    logits = torch.randn(4, 300)
    logits[0, 5], logits[2, 7], logits[3] = torch.nan, torch.inf, torch.nan
    before = logits.clone()
    kept = OPS.mask_unlikely(logits, torch.tensor([9, 0, 9, 0]), torch.tensor([0.5, 1, 0.5, 0.5]), torch.zeros(4))
    assert torch.equal(kept[1], before[1])


@pytest.mark.parametrize("longest", [40, 130])
def test_penalties_are_the_naive_ones(longest: int) -> None:
    checks.check_penalties(OPS, 200, longest)


@pytest.mark.parametrize("vocab", [64, 150, 1])
def test_bitmask(vocab: int) -> None:
    checks.check_bitmask(OPS, vocab)
