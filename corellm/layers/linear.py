"""Linear layers split over ranks by the columns of their input.

A layer split by its output needs nothing of the group: each rank computes the part whose weights it has.
"""

from __future__ import annotations

from torch import Tensor

from corellm.kernels import Backend
from corellm.layers.parallel import Collectives


def row_parallel_add(
    x: Tensor, weight: Tensor, residual: Tensor, backend: Backend, group: Collectives, place: int
) -> None:
    """Add the product of x [n, in / size], a rank's part of the input, and weight [out, in / size] to `residual`.

    residual [n, out] is the same on every rank, before and after. place: see `PLACES`.
    """
    if group.size == 1:
        backend.linear_add(x, weight, residual)
        return
    part = group.part(residual, place)
    backend.linear_to(x, weight, part)
    group.add_sum(part, residual, place)
