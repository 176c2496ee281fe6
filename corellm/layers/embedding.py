"""Embedding, split over ranks by vocabulary."""

from __future__ import annotations

from torch import Tensor

from corellm.kernels import Backend
from corellm.layers.parallel import EMBEDDING, Collectives


def embed(tokens: Tensor, weight: Tensor, backend: Backend, group: Collectives) -> Tensor:
    """Vectors of tokens [n] from this rank's part [v / size, hidden] of the table: [n, hidden] on every rank."""
    if group.size == 1:
        return backend.embed(tokens, weight)
    local = tokens - group.rank * len(weight)
    absent = (local < 0) | (local >= len(weight))
    vectors = backend.embed(local.masked_fill(absent, 0), weight)
    part = group.part(vectors, EMBEDDING).copy_(vectors).masked_fill_(absent[:, None], 0)
    group.add_sum(part, vectors.zero_(), EMBEDDING)
    return vectors
