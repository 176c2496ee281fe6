"""The radix tree as an indented list: what is shared, by whom, and where two prompts part."""

from __future__ import annotations

from collections.abc import Callable

from corellm.comms.stats_messages import Tree, TreeSegment

from . import quantities
from .top_lines import Line, Span, foreign

NAMES_SHOWN = 8

Holders = dict[int, list[int]]  # segment -> the open requests that hold it
TokenText = Callable[[int], str]


def holders(tree: Tree) -> Holders:
    """Those whose shared pages end at a segment hold all that is above it, too."""
    found: Holders = {segment.id: list(segment.ends) for segment in tree.segments}
    for segment in reversed(tree.segments):  # children come after their parents
        if segment.parent in found:
            found[segment.parent] += found[segment.id]
    return found


def tree_lines(tree: Tree | None, token_text: TokenText) -> list[Line]:
    """The whole tree, depth first."""
    if tree is None:
        return [[Span("no tree yet: the engine sends one about once a second", "dim")]]
    if not tree.segments:
        return [[Span("nothing is cached: no prompt has filled a page yet, or --kv-cache is naive", "dim")]]
    held = holders(tree)
    children: dict[int, list[TreeSegment]] = {}
    for segment in tree.segments:
        children.setdefault(segment.parent, []).append(segment)
    lines: list[Line] = []
    stack = [(segment, 0) for segment in reversed(children.get(0, []))]
    while stack:
        segment, depth = stack.pop()
        lines.append(_segment_line(segment, depth, held[segment.id], tree.page_size))
        if segment.common and segment.token >= 0:
            lines.append(_near_miss(segment, depth, token_text))
        stack += [(child, depth + 1) for child in reversed(children.get(segment.id, []))]
    if not tree.complete:
        lines.append([Span(f"… and more: the first {tree.pages:,} pages are shown", "dim")])
    return lines


def _segment_line(segment: TreeSegment, depth: int, names: list[int], page_size: int) -> Line:
    role = "shared" if segment.holders > 1 else "used" if segment.holders else "cached"
    line = [
        Span("  " * depth + "└ ", "dim"),
        Span(quantities.counted(segment.pages, "page"), role),
        Span(f" = {segment.pages * page_size:,} tokens ", "dim"),
    ]
    if not segment.holders:
        return [*line, Span("cached, held by no one", "dim")]
    shown = " ".join(f"#{name}" for name in sorted(names)[:NAMES_SHOWN])
    more = segment.holders - min(len(names), NAMES_SHOWN)
    word = "shared by" if segment.holders > 1 else "held by"
    return [*line, Span(f"{word} {segment.holders}: ", role), Span(shown), Span(f" +{more}" if more > 0 else "", "dim")]


def _near_miss(segment: TreeSegment, depth: int, token_text: TokenText) -> Line:
    text = token_text(segment.token)
    return [
        Span("  " * depth + "  near miss: ", "warn"),
        Span(f"{quantities.counted(segment.common, 'more token')} alike, then {segment.token} ", "dim"),
        foreign(repr(text) if text else "", "warn"),
    ]
