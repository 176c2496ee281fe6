"""What each panel of the dashboard says, as lines, from the state alone."""

from __future__ import annotations

from corellm.comms.messages import KVStats
from corellm.comms.stats_messages import CACHED, FREE, IN_USE, SHARED

from . import quantities
from .top_charts import STATE_LOOKS, bar, block_map, last_columns, sparkline, stacked_bars
from .top_lines import Line, Span, foreign, rule, spread, width
from .top_state import TopState

HISTORY_ROWS = 1


def header(state: TopState, cells: int) -> list[Line]:
    """Which engine this is, and how the dashboard stands to it."""
    info, snapshot = state.info, state.snapshot
    is_wide = cells >= 70
    left: Line = [Span("corellm top ", "title")] if is_wide else []
    if not state.link.is_live:
        return [[*left, foreign(state.link.message, "bad")]]
    if info is not None:
        left += [foreign(info.model, "strong"), foreign(f" {info.device} tp {info.tp}" if is_wide else "", "dim")]
    if snapshot is None:
        return [left]
    stats = snapshot.stats
    up = f"  up {quantities.duration(stats.uptime_s)}" if is_wide else ""
    return [
        spread(
            left,
            [Span(f"{stats.running:,}", "decode"), Span(" running "), Span(f"{stats.waiting:,}", "warn"),
             Span(f" waiting{up}"), foreign("" if stats.state == "ready" else f"  {stats.state}", "bad")],
            cells,
        )
    ]  # fmt: skip


def kv_cache(state: TopState, cells: int, rows: int) -> list[Line]:
    """The block map with its counts and the history of use."""
    snapshot = state.snapshot
    if snapshot is None:
        return [rule("KV cache", [], cells)]
    kv = snapshot.stats.kv
    used = Span(f"{_percent(kv.in_use, kv.total)} in use", "used")
    page = f"{state.info.page_size} tokens a block" if state.info is not None and cells >= 50 else ""
    lines = [rule("KV cache", [Span(page + "  " if page else "", "dim"), used], cells), kv_counts(kv, cells)]
    history_rows = HISTORY_ROWS if rows >= 6 else 0
    lines += block_map(snapshot.blocks, cells, rows - len(lines) - 1 - history_rows)
    lines += [[Span("")]] * (rows - len(lines) - 1 - history_rows)
    if history_rows:
        use = last_columns([point.kv.in_use for point in state.points], cells)
        lines.append([sparkline(use, kv.total, "used")])
    lines.append(kv_traffic(kv))
    return lines[:rows]


def kv_counts(kv: KVStats, cells: int) -> Line:
    """Blocks by state, as wordy as the line has room for."""
    counts = (
        (FREE, "free", kv.free),
        (IN_USE, "used", kv.in_use - kv.shared),
        (SHARED, "shared", kv.shared),
        (CACHED, "cached", kv.cached),
    )
    for gap, after in ((" ", "  "), ("", " "), ("", "")):
        line: Line = []
        for state, name, count in counts:
            sign, role, _ = STATE_LOOKS[state]
            line += [Span(f"{sign}{gap}{count:,}", role), Span(f" {name}{after}" if after else " ", "dim")]
        if width(line) - len(after) <= cells:
            break
    return line


def kv_traffic(kv: KVStats) -> Line:
    return [
        Span(f"{kv.hit_tokens:,}", "cached"), Span(" tokens reused  ", "dim"),
        Span(f"{kv.evictions:,}", "warn"), Span(" evictions", "dim"),
    ]  # fmt: skip


def rates(state: TopState, cells: int, rows: int) -> list[Line]:
    """Throughput, latencies, counts, then GPUs or processes."""
    snapshot = state.snapshot
    if snapshot is None:
        return [rule("Rates", [], cells)]
    now, stats = state.rates(), snapshot.stats
    ttft, itl = state.time_to_first_token(0.5, 0.99), state.between_tokens(0.5, 0.99)
    lines: list[Line] = [
        rule("Rates", [Span(f"{quantities.rate(now.steps)} steps/s", "dim")], cells),
        [Span("in  ", "dim"), Span(f"{quantities.rate(now.prompt):>7}", "prefill"), Span(" tok/s  ", "dim"),
         Span("out ", "dim"), Span(f"{quantities.rate(now.output):>7}", "decode"), Span(" tok/s", "dim")],
        [Span("TTFT      ", "dim"), *_latencies(ttft)],
        [Span("per token ", "dim"), *_latencies(itl)],
        [Span("hit rate  ", "dim"), Span(f"{now.hit:.0%}", "cached"),
         Span(f"  preempted {stats.preemptions:,}", "bad" if stats.preemptions else "dim")],
        [Span("done ", "dim"), Span(f"{stats.finished:,}"), Span("  aborted ", "dim"), Span(f"{stats.aborted:,}"),
         Span("  failed ", "dim"), Span(f"{stats.failed:,}", "bad" if stats.failed else "text")],
    ]  # fmt: skip
    lines += hardware(state, cells)
    return lines[:rows]


def hardware(state: TopState, cells: int) -> list[Line]:
    """A line for each GPU; for an engine on a CPU one for each process."""
    facts = state.hardware
    if facts is None:
        return []
    lines: list[Line] = []
    for gpu in facts.gpus:
        memory = f" {quantities.size(gpu.used_bytes)}/{quantities.size(gpu.total_bytes)}"
        head = [Span(f"GPU {gpu.index} ", "dim"), Span(f"{gpu.use_percent:>3}%", "used"), Span(memory)]
        lines.append([*head, Span(f" {gpu.watts:.0f} W" if gpu.watts else "", "dim"), foreign(f" {gpu.name}", "dim")])
    if not facts.gpus:
        lines += [
            [foreign(f"{process.name:<10}", "dim"), Span(f"{process.cpu_percent:>4.0f}% CPU ", "used"),
             Span(f"{quantities.size(process.memory_bytes)}")]
            for process in facts.processes
        ]  # fmt: skip
    return lines


def steps(state: TopState, cells: int, rows: int) -> list[Line]:
    """Each step's tokens as a stacked bar, the newest at the right; under them step time and queue."""
    recent = list(state.steps)[-cells:]
    budget = state.info.max_batch_tokens if state.info is not None else 0
    if not recent:
        return [rule("Steps", [Span("none yet", "dim")], cells)]
    last = recent[-1]
    top = max(step.prefill_tokens + step.decode_tokens for step in recent)
    note = [
        Span("█", "prefill"), Span(f" prefill {last.prefill_tokens:,} ", "dim"),
        Span("█", "decode"), Span(f" decode {last.decode_tokens:,}", "dim"),
        Span(f"  top {top:,} of {budget:,} tokens" if cells >= 70 else f"  ↑{top:,}/{budget:,}", "dim"),
    ]  # fmt: skip
    lines = [rule("Steps", note, cells)]
    lines += stacked_bars(
        last_columns([step.decode_tokens for step in recent], cells),
        last_columns([step.prefill_tokens for step in recent], cells),
        top,
        max(rows - 3, 1),
    )
    slowest = max(step.seconds for step in recent)
    lines.append([sparkline(last_columns([step.seconds for step in recent], cells), slowest, "time")])
    facts = f"step {last.step:,}  {_milliseconds(last.seconds)} (slowest {_milliseconds(slowest)})"
    lines.append(spread([Span(facts, "time")], [Span(f"{last.rows:,} rows  queue {last.waiting:,}", "dim")], cells))
    return lines[:rows]


def gauges(state: TopState, cells: int) -> list[Line]:
    """The narrow layout's summary: cache, tokens, step."""
    snapshot = state.snapshot
    if snapshot is None:
        return []
    kv, now = snapshot.stats.kv, state.rates()
    parts = [(kv.shared, "shared"), (kv.in_use - kv.shared, "used"), (kv.cached, "cached")]
    last = state.steps[-1] if state.steps else None
    step: Line = []
    if last is not None:
        step = [
            Span("step ", "dim"), Span(f"{last.decode_tokens}", "decode"), Span("+"),
            Span(f"{last.prefill_tokens}", "prefill"), Span(f" tokens {_milliseconds(last.seconds)}"),
            Span(f"  queue {last.waiting}", "dim"),
        ]  # fmt: skip
    return [
        [Span("KV ", "dim"), *bar(parts, kv.total, max(cells - 12, 4)), Span(f" {_percent(kv.in_use, kv.total)}")],
        [Span("in ", "dim"), Span(quantities.rate(now.prompt), "prefill"), Span("  out ", "dim"),
         Span(quantities.rate(now.output), "decode"), Span(" tok/s", "dim"), Span(f"  hit {now.hit:.0%}", "cached")],
        step,
    ]  # fmt: skip


def _latencies(values: list[float | None]) -> Line:
    middle, high = values
    if middle is None or high is None:
        return [Span("-", "dim")]
    return [Span("p50 ", "dim"), Span(_milliseconds(middle)), Span("  p99 ", "dim"), Span(_milliseconds(high))]


def _milliseconds(seconds: float) -> str:
    return quantities.duration(seconds) if seconds >= 10 else f"{seconds * 1000:,.{0 if seconds >= 0.1 else 1}f} ms"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
