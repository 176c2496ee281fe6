"""Sums by peer memory between GPUs: against float64, the same bits on every rank, and within CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("size", [n for n in (2, 4, 8) if n <= torch.cuda.device_count()] or [2])
def test_every_rank_gets_the_same_sum(tmp_path: Path, size: int) -> None:
    digests = run_ranks("tests.support.peer_rank", size, str(tmp_path), "cuda")
    assert len(set(digests)) == 1, "the ranks' bits differ"
