"""One rank of a group with peer memory, run by tests: rank, size, folder, device.

Random sums over and over, at random paces, against float64; prints a digest of every bit. On "cpu" (with Triton's
interpreter) the ranks' memory is files that all map; on "cuda" it is the GPUs', and sums also run within a CUDA graph.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch

from corellm.layers.parallel import ATTENTION, EMBEDDING, MLP, PLACES
from corellm.worker.collectives import make_collectives
from corellm.worker.peer_memory import PeerMemory, memory_bytes, part_bytes

STEPS, LAYERS, REPLAYS = 8, 2, 300
ORDER = [EMBEDDING, *[ATTENTION, MLP] * LAYERS]
SHAPES = {
    "cpu": [(1, 96), (2, 700), (5, 1031), (1, 1)],
    "cuda": [(1, 4096), (3, 8192), (512, 4096), (37, 1031), (1, 1)],
}


def mapped(size: int, folder: Path) -> list[torch.Tensor]:
    return [
        torch.from_file(str(folder / str(r)), shared=True, size=memory_bytes(size), dtype=torch.uint8)
        for r in range(size)
    ]


def random_sums(peers: PeerMemory, rank: int, size: int, device: torch.device, dtype: torch.dtype) -> str:
    pace, digest = np.random.default_rng(rank), hashlib.blake2b()
    for step in range(STEPS):
        for call, place in enumerate(ORDER):
            shared = np.random.default_rng([step, call])  # the same on every rank
            shape = SHAPES[device.type][shared.integers(len(SHAPES[device.type]))]
            parts = [torch.from_numpy(shared.standard_normal(shape)).to(device, dtype) for _ in range(size)]
            residual = torch.from_numpy(shared.standard_normal(shape)).to(device, dtype)
            truth = residual.double() + sum(part.double() for part in parts)
            time.sleep(pace.choice([0.0, 0.0, 0.02]))
            part = peers.part(residual, place)
            assert part is not None
            assert peers.holds(part, place)
            part.copy_(parts[rank])
            peers.add_sum(residual, place)
            torch.testing.assert_close(residual, truth.to(dtype))
            digest.update(residual.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def sums_in_a_graph(peers: PeerMemory, rank: int, size: int, device: torch.device) -> None:
    """Whole numbers, so that float32 sums are exact however often the graph runs."""
    shapes = [(1, 4096), (8, 4096), (130, 4096), (512, 4096), (1, 8)]
    residuals = [torch.zeros(shape, device=device) for shape in shapes]

    def compute() -> None:
        for place, residual in zip(ORDER, residuals, strict=True):
            part = peers.part(residual, place)
            part.copy_(residual).remainder_(7).add_(rank)  # depends on the sum of the run before
            peers.add_sum(residual, place)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    for _ in range(REPLAYS):
        graph.replay()
    value = 0
    for _ in range(REPLAYS + 1):
        value += size * (value % 7) + size * (size - 1) // 2
    for residual in residuals:
        assert torch.equal(residual, torch.full_like(residual, value)), (residual, value)


def main(rank: int, size: int, folder: Path, kind: str) -> None:
    if kind == "cpu":
        memories = mapped(size, folder)
        peers = PeerMemory(memories[rank], [memory.data_ptr() for memory in memories], rank, pdl=False)
        print(random_sums(peers, rank, size, torch.device("cpu"), torch.float32))
        assert not memories[rank][PLACES * part_bytes(size) :].any(), "a flag is still raised"
        return
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = make_collectives(folder / "rendezvous", rank, size, device)
    assert group.peers is not None, "these GPUs do not reach each other"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        print(random_sums(group.peers, rank, size, device, dtype))
    sums_in_a_graph(group.peers, rank, size, device)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
