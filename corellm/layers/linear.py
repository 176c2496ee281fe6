"""Linear layers split over ranks by the columns of their input.

A layer split by its output needs nothing of the group: each rank computes the part whose weights it has.
"""

from __future__ import annotations

from torch import Tensor

from corellm.kernels import Backend
from corellm.layers.parallel import Collectives


def row_parallel_add(x: Tensor, weight: Tensor, residual: Tensor, backend: Backend, group: Collectives) -> None:
    """Add the product of x [n, in / size], a rank's part of the input, and weight [out, in / size] to `residual`.

    residual [n, out] is the same on every rank, before and after.
    """
    if group.size == 1:
        backend.linear_add(x, weight, residual)
    else:
        residual.add_(group.all_reduce(backend.linear(x, weight)))
