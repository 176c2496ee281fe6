"""The radix tree as a picture: chains of pages with the same holders drawn together, its top first, within bounds."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from corellm.comms.stats_messages import SEGMENTS_MAX, TreeSegment

PAGES_MAX = 8192  # that a view looks at, so that the largest tree costs the engine a millisecond or two
ENDS_MAX = 32  # requests named at one segment
_TOKEN_BYTES = 4


class Node(Protocol):
    """What a view must know of a page: its tokens (and, in a first page, the salt), its holders, what follows it."""

    key: bytes
    block: int
    refs: int

    @property
    def children(self) -> Mapping[bytes, Node]: ...


@dataclass(frozen=True, slots=True)
class TreeView:
    """The top of a tree. `pages` counts those in `segments`."""

    segments: list[TreeSegment]
    pages: int
    complete: bool


def view(root: Node, ends: Mapping[int, list[int]], page_bytes: int) -> TreeView:
    """The tree below `root`, level by level. `ends` says which owners' shared pages end with the one in a block."""
    segments: list[TreeSegment] = []
    pages = 0
    complete = True
    below = deque([(root, 0)])  # the last page of a segment, and the segment's id
    while below and complete:
        last, parent = below.popleft()
        siblings = heapq.nlargest(SEGMENTS_MAX, last.children.values(), key=lambda node: node.refs)
        complete = len(siblings) == len(last.children)
        near = _near_misses([node.key for node in siblings], page_bytes)
        for first in siblings:
            if pages >= PAGES_MAX or len(segments) == SEGMENTS_MAX:
                complete = False
                break
            node, length = _segment(first, PAGES_MAX - pages)
            pages += length
            common, token = near[first.key]
            names = ends.get(node.block, [])[:ENDS_MAX]
            segments.append(TreeSegment(len(segments) + 1, parent, length, first.refs, names, common, token))
            below.append((node, len(segments)))
    return TreeView(segments, pages, complete)


def _segment(first: Node, most: int) -> tuple[Node, int]:
    """The last of the pages that follow one another with the same holders, and how many they are."""
    node, length = first, 1
    while length < most and len(node.children) == 1:
        (child,) = node.children.values()
        if child.refs != node.refs:
            break
        node, length = child, length + 1
    return node, length


def _near_misses(keys: Collection[bytes], page_bytes: int) -> dict[bytes, tuple[int, int]]:
    """Of each key: how many leading tokens it shares with the sibling that shares most, and its token after them."""
    found = dict.fromkeys(keys, (0, -1))
    ordered = sorted(keys)  # in any order by symbols, the nearest is a neighbour
    for one, other in pairwise(ordered):
        common = _common_tokens(one[:page_bytes], other[:page_bytes])
        for key in (one, other):
            if found[key][1] == -1 or common > found[key][0]:
                found[key] = (common, _token(key[:page_bytes], common))
    return found


def _common_tokens(one: bytes, other: bytes) -> int:
    for start in range(0, len(one), _TOKEN_BYTES):
        if one[start : start + _TOKEN_BYTES] != other[start : start + _TOKEN_BYTES]:
            return start // _TOKEN_BYTES
    return len(one) // _TOKEN_BYTES


def _token(page: bytes, index: int) -> int:
    raw = page[index * _TOKEN_BYTES : (index + 1) * _TOKEN_BYTES]
    return int.from_bytes(raw, "little") if raw else -1
