"""The KV allocator that shares prefixes: a radix tree over pages of tokens.

Who owns which block:

    free list ──open, extend──▶ private block of one owner ──publish──▶ node of the tree
        ▲                            │                                    │        ▲
        └──────────close─────────────┘            last owner closes       ▼        │ open finds it
        └────────────────────────evict, forget──────────────────────── cached ─────┘

An owner's table is a path of the tree followed by private blocks: its leading pages are nodes, from the root down, and
it holds every one of them. So a node that no one holds has only descendants that no one holds, all cached blocks can be
evicted leaf by leaf, and `available` is simply free + cached.

When two owners compute the same page, the first to publish it makes the node. The second keeps its own block private
and publishes no more, because its deeper pages could only hang under a node that it would have to hold besides its own
block: it would pin up to twice the blocks that it was admitted for, and might never fit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from corellm.comms.messages import KVStats
from corellm.comms.stats_messages import CACHED, FREE, IN_USE, SHARED
from corellm.engine.kv_cache.allocator import Allocation
from corellm.engine.kv_cache.tree_view import TreeView, view

_TOKEN_BYTES = 4  # tokens are compared as int32


@dataclass(slots=True, eq=False)
class _Node:
    """One published page: the tokens of its path end here, and their KV is in `block`."""

    key: bytes
    block: int
    parent: _Node | None  # None once evicted or forgotten; and in the root
    refs: int = 1  # owners that hold it; always 1 in the root
    released: int = 0  # tick at which its last owner let go
    children: dict[bytes, _Node] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Owner:
    salt: str
    path: list[_Node]  # of its leading pages, from the root down
    matched: int  # how many of `path` were there when it opened; it published the others itself
    blocks: list[int]  # in order of position; the first len(path) are those of `path`, the others private
    publishing: bool = True


class RadixCacheAllocator:
    """`KVCacheAllocator` that keeps published pages for whoever comes with the same leading tokens and salt."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.states = bytearray([FREE]) * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the lowest id is handed out first
        self._owners: dict[int, _Owner] = {}
        self._root = _Node(key=b"", block=-1, parent=None)
        self._cached = 0  # nodes that no one holds
        self._shared = 0  # nodes that two or more owners hold
        self._clock = 0
        # Childless nodes that no one holds, oldest release first. Entries of nodes that were since held, evicted or
        # forgotten stay until they surface. A tick is given once, so entries never tie on different nodes.
        self._leaves: list[tuple[int, _Node]] = []
        self._evictions = 0
        self._hit_tokens = 0
        self._query_tokens = 0

    @property
    def available(self) -> int:
        return len(self._free) + self._cached

    def match(self, tokens: np.ndarray, salt: str = "") -> int:
        return len(self._find(tokens, salt)) * self.page_size

    def open(
        self, owner: int, tokens: np.ndarray, salt: str = "", *, reuse: bool = True, spare: int = 0
    ) -> Allocation | None:
        if owner in self._owners:
            raise ValueError(f"owner {owner} is open already; close it before it is opened again")
        path = self._find(tokens, salt) if reuse else []
        needed = -(-len(tokens) // self.page_size) - len(path)
        if needed + spare > self.available - sum(node.refs == 0 for node in path):
            return None
        for node in path:  # before blocks are taken: held nodes are not evicted
            self._hold(node)
        blocks = [node.block for node in path] + self._take(needed)
        self._owners[owner] = _Owner(salt=salt, path=path, matched=len(path), blocks=blocks)
        cached_tokens = len(path) * self.page_size
        self._hit_tokens += cached_tokens
        self._query_tokens += len(tokens)
        return Allocation(blocks=blocks.copy(), cached_tokens=cached_tokens)

    def extend(self, owner: int, count: int = 1) -> list[int] | None:
        held = self._owner(owner)
        if count < 0:
            raise ValueError(f"count is {count}; it must be 0 or more")
        if count > self.available:
            return None
        blocks = self._take(count)
        held.blocks += blocks
        return blocks

    def publish(self, owner: int, tokens: np.ndarray) -> None:
        held = self._owner(owner)
        path, pages = held.path, len(tokens) // self.page_size
        if pages > len(held.blocks):
            raise ValueError(
                f"owner {owner} publishes {pages} pages but holds {len(held.blocks)} blocks; extend it first"
            )
        if not held.publishing:
            return
        parent = path[-1] if path else self._root
        if path and parent.parent is None:  # forgotten, so nothing below can be found
            held.publishing = False
            return
        for key in self._keys(tokens, len(path), pages, held.salt):
            if key in parent.children:
                held.publishing = False
                return
            node = _Node(key=key, block=held.blocks[len(path)], parent=parent)
            parent.children[key] = node
            path.append(node)
            parent = node

    def forget(self, owner: int) -> None:
        held = self._owner(owner)
        held.publishing = False
        if held.path:
            self._forget(held.path[0])

    def close(self, owner: int) -> None:
        held = self._owner(owner)
        del self._owners[owner]
        for block in reversed(held.blocks[len(held.path) :]):
            self._put_back(block)
        for node in held.path:
            self._release(node)

    def stats(self) -> KVStats:
        free = len(self._free)
        return KVStats(
            total=self.num_blocks,
            free=free,
            in_use=self.num_blocks - free - self._cached,
            cached=self._cached,
            shared=self._shared,
            evictions=self._evictions,
            hit_tokens=self._hit_tokens,
            query_tokens=self._query_tokens,
        )

    def tree(self) -> TreeView:
        ends: dict[int, list[int]] = {}
        for number, owner in self._owners.items():
            if owner.path:
                ends.setdefault(owner.path[-1].block, []).append(number)
        return view(self._root, ends, self.page_size * _TOKEN_BYTES)

    def check(self) -> None:
        refs = Counter(node for owner in self._owners.values() for node in owner.path)
        tree = self._check_tree()
        self._check_owners(tree)
        for node in refs.keys() | tree:
            if node.refs != refs[node]:
                raise ValueError(f"block {node.block} counts {node.refs} owners; {refs[node]} hold it")
        self._check_counts(refs.keys() | tree)
        self._check_leaves(tree)

    def _owner(self, owner: int) -> _Owner:
        try:
            return self._owners[owner]
        except KeyError:
            raise ValueError(f"owner {owner} is not open; it was never opened or is closed already") from None

    def _keys(self, tokens: np.ndarray, first: int, last: int, salt: str) -> Iterator[bytes]:
        """Keys of pages [first, last): their tokens. The first page's ends in the salt, which parts tenants' trees."""
        size = self.page_size
        raw = np.asarray(tokens[first * size : last * size], dtype=np.int32).tobytes()
        for start in range(0, len(raw), size * _TOKEN_BYTES):
            key = raw[start : start + size * _TOKEN_BYTES]
            yield key + salt.encode("utf-8", "surrogatepass") if first == 0 and start == 0 else key

    def _find(self, tokens: np.ndarray, salt: str) -> list[_Node]:
        """The longest path of published pages that leaves at least one of `tokens` to compute."""
        path: list[_Node] = []
        node = self._root
        for key in self._keys(tokens, 0, max(len(tokens) - 1, 0) // self.page_size, salt):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _hold(self, node: _Node) -> None:
        node.refs += 1
        self._cached -= node.refs == 1
        self._shared += node.refs == 2
        self.states[node.block] = IN_USE if node.refs == 1 else SHARED

    def _release(self, node: _Node) -> None:
        node.refs -= 1
        self._shared -= node.refs == 1
        if node.refs:
            self.states[node.block] = IN_USE if node.refs == 1 else SHARED
            return
        if node.parent is None:
            self._put_back(node.block)
            return
        self._cached += 1
        self.states[node.block] = CACHED
        self._clock += 1
        node.released = self._clock
        if not node.children:
            self._push_leaf(node)

    def _take(self, count: int) -> list[int]:
        """Hand out `count` blocks, of which the caller knows that they are available."""
        free = self._free
        while len(free) < count:
            self._evict()
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self.states[block] = IN_USE
        return taken

    def _put_back(self, block: int) -> None:
        self._free.append(block)
        self.states[block] = FREE

    def _evict(self) -> None:
        """Move the block of the childless unheld node that was released first to the free list."""
        while True:
            released, node = heapq.heappop(self._leaves)
            if _is_leaf(node, released):
                break
        parent = node.parent
        self._detach(node)
        self._put_back(node.block)
        self._cached -= 1
        self._evictions += 1
        if parent is not None and parent.refs == 0 and not parent.children:
            self._push_leaf(parent)

    def _push_leaf(self, node: _Node) -> None:
        heapq.heappush(self._leaves, (node.released, node))
        if len(self._leaves) > 2 * self.num_blocks:  # at most num_blocks are true: rebuilding is amortised
            self._leaves = [entry for entry in self._leaves if _is_leaf(entry[1], entry[0])]
            heapq.heapify(self._leaves)

    def _forget(self, top: _Node) -> None:
        """Cut `top` and all below it off the tree. What someone holds is freed when the last of them lets go."""
        if top.parent is None:
            return
        below = [top]
        while below:
            node = below.pop()
            below.extend(node.children.values())
            self._detach(node)
            if node.refs == 0:
                self._put_back(node.block)
                self._cached -= 1

    @staticmethod
    def _detach(node: _Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.key]
        node.parent = None

    def _check_tree(self) -> set[_Node]:
        """Walk the tree; returns its nodes."""
        nodes: set[_Node] = set()
        below = [self._root]
        while below:
            parent = below.pop()
            for key, node in parent.children.items():
                if node.key != key or node.parent is not parent:
                    raise ValueError(f"block {node.block} hangs under another page than it says")
                if node.refs and not parent.refs:
                    raise ValueError(f"block {node.block} is held but its parent, block {parent.block}, is not")
                nodes.add(node)
                below.append(node)
        return nodes

    def _check_owners(self, tree: set[_Node]) -> None:
        for number, owner in self._owners.items():
            parent: _Node | None = self._root
            for node, block in zip(owner.path, owner.blocks, strict=False):
                if node.block != block:
                    raise ValueError(f"owner {number} has block {block} where its page is in block {node.block}")
                if node in tree and node.parent is not parent:
                    raise ValueError(f"owner {number} holds block {block} without the page before it")
                if node not in tree and node.parent is not None:
                    raise ValueError(f"owner {number} holds block {block}, which is cut off but has a parent")
                parent = node
            if not owner.matched <= len(owner.path) <= len(owner.blocks):
                raise ValueError(f"owner {number} holds {len(owner.blocks)} blocks for {len(owner.path)} pages")

    def _check_counts(self, nodes: set[_Node]) -> None:
        places = Counter(self._free)
        places.update(node.block for node in nodes)
        for owner in self._owners.values():
            places.update(owner.blocks[len(owner.path) :])
        for block in range(self.num_blocks):
            if places[block] != 1:
                raise ValueError(f"block {block} is in {places[block]} places; it must be free, private or a page once")
        if len(places) != self.num_blocks:
            raise ValueError(f"{len(places)} block ids are known; there are {self.num_blocks}")
        cached, shared = sum(node.refs == 0 for node in nodes), sum(node.refs > 1 for node in nodes)
        if (self._cached, self._shared) != (cached, shared):
            raise ValueError(
                f"{self._cached} blocks count as cached and {self._shared} as shared; it is {cached} and {shared}"
            )
        self._check_states(nodes)

    def _check_states(self, nodes: set[_Node]) -> None:
        states = bytearray([IN_USE]) * self.num_blocks
        for block in self._free:
            states[block] = FREE
        for node in nodes:
            states[node.block] = CACHED if node.refs == 0 else IN_USE if node.refs == 1 else SHARED
        for block, (told, true) in enumerate(zip(self.states, states, strict=True)):
            if told != true:
                raise ValueError(f"block {block} is told to be in state {told}; it is in {true}")

    def _check_leaves(self, tree: set[_Node]) -> None:
        listed = [node for released, node in self._leaves if _is_leaf(node, released)]
        leaves = {node for node in tree if node.refs == 0 and not node.children}
        if len(listed) != len(leaves) or set(listed) != leaves:
            raise ValueError(f"{len(listed)} nodes are listed for eviction; {len(leaves)} are unheld leaves")
        if len(self._leaves) > 2 * self.num_blocks:
            raise ValueError(f"the eviction heap holds {len(self._leaves)} entries for {self.num_blocks} blocks")


def _is_leaf(node: _Node, released: int) -> bool:
    """Whether a heap entry still tells the truth. Children only come while a node is held, so it has none."""
    return node.refs == 0 and node.released == released and node.parent is not None
