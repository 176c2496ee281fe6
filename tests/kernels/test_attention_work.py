"""The work list of attention: every query sees each of its positions once, and the items are about equally long."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corellm.kernels.attention_work import AttentionWork, plan_work
from corellm.kernels.inputs import Rows
from corellm.kernels.tuning import AttentionTile

TILE = AttentionTile(16, 64, warps=2, stages=2, programs_per_sm=2, min_split=4, max_splits=64)


def plan(rows: list[tuple[int, int]], programs: int, per_tile: int = 4, tile: AttentionTile = TILE) -> AttentionWork:
    starts = np.concatenate(([0], np.cumsum([new for _, new in rows])))
    contexts = np.array([prefix + new for prefix, new in rows])
    every = np.arange(len(rows))
    return plan_work(Rows(every, starts, contexts), every, tokens_per_tile=per_tile, tile=tile, programs=programs)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 30)), min_size=1, max_size=8),
    programs=st.integers(1, 64),
)
def test_every_query_sees_its_positions_once(rows: list[tuple[int, int]], programs: int) -> None:
    work = plan(rows, programs)
    seen: Counter[int] = Counter()
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    for token, count, row, visible, start, stop, slot, *_ in work.items.tolist():
        assert start % TILE.block_n == 0
        assert start < stop
        first = sum(new for _, new in rows[:row])
        assert visible == rows[row][0] + token - first + 1
        for i in range(count):
            seen[token + i] += min(stop, visible + i) - min(start, visible + i)
        pieces.setdefault(token, []).append((start, stop, slot))
    expected = [prefix + i + 1 for prefix, new in rows for i in range(new)]
    assert seen == Counter(dict(enumerate(expected)))

    used = [slot for found in pieces.values() for _, _, slot in found if slot >= 0]
    assert sorted(used) == list(range(work.slots))
    merged = {token: (local, first, splits) for token, local, first, splits in work.merges().tolist()}
    for token, count, *_ in work.items.tolist():
        found = sorted(pieces[token])
        assert all(a[1] == b[0] for a, b in pairwise(found))
        for i in range(count):
            whole = len(found) == 1
            assert merged.get(token + i) == (None if whole else (i, found[0][2], len(found)))
        assert [slot for *_, slot in found] == (
            [-1] if len(found) == 1 else [found[0][2] + i for i in range(len(found))]
        )
    for token, *_, slot, _, first, splits, _, _ in work.items.tolist():
        assert splits == len(pieces[token])
        assert slot == -1 or first == min(found for _, _, found in pieces[token])


@pytest.mark.parametrize(
    ("rows", "items"),
    [
        ([(4095, 1)], range(16, 17)),  # 64 tiles, no piece under 4
        ([(131071, 1)], range(32, 65)),  # one round of programs, or a second as full
        ([(1023, 1)] * 256, range(256, 257)),  # enough rows: nothing to gain
        ([(32767, 1)] * 8, range(96, 160)),
        ([(32767, 1)] + [(63, 1)] * 50, range(60, 160)),  # the long row alone is split
    ],
    ids=["one", "longest", "many", "few long", "mixed"],
)
def test_contexts_are_split_where_that_fills_the_device(rows: list[tuple[int, int]], items: range) -> None:
    assert len(plan(rows, programs=33).items) in items


def test_longest_items_come_first_and_none_is_more_splits_than_allowed() -> None:
    tile = AttentionTile(16, 64, warps=2, stages=2, programs_per_sm=2, min_split=1, max_splits=5)
    work = plan([(40000, 1), (100, 1), (20000, 9)], programs=500, tile=tile)
    lengths = work.items[:, 5] - work.items[:, 4]
    assert (np.diff(lengths) <= 0).all()
    assert max(Counter(work.items[:, 0].tolist()).values()) == 5
