"""What one step hands to the graph and its kernels.

Sizes: n tokens in the step, r rows (sequences), s sampling rows. A KV slot is `block * page_size + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one rank. Query head h reads KV head `h // (count // kv)`."""

    count: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.count // self.kv

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of every block, each [layers, num_blocks + 1, page_size, kv_heads, head_dim].

    The last block belongs to no sequence: rows that only pad a batch write there.
    """

    k: Tensor
    v: Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step as the host knows them, their tokens laid end to end.

    Token i of a row attends to positions up to its own.
    """

    slots: NDArray[np.int64]  # [r] their rows in the block table
    starts: NDArray[np.int64]  # [r + 1]: row i is tokens starts[i]:starts[i + 1] of the step
    contexts: NDArray[np.int64]  # [r] tokens of the sequence whose KV is there after this step


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step on the device."""

    tokens: Tensor  # [n] int32 vocabulary ids
    positions: Tensor  # [n] int64 in the sequence
    kv_slots: Tensor  # [n] int64 where K and V of each token go
    sampled: Tensor  # [s] int64 index in 0..n-1 of the last token of each sampling row


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary factors of the step's tokens, in the activations' dtype, each [n, 1, head_dim].

    A pair is (x[i], x[i + head_dim / 2]). The first half of `sin` is negated, so that both halves are rotated by the
    same expression: x * cos + roll(x, head_dim / 2) * sin.
    """

    cos: Tensor
    sin: Tensor
