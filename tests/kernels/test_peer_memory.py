"""Sums by peer memory: the kernel in Triton's interpreter, on ranks that are processes and share memory for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from corellm.layers.parallel import PLACES
from corellm.worker.peer_memory import PeerMemory, memory_bytes, part_bytes
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_same_sum(tmp_path: Path, size: int) -> None:
    for rank in range(size):
        with open(tmp_path / str(rank), "wb") as file:
            file.truncate(memory_bytes(size))
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    digests = run_ranks("tests.support.peer_rank", size, str(tmp_path), "cpu", environment=interpreted)
    assert len(set(digests)) == 1, "the ranks' bits differ"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_places_and_flags_do_not_overlap_and_what_does_not_fit_is_left_to_others(size: int) -> None:
    limit = part_bytes(size)
    assert limit % 16 == 0
    memory = torch.zeros(memory_bytes(size), dtype=torch.uint8)
    peers = PeerMemory(memory, [memory.data_ptr()] * size, 0, pdl=False)
    fits = torch.empty(limit // 2, dtype=torch.bfloat16)
    parts = [peers.part(fits, place) for place in range(PLACES)]
    for place, part in enumerate(parts, start=1):
        assert part is not None
        part.view(torch.uint8).fill_(place)
        assert [peers.holds(part, other) for other in range(PLACES)] == [other == place - 1 for other in range(PLACES)]
    assert torch.bincount(memory.int()).tolist() == [len(memory) - PLACES * limit, *[limit] * PLACES]
    assert peers.part(torch.empty(limit // 2 + 1, dtype=torch.bfloat16), 0) is None
