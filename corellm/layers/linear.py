"""Linear layers split over ranks."""

from __future__ import annotations

from torch import Tensor

from corellm.kernels import Backend
from corellm.layers.parallel import Collectives


def column_parallel(x: Tensor, weight: Tensor, backend: Backend) -> Tensor:
    """x [n, in] whole on every rank, weight [out / size, in]: this rank's columns of the output [n, out / size]."""
    return backend.linear(x, weight)


def row_parallel(x: Tensor, weight: Tensor, backend: Backend, group: Collectives) -> Tensor:
    """x [n, in / size] as a column-parallel layer leaves it, weight [out, in / size]: [n, out] whole on every rank."""
    return group.all_reduce(backend.linear(x, weight))
