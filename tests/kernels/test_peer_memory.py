"""Sums by peer memory: the protocol in every interleaving, the places that the graph uses, and the kernel in Triton's
interpreter, on ranks that are processes and share memory for real."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from corellm.layers.parallel import ATTENTION, EMBEDDING, MLP, PLACES
from corellm.worker.peer_memory import PeerMemory, memory_bytes, part_bytes
from tests.support.executor_models import Driver, greedy, make_executor, tiny_llama
from tests.support.ranks import run_ranks


def faults(size: int, places: list[int]) -> set[str]:
    """What can go wrong when `size` ranks sum at these places in turn: every order of their operations is tried.

    A rank writes its part, raises its flag at all others, lowers theirs when all are up, and reads all parts.
    """
    found: set[str] = set()
    # How far each rank is, the number of the sum that each part is of, and who has a flag up at whom, where.
    begun = ((0,) * size, ((-1,) * PLACES,) * size, frozenset[tuple[int, int, int]]())
    seen, left = {begun}, [begun]
    while left:
        at, parts, flags = left.pop()
        moves = []
        for rank in range(size):
            number, operation = divmod(at[rank], 4)
            if number == len(places):
                continue
            place, others = places[number], [other for other in range(size) if other != rank]
            parts_after, flags_after = parts, flags
            raised, awaited = ({(other, place, rank) for other in others}, {(rank, place, other) for other in others})
            if operation == 0:
                mine = (*parts[rank][:place], number, *parts[rank][place + 1 :])
                parts_after = (*parts[:rank], mine, *parts[rank + 1 :])
            elif operation == 1:
                if flags & raised:
                    found.add("a flag is raised that is up")
                flags_after = flags | raised
            elif operation == 2:
                if not awaited <= flags:
                    continue
                flags_after = flags - awaited
            elif any(part[place] != number for part in parts):
                found.add("a part is read that is of another sum")
            moves.append(((*at[:rank], at[rank] + 1, *at[rank + 1 :]), parts_after, flags_after))
        if not moves and any(step < 4 * len(places) for step in at):
            found.add("deadlock")
        left += [move for move in moves if move not in seen]
        seen.update(moves)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_no_order_of_operations_spoils_a_sum(size: int) -> None:
    step = [EMBEDDING, ATTENTION, MLP, ATTENTION, MLP]
    assert faults(size, step + step) == set()
    assert "a part is read that is of another sum" in faults(size, [MLP, MLP])
    assert "deadlock" in faults(size, [MLP, MLP, MLP])


class Recording:
    """Rank 0 of two that think alike; writes down where it sums."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.places: list[int] = []

    def part(self, like: Tensor, place: int) -> Tensor:
        return torch.empty_like(like)

    def add_sum(self, part: Tensor, residual: Tensor, place: int) -> None:
        self.places.append(place)
        residual.add_(part, alpha=2)

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor:
        return torch.cat((logits, logits), dim=1)[:, :vocab]

    def broadcast(self, x: Tensor) -> Tensor:
        return x


def test_no_sum_of_the_graph_uses_the_place_of_the_one_before() -> None:
    model, group = tiny_llama(), Recording()
    driver = Driver(make_executor(model, group=group))
    driver.open(0, [1, 2, 3], greedy())
    for count in (2, 1, 1, 1):
        driver.run([(0, count)])
    assert len(group.places) == 4 * (1 + 2 * model.config.num_hidden_layers)
    assert all(one != other for one, other in pairwise(group.places))
    assert set(group.places) <= set(range(PLACES))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_same_sum(tmp_path: Path, size: int) -> None:
    interpreted = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    digests = run_ranks("tests.support.peer_rank", size, str(tmp_path), "cpu", environment=interpreted)
    assert len(set(digests)) == 1, "the ranks' bits differ"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_places_and_flags_do_not_overlap(size: int) -> None:
    limit = part_bytes(size)
    assert limit % 16 == 0
    memory = torch.zeros(memory_bytes(size), dtype=torch.uint8)
    peers = PeerMemory(memory, [memory.data_ptr()] * size, 0, pdl=False)
    widest = torch.empty(limit // 2, dtype=torch.bfloat16)
    assert peers.fits(widest)
    assert not peers.fits(torch.empty(limit // 2 + 1, dtype=torch.bfloat16))
    for place in range(PLACES):
        peers.part(widest, place).view(torch.uint8).fill_(place + 1)
    assert torch.bincount(memory.int()).tolist() == [len(memory) - PLACES * limit, *[limit] * PLACES]
