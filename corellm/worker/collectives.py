"""The group of ranks that share one model: alone, or over torch.distributed (NCCL between GPUs, gloo between CPUs)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from corellm.errors import StartupError
from corellm.layers.parallel import Collectives

TIMEOUT_S = 120.0


class SingleRank:
    """A group of one: every operation is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor | None:
        return logits[:, :vocab]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def close(self) -> None:
        pass


class TorchDistributed:
    """`size` ranks that meet through the file `rendezvous`; the engine keeps their sockets on loopback.

    Raises `StartupError` when the others do not appear within `timeout_s`, which also bounds every later operation.
    """

    def __init__(self, backend: str, rendezvous: Path, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self.rank = rank
        self.size = size
        try:
            store = FileStore(str(rendezvous), size)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise StartupError(
                f"rank {rank} of --tp {size} could not join the others over {backend}: {reason}"
            ) from None

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

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
        dist.destroy_process_group()


def make_collectives(rendezvous: Path, rank: int, size: int, device: torch.device) -> SingleRank | TorchDistributed:
    """The group for a worker on `device`."""
    if size == 1:
        return SingleRank()
    return TorchDistributed("nccl" if device.type == "cuda" else "gloo", rendezvous, rank, size)


__all__ = ["Collectives", "SingleRank", "TorchDistributed", "make_collectives"]
