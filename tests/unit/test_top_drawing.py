"""Panels as lines: what each cell says, for any size, and that nobody's text gets to the terminal as it came."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corellm.comms.stats_messages import BlockMap, Tree, TreeSegment
from corellm_tui import top_panels
from corellm_tui.top_charts import STATE_LOOKS, bar, block_cells, block_map, stacked_bars
from corellm_tui.top_lines import Span, fit, plain, rule, spread, width
from corellm_tui.top_once import text_lines
from corellm_tui.top_state import Link, TopState
from corellm_tui.top_table import COLUMNS, View, column_at, header_line, row_line, select
from corellm_tui.top_tree import holders, tree_lines
from tests.support.top_material import INFO, request, snapshot

SIZES = [(20, 3), (38, 7), (80, 12), (150, 30)]


@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 8), st.randoms(use_true_random=False))
def test_small_pools_show_every_block_and_large_ones_what_most_of_a_cell_is(
    total: int, columns: int, rows: int, chance: random.Random
) -> None:
    states = [chance.randrange(4) for _ in range(total)]
    blocks = BlockMap(1, [value for state in states for value in (state, 1)])
    lines = block_map(blocks, columns, rows)
    assert 1 <= len(lines) <= rows
    assert all(width(line) <= columns for line in lines)
    if total <= columns * rows:
        drawn = "".join(plain([*line, Span(".")])[:-1] for line in lines)
        stretch = len(drawn) // total
        signs = {look.text: state for state, look in STATE_LOOKS.items()}
        assert [signs[sign] for sign in drawn[::stretch]] == states
    elif total % (columns * rows) == 0:
        parts = np.array(states).reshape(columns * rows, -1)
        for cell, part in zip(block_cells(blocks, columns * rows).tolist(), parts, strict=True):
            assert np.count_nonzero(part == cell) == np.bincount(part).max()


def test_a_map_of_absurd_size_costs_no_memory() -> None:
    lines = block_map(BlockMap(1, [0, 10**15, 1, 10**15]), 10, 2)
    assert [plain(line) for line in lines] == ["·" * 10, "■" * 10]


def test_stacked_bars_are_as_high_as_their_parts() -> None:
    lines = stacked_bars([0, 8, 4, 0], [0, 0, 4, 16], top=16, rows=2)
    cells = [[(char, span.role, span.ground) for span in line for char in span.text] for line in lines]
    assert [cell[0] for cell in cells[0]] == [" ", " ", " ", "█"]
    assert cells[1][0][0] == " "
    assert cells[1][1] == ("█", "decode", "")
    assert cells[1][2] == ("▄", "decode", "prefill")
    assert cells[1][3] == ("█", "prefill", "")


def test_without_colours_prefill_and_decode_differ_by_their_signs() -> None:
    lines = stacked_bars([8, 2], [8, 6], top=16, rows=2)
    assert [plain(line) for line in lines] == ["▒", "█▒"]


def test_a_number_that_does_not_fit_its_column_does_not_pass_for_another() -> None:
    row = request(123_456_789, prompt_tokens=1_234_567)
    assert plain(row_line(row, 0.0, 80)).split()[0] == "123456…"
    assert "1234567" in plain(row_line(row, 0.0, 80))


def test_a_bar_shows_every_part_that_is_not_zero() -> None:
    line = bar([(1, "shared"), (0, "used"), (999, "cached")], 1000, 10)
    assert [(span.text, span.role) for span in line] == [("█", "shared"), ("█" * 9, "cached"), ("", "dim")]
    assert width(bar([(5, "used")], 0, 10)) == 10


@given(st.text(max_size=30), st.integers(0, 40))
def test_fit_gives_exactly_the_cells_asked_for(text: str, cells: int) -> None:
    assert width(fit([Span(text)], cells)) == cells


def test_titles_and_notes_keep_to_the_line() -> None:
    assert width(rule("KV cache", [Span("50%")], 30)) == 30
    assert plain(rule("Rates", [], 10)) == "Rates ────"
    assert width(rule("KV cache", [Span("a long note")], 9)) == 9
    assert plain(spread([Span("left")], [Span("right")], 12)) == "left   right"
    assert plain(spread([Span("left")], [Span("right")], 8)) == "left"


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("sequences", [(), (1,), (1, 2, 3)])
def test_every_panel_keeps_to_its_rows_with_any_state(columns: int, rows: int, sequences: tuple[int, ...]) -> None:
    state = TopState(INFO if columns > 38 else None)
    for sequence in sequences:
        state.add(snapshot(sequence))
    for panel in (top_panels.kv_cache, top_panels.rates, top_panels.steps):
        assert len(panel(state, columns, rows)) <= max(rows, 6)
    assert len(top_panels.header(state, columns)) == 1
    assert len(top_panels.gauges(state, columns)) <= 3


def test_the_kv_panel_says_the_allocators_counts() -> None:
    state = TopState(INFO)
    state.add(snapshot(4))
    text = "\n".join(plain(line) for line in top_panels.kv_cache(state, 80, 10))
    for words in ("50% in use", "20 free", "40 used", "10 shared", "30 cached", "100 tokens reused", "2 evictions"):
        assert words in text


EVIL = "\x1b]0;owned\x07\x1b[31m[bold red]x[/][/INST]\u202e\r\n\x9b2J"


def test_no_text_of_others_reaches_the_terminal_as_it_came() -> None:
    info = msgspec.structs.replace(INFO, name=EVIL, model=EVIL, device=EVIL)
    stats = msgspec.structs.replace(snapshot(1).stats, state=EVIL, model=EVIL)
    state = TopState(info)
    state.add(snapshot(1, stats=stats))
    state.set_link(Link(is_live=True))
    shown = "\n".join(text_lines(state, 500))
    state.set_link(Link(is_live=False, message=EVIL))
    shown += "\n".join(plain(line) for line in top_panels.header(state, 500))
    shown += "\n".join(plain(line) for line in tree_lines(TREE, lambda token: EVIL))
    assert "[bold red]x[/][/INST]" in shown
    assert not [char for char in shown if (ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160]
    assert "\u202e" not in shown


ROWS = [request(number, output_tokens=number * 7 % 5, prompt_tokens=number) for number in range(1, 21)]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_sorting_orders_by_the_column_both_ways(column: object) -> None:
    view = View(sort="id").sorted_by(column.name)  # type: ignore[attr-defined]
    keys = [column.key(row, 9.0) for row in select(ROWS, view, 9.0)]  # type: ignore[attr-defined]
    again = [column.key(row, 9.0) for row in select(ROWS, view.sorted_by(view.sort), 9.0)]  # type: ignore[attr-defined]
    assert keys == sorted(keys, reverse=view.descending)
    assert again == sorted(keys, reverse=not view.descending)


def test_the_filter_keeps_rows_that_hold_every_word() -> None:
    rows = [
        request(1, state="waiting", wait="blocks"),
        request(2, state="waiting", wait="turn", priority=0),
        request(12, preemptions=2),
    ]
    for words, kept in {"waiting": [1, 2], "WAIT blocks": [1], "interactive": [2], "#12": [12], "again": [12]}.items():
        assert [row.id for row in select(rows, View(sort="id", words=words), 9.0)] == kept


@pytest.mark.parametrize("columns", [40, *range(49, 125)])
def test_names_and_cells_stand_in_the_same_columns(columns: int) -> None:
    names, cells = header_line(View(), columns), row_line(ROWS[0], 9.0, columns)
    assert [len(span.text) for span in names] == [len(span.text) for span in cells]
    assert width(names) <= max(columns, 49)
    for name, start in zip(names, np.cumsum([0, *(len(span.text) for span in names)]).tolist(), strict=False):
        column = column_at(start, columns)
        assert column is not None
        assert column.name in name.text


TREE = Tree(
    uptime_s=1.0,
    page_size=4,
    segments=[
        TreeSegment(1, 0, 5, 3, [9], 0, -1),
        TreeSegment(2, 1, 2, 1, [7], 3, 55),
        TreeSegment(3, 1, 1, 1, [8], 3, 66),
        TreeSegment(4, 0, 1, 0, [], 0, 12),
    ],
    pages=9,
    complete=False,
)


def test_the_tree_says_who_shares_what_and_where_prompts_part() -> None:
    assert sorted(holders(TREE)[1]) == [7, 8, 9]
    text = [plain(line) for line in tree_lines(TREE, lambda token: {55: " dog"}.get(token, ""))]
    assert text[0] == "└ 5 pages = 20 tokens shared by 3: #7 #8 #9"
    assert text[1] == "  └ 2 pages = 8 tokens held by 1: #7"
    assert text[2] == "    near miss: 3 more tokens alike, then 55 ' dog'"
    assert text[-2] == "└ 1 page = 4 tokens cached, held by no one"
    assert text[-1].startswith("… and more")
