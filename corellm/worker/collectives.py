"""The group of ranks that share one model: alone, or over torch.distributed (NCCL between GPUs, gloo between CPUs).

Small sums between GPUs that reach each other's memory take a shorter way: see `peer_memory`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from corellm.errors import StartupError
from corellm.kernels import default_backend
from corellm.layers.parallel import Collectives

if TYPE_CHECKING:
    from corellm.worker.peer_memory import PeerMemory

TIMEOUT_S = 120.0


class SingleRank:
    """A group of one: every operation is the identity."""

    rank = 0
    size = 1

    def part(self, like: Tensor, place: int) -> Tensor:
        return torch.empty_like(like)

    def add_sum(self, part: Tensor, residual: Tensor, place: int) -> None:
        residual.add_(part)

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor | None:
        return logits[:, :vocab]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        pass


class TorchDistributed:
    """`size` ranks that meet through the file `rendezvous`; the engine keeps their sockets on loopback.

    Raises `StartupError` when the others do not appear within `timeout_s`, which also bounds every later operation, but
    for sums that peer memory makes: those end with the step that they are in, or with the process.
    """

    def __init__(self, backend: str, rendezvous: Path, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.rank = rank
        self.size = size
        self.peers: PeerMemory | None = None
        try:
            store = FileStore(str(rendezvous), size)
            store.set_timeout(timedelta(seconds=timeout_s))
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of --tp {size} could not join the others over {backend}: {reason}"
            ) from None

    def part(self, like: Tensor, place: int) -> Tensor:
        return self.peers.part(like, place) if self.peers and self.peers.fits(like) else torch.empty_like(like)

    def add_sum(self, part: Tensor, residual: Tensor, place: int) -> None:
        if self.peers and self.peers.fits(part):
            self.peers.add_sum(residual, place)
        else:
            dist.all_reduce(part)
            residual.add_(part)

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor | None:
        logits = logits.contiguous()
        if self.rank:
            dist.gather(logits, dst=0)
            return None
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        dist.gather(logits, parts, dst=0)
        return torch.cat(parts, dim=1)[:, :vocab]

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def close(self) -> None:
        """Leave the group; nothing may follow."""
        self.peers = None
        dist.destroy_process_group()


def make_collectives(rendezvous: Path, rank: int, size: int, device: torch.device) -> SingleRank | TorchDistributed:
    """The group for a worker on `device`."""
    if size == 1:
        return SingleRank()
    group = TorchDistributed("nccl" if device.type == "cuda" else "gloo", rendezvous, rank, size)
    if default_backend(device) == "triton":
        from corellm.worker import peer_memory

        group.peers = peer_memory.connect(device, rank, size)
    return group


__all__ = ["Collectives", "SingleRank", "TorchDistributed", "make_collectives"]
