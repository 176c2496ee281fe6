"""What the layers ask of a tensor-parallel group."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

PLACES = 3
"""Where the parts of a sum over ranks may be left. A sum must not use the place of the one before it: a slower rank may
still be reading there. So a layer's two take turns, and a step's first has one of its own."""
EMBEDDING, ATTENTION, MLP = range(PLACES)


class Collectives(Protocol):
    """Operations over the ranks that share one model. Every rank calls them in the same order."""

    rank: int
    size: int

    def part(self, like: Tensor, place: int) -> Tensor:
        """Memory of the shape and dtype of `like`, where this rank is to leave its part of a sum."""
        ...

    def add_sum(self, part: Tensor, residual: Tensor, place: int) -> None:
        """Add the sum of the ranks' parts to `residual`, which has the same values on every rank before and after.

        part: what `part` gave, filled; it may be overwritten.
        """
        ...

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor | None:
        """Join logits [s, v / size] of every rank along the vocabulary: [s, vocab] on rank 0, None elsewhere."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Fill x with rank 0's values."""
        ...
