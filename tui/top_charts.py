"""Block map, bars and histories as lines. Each takes data and a size, and knows nothing of screens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corellm.comms.stats_messages import CACHED, FREE, IN_USE, SHARED, BlockMap

from .top_lines import Line, Span

# By state: how a cell looks. The signs differ, so that the map can be read without colours.
STATE_LOOKS = {
    FREE: Span("·", "dim"),
    IN_USE: Span("■", "used"),
    SHARED: Span("◆", "shared"),
    CACHED: Span("□", "cached"),
}
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_WIDEST_BLOCK = 8


def block_cells(blocks: BlockMap, cells: int) -> np.ndarray:
    """The state of each of `cells` equal parts of the pool: the one that most of the part is in. [cells] integers."""
    runs = np.asarray(blocks.runs, dtype=np.float64).reshape(-1, 2)
    ends = np.concatenate(([0.0], np.cumsum(runs[:, 1])))
    edges = np.linspace(0.0, ends[-1], cells + 1)
    shares = [
        np.diff(np.interp(edges, ends, np.concatenate(([0.0], np.cumsum(runs[:, 1] * (runs[:, 0] == state))))))
        for state in (FREE, IN_USE, SHARED, CACHED)
    ]
    return np.asarray(np.argmax(shares, axis=0))


def block_map(blocks: BlockMap, columns: int, rows: int) -> list[Line]:
    """The pool in `rows` lines, the first block at the top left. Small pools have several columns for a block."""
    total = sum(blocks.runs[1::2])
    if columns < 1 or rows < 1 or total < 1:
        return []
    units = min(total, columns * rows)
    stretch = max(1, min(_WIDEST_BLOCK, columns * rows // units, columns))
    while stretch > 1 and -(-units // (columns // stretch)) > rows:
        stretch -= 1
    a_line = columns // stretch
    states = block_cells(blocks, units)
    return [_states_line(states[start : start + a_line], stretch) for start in range(0, units, a_line)]


def _states_line(states: np.ndarray, stretch: int) -> Line:
    """By run-length, so that a line is a handful of spans."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(states)) + 1))
    lengths = np.diff(starts, append=len(states))
    line: Line = []
    for state, length in zip(states[starts].tolist(), lengths.tolist(), strict=True):
        look = STATE_LOOKS[state]
        line.append(look._replace(text=look.text * (length * stretch)))
    return line


def bar(parts: Sequence[tuple[float, str]], total: float, cells: int) -> Line:
    """A horizontal bar of parts (amount, role) of `total`; every part that is not 0 shows."""
    line: Line = []
    left = cells
    for amount, role in parts:
        size = min(left, max(round(amount / total * cells), 1)) if total > 0 and amount > 0 else 0
        if size:
            line.append(Span("█" * size, role))
            left -= size
    line.append(Span("░" * left, "dim"))
    return line


def stacked_bars(lower: Sequence[float], upper: Sequence[float], top: float, rows: int) -> list[Line]:
    """Columns of `lower` and, above it, `upper`, where a column of height `top` fills `rows` lines."""
    scale = rows * 8 / top if top > 0 else 0.0
    columns = []
    for below, above in zip(lower, upper, strict=True):
        high = min(rows * 8, max(round((below + above) * scale), 1 if below + above else 0))
        low = min(high, max(round(below * scale), 1 if below else 0))
        columns.append((low, high))
    return [_bars_line(columns, row) for row in range(rows - 1, -1, -1)]


def _bars_line(columns: Sequence[tuple[int, int]], row: int) -> Line:
    line: Line = []
    for low, high in columns:
        span = _bar_cell(low - row * 8, high - row * 8)
        if line and line[-1][1:] == span[1:]:
            line[-1] = line[-1]._replace(text=line[-1].text + span.text)
        else:
            line.append(span)
    return line


def _bar_cell(low: int, high: int) -> Span:
    """One cell of a column whose parts end `low` and `high` eighths above the cell's foot."""
    if low >= 8:
        return Span("█", "decode")
    if low <= 0:
        return Span(_EIGHTHS[max(0, min(8, high))], "prefill")
    if high > low:  # the rest of the cell is the upper part's, to the eighth that a cell can show
        return Span(_EIGHTHS[low], "decode", "prefill")
    return Span(_EIGHTHS[low], "decode")


def sparkline(values: Sequence[float], top: float, role: str) -> Span:
    """One line of columns; what is not 0 shows."""
    scale = 8 / top if top > 0 else 0.0
    return Span("".join(_EIGHTHS[min(8, max(round(v * scale), 1 if v > 0 else 0))] for v in values), role)


def last_columns(values: Sequence[float], columns: int) -> list[float]:
    """The last `columns` values, with zeros before them where there are fewer."""
    found = list(values)[-columns:] if columns > 0 else []
    return [0.0] * (columns - len(found)) + found
