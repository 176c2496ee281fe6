"""The plain KV allocator: every block belongs to one owner and is free again when that owner closes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from corellm.comms.messages import KVStats
from corellm.comms.stats_messages import FREE, IN_USE
from corellm.engine.kv_cache.allocator import Allocation
from corellm.engine.kv_cache.tree_view import TreeView


class NaiveCacheAllocator:
    """`KVCacheAllocator` without reuse: nothing is ever cached or shared, a prompt is always computed whole."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.states = bytearray([FREE]) * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is handed out first
        self._blocks: dict[int, list[int]] = {}  # by owner, in order of position
        self._query_tokens = 0

    @property
    def available(self) -> int:
        return len(self._free)

    def match(self, tokens: np.ndarray, salt: str = "") -> int:
        return 0

    def open(
        self, owner: int, tokens: np.ndarray, salt: str = "", *, reuse: bool = True, spare: int = 0
    ) -> Allocation | None:
        if owner in self._blocks:
            raise ValueError(f"owner {owner} is open already; close it before it is opened again")
        needed = -(-len(tokens) // self.page_size)
        blocks = self._take(needed) if needed + spare <= self.available else None
        if blocks is None:
            return None
        self._blocks[owner] = blocks
        self._query_tokens += len(tokens)
        return Allocation(blocks=blocks.copy(), cached_tokens=0)

    def extend(self, owner: int, count: int = 1) -> list[int] | None:
        held = self._held(owner)
        blocks = self._take(count)
        if blocks is not None:
            held += blocks
        return blocks

    def publish(self, owner: int, tokens: np.ndarray) -> None:
        pages, held = len(tokens) // self.page_size, len(self._held(owner))
        if pages > held:
            raise ValueError(f"owner {owner} publishes {pages} pages but holds {held} blocks; extend it first")

    def forget(self, owner: int) -> None:
        self._held(owner)  # nothing is ever shared or kept

    def close(self, owner: int) -> None:
        blocks = self._held(owner)
        del self._blocks[owner]
        self._free.extend(reversed(blocks))
        for block in blocks:
            self.states[block] = FREE

    def stats(self) -> KVStats:
        return KVStats(
            total=self.num_blocks,
            free=len(self._free),
            in_use=self.num_blocks - len(self._free),
            cached=0,
            shared=0,
            evictions=0,
            hit_tokens=0,
            query_tokens=self._query_tokens,
        )

    def tree(self) -> TreeView:
        return TreeView(segments=[], pages=0, complete=True)

    def check(self) -> None:
        places = Counter(self._free)
        for blocks in self._blocks.values():
            places.update(blocks)
        for block in range(self.num_blocks):
            if places[block] != 1:
                raise ValueError(f"block {block} is in {places[block]} places; it must be free or held exactly once")
        if len(places) != self.num_blocks:
            raise ValueError(f"{len(places)} block ids are known; there are {self.num_blocks}")
        for block in self._free:
            if self.states[block] != FREE:
                raise ValueError(f"block {block} is free; it is told to be in state {self.states[block]}")
        if self.states.count(FREE) != len(self._free):
            raise ValueError(f"{self.states.count(FREE)} blocks are told to be free; {len(self._free)} are")

    def _held(self, owner: int) -> list[int]:
        try:
            return self._blocks[owner]
        except KeyError:
            raise ValueError(f"owner {owner} is not open; it was never opened or is closed already") from None

    def _take(self, count: int) -> list[int] | None:
        """Pop `count` free blocks, or None. Raises `ValueError` when `count` is negative."""
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more")
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self.states[block] = IN_USE
        return taken
