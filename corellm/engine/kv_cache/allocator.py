"""What the scheduler asks of a KV allocator: bookkeeping of block ids, no memory and no tensors.

A block holds the KV of `page_size` consecutive tokens in every layer. An owner (a running sequence) holds blocks in
order of position. Each block is in exactly one state:

    free      on the free list
    in use    held by one or more owners
    cached    held by no owner, kept because its tokens may come again; evicted when blocks run short

free + in use + cached = total, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from corellm.comms.messages import KVStats
from corellm.engine.kv_cache.tree_view import TreeView


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks of a new owner in order of position; the KV of its first `cached_tokens` tokens is there already."""

    blocks: list[int]
    cached_tokens: int


class KVCacheAllocator(Protocol):
    """One pool of `num_blocks` blocks of `page_size` tokens. Owners are named by integers.

    Raises `ValueError` for a double free, an unknown owner, or an owner that is opened twice: these are bugs of the
    caller. Running out of blocks is not: it returns None and changes nothing.
    """

    num_blocks: int
    page_size: int
    states: bytearray  # of each block, by the numbers of `stats_messages`: FREE, IN_USE, SHARED, CACHED

    @property
    def available(self) -> int:
        """Blocks that could be handed out now: free ones and cached ones that may be evicted."""
        ...

    def match(self, tokens: np.ndarray, salt: str = "") -> int:
        """How many leading tokens have their KV at hand: whole pages, never all of `tokens`. Changes nothing."""
        ...

    def open(
        self, owner: int, tokens: np.ndarray, salt: str = "", *, reuse: bool = True, spare: int = 0
    ) -> Allocation | None:
        """Give `owner` a block for every page of `tokens`, or None if that would leave fewer than `spare` available.

        The matching prefix is shared, unless `reuse` is off because its KV is to be computed again.
        """
        ...

    def extend(self, owner: int, count: int = 1) -> list[int] | None:
        """Give `owner` `count` more blocks at its end, evicting cached ones as needed, or None."""
        ...

    def publish(self, owner: int, tokens: np.ndarray) -> None:
        """The KV of `tokens` (the owner's, from its first) is there before any later step: whole pages may be shared.

        Call again as `tokens` grows. A page that another owner published first stays private.
        """
        ...

    def forget(self, owner: int) -> None:
        """No page of this owner is to be trusted, shared ones included: from now on none matches, and none is kept."""
        ...

    def close(self, owner: int) -> None:
        """Take the owner's blocks back. Pages that it published stay as cached, unless they were forgotten."""
        ...

    def stats(self) -> KVStats:
        """Blocks by state, hits and evictions, in constant time."""
        ...

    def tree(self) -> TreeView:
        """What is shared by whom, in bounded time: the top of a large tree alone."""
        ...

    def check(self) -> None:
        """Verify every invariant by walking everything; raises `ValueError` with what is wrong. For tests."""
        ...
