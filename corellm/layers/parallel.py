"""What the layers ask of a tensor-parallel group."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Operations over the ranks that share one model. Every rank calls them in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, on every rank; x itself may be overwritten."""
        ...

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor | None:
        """Join logits [s, v / size] of every rank along the vocabulary: [s, vocab] on rank 0, None elsewhere."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Fill x with rank 0's values."""
        ...
