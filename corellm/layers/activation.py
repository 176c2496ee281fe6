"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from corellm.kernels import Backend
from corellm.layers.linear import column_parallel, row_parallel
from corellm.layers.parallel import Collectives


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, backend: Backend, group: Collectives) -> Tensor:
    """down(silu(gate(x)) * up(x)) for x [n, hidden], with this rank's weights: [n, hidden] on every rank."""
    return row_parallel(backend.silu_mul(column_parallel(x, gate_up, backend)), down, backend, group)
