"""Sums over the GPUs of this machine: peer memory against NCCL and an addition, by rows of a decode step.

    python -m benchmarks.all_reduce [--hidden 4096] [--rows 1 16 ...] [--size N]

What a layer does twice: the parts of all ranks, bfloat16 [rows, hidden], are added to the residual of each. Both ways
run as CUDA graphs. Rows whose parts do not fit the peer memory have no figure for it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.graph_timing import microseconds
from benchmarks.report import record
from corellm.layers.parallel import ATTENTION, MLP
from corellm.worker.collectives import TorchDistributed, make_collectives
from corellm.worker.peer_memory import PeerMemory

ROWS = (1, 2, 8, 16, 64, 256, 512, 1024, 2048)
SUMS, REPLAYS = 20, 5  # NCCL's results double with each sum: so few that they stay finite
TINY = 1e-30


def over_nccl(residual: Tensor) -> list[Callable[[], object]]:
    part = torch.randn_like(residual).mul_(TINY)

    def call() -> None:
        dist.all_reduce(part)
        residual.add_(part)

    return [call] * SUMS


def over_peers(residual: Tensor, peers: PeerMemory) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for place in (ATTENTION, MLP) * (SUMS // 2):
        part = peers.part(residual, place)
        if part is None:
            return []
        part.normal_().mul_(TINY)
        calls.append(lambda place=place: peers.add_sum(residual, place))  # type: ignore[misc]
    return calls


def measure(group: TorchDistributed, rows: int, hidden: int) -> dict[str, float]:
    residual = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
    found = {"nccl_us": round(microseconds(over_nccl(residual), REPLAYS, dist.barrier), 2)}
    if group.peers and (calls := over_peers(residual, group.peers)):
        found["peer_us"] = round(microseconds(calls, REPLAYS, dist.barrier), 2)
    return found


def run_rank(rank: int, size: int, folder: Path, given: argparse.Namespace) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = make_collectives(folder / "rendezvous", rank, size, device)
    if not isinstance(group, TorchDistributed):
        raise SystemExit("a sum needs two ranks; this needs two GPUs")
    found = {}
    for rows in given.rows:
        found[rows] = measure(group, rows, given.hidden)
        if rank == 0:
            print(f"{rows:6} rows  " + "  ".join(f"{key} {value:7}" for key, value in found[rows].items()), flush=True)
    if rank == 0:
        record("all_reduce", {"gpus": size, "hidden": given.hidden, "rows": found})
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--size", type=int, default=torch.cuda.device_count(), help="GPUs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(given.rank, given.size, given.folder, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        loopback = os.environ | {"NCCL_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "benchmarks.all_reduce", *sys.argv[1:], "--folder", folder]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=loopback) for rank in range(given.size)]
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    sys.exit(max(codes, default=0, key=abs))


if __name__ == "__main__":
    main()
