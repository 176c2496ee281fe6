"""One rank of a group with peer memory, run by tests: rank, size, folder, device.

Random sums over and over, at random paces, against float64; prints a digest of every bit. Some are too wide for the
peer memory. On "cpu" (with Triton's interpreter) that memory is files that all map, and small; on "cuda" it is the
GPUs', and sums also run within a CUDA graph.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch

from corellm.kernels import triton_peer_sum
from corellm.layers.parallel import ATTENTION, EMBEDDING, MLP, PLACES
from corellm.worker import peer_memory
from corellm.worker.collectives import TorchDistributed, make_collectives
from corellm.worker.peer_memory import PeerMemory, memory_bytes, part_bytes

STEPS, LAYERS, REPLAYS = 8, 2, 300
ORDER = [EMBEDDING, *[ATTENTION, MLP] * LAYERS]
CPU_PAIR_BYTES, CPU_PROGRAMS = 40_000, 2


def shapes(size: int, itemsize: int, kind: str) -> list[tuple[int, int]]:
    """Of 1 element up to the most that fits, and one more row than that."""
    width = 4096 if kind == "cuda" else 700
    fitting = part_bytes(size) // (width * itemsize)
    return [(1, 1), (1, width), (3, 331), (fitting, width), (fitting + 1, width)]


def mapped(size: int, folder: Path) -> list[torch.Tensor]:
    for rank in range(size):
        with open(folder / str(rank), "ab") as file:
            file.truncate(memory_bytes(size))
    return [
        torch.from_file(str(folder / str(rank)), shared=True, size=memory_bytes(size), dtype=torch.uint8)
        for rank in range(size)
    ]


def random_sums(group: TorchDistributed, device: torch.device, dtype: torch.dtype) -> str:
    pace, digest, taken = np.random.default_rng(group.rank), hashlib.blake2b(), set()
    for step in range(STEPS):
        for call, place in enumerate(ORDER):
            shared = np.random.default_rng([step, call])  # the same on every rank
            shape = shared.choice(shapes(group.size, dtype.itemsize, device.type))
            parts = [torch.from_numpy(shared.standard_normal(shape)).to(device, dtype) for _ in range(group.size)]
            residual = torch.from_numpy(shared.standard_normal(shape)).to(device, dtype)
            truth = residual.double() + sum(part.double() for part in parts)
            time.sleep(pace.choice([0.0, 0.0, 0.02]))
            part = group.part(residual, place)
            taken.add(group.peers.fits(part))
            part.copy_(parts[group.rank])
            group.add_sum(part, residual, place)
            torch.testing.assert_close(residual, truth.to(dtype))
            digest.update(residual.view(torch.uint8).cpu().numpy().tobytes())
    assert taken == {True, False}, "both ways must have been gone"
    return digest.hexdigest()


def sums_in_a_graph(group: TorchDistributed, device: torch.device) -> None:
    """Whole numbers, so that float32 sums are exact however often the graph runs; ranks lag behind by turns."""
    residuals = [torch.zeros(shape, device=device) for shape in shapes(group.size, 4, "cuda")]
    pace = np.random.default_rng(group.rank)

    def compute() -> None:
        for place, residual in zip(ORDER, residuals, strict=True):
            part = group.part(residual, place)
            part.copy_(residual).remainder_(7).add_(group.rank)  # depends on the sum of the run before
            group.add_sum(part, residual, place)

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    for _ in range(REPLAYS):
        torch.cuda._sleep(int(pace.choice([1, 1, 200_000])))  # clock cycles
        graph.replay()
    value, size = 0, group.size
    for _ in range(REPLAYS + 1):
        value += size * (value % 7) + size * (size - 1) // 2
    for residual in residuals:
        assert torch.equal(residual, torch.full_like(residual, value)), (residual, value)


def on_cpu(rank: int, size: int, folder: Path) -> None:
    peer_memory.PAIR_BYTES, triton_peer_sum.MAX_PROGRAMS = CPU_PAIR_BYTES, CPU_PROGRAMS
    group = TorchDistributed("gloo", folder / "rendezvous", rank, size)
    memories = mapped(size, folder)
    group.peers = PeerMemory(memories[rank], [memory.data_ptr() for memory in memories], rank, pdl=False)
    print(random_sums(group, torch.device("cpu"), torch.float32))
    assert not memories[rank][PLACES * part_bytes(size) :].any(), "a flag is still raised"
    group.close()


def on_gpu(rank: int, size: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = make_collectives(folder / "rendezvous", rank, size, device)
    assert isinstance(group, TorchDistributed)
    assert group.peers is not None, "these GPUs do not reach each other"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        print(random_sums(group, device, dtype))
    sums_in_a_graph(group, device)
    group.close()


if __name__ == "__main__":
    {"cpu": on_cpu, "cuda": on_gpu}[sys.argv[4]](int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
