"""What the engine is doing and why, in sentences made from the figures on the screen."""

from __future__ import annotations

from collections import Counter

from corellm.comms.messages import EngineInfo
from corellm.comms.stats_messages import RequestRow, Snapshot

from . import quantities
from .top_state import TopState
from .top_table import WAITS


def explain(state: TopState) -> list[tuple[str, str]]:
    """Paragraphs: (heading, text)."""
    snapshot = state.snapshot
    if snapshot is None:
        return [("Nothing yet", state.link.message or "no snapshot has come from the engine")]
    return [
        ("The last step", _step(state, state.info)),
        ("The queue", _queue(snapshot)),
        ("The KV cache", _cache(snapshot, state.info)),
        ("Speed", _speed(state)),
    ]


def _step(state: TopState, info: EngineInfo | None) -> str:
    if not state.steps:
        return "No step was computed since this dashboard joined: the engine is idle."
    last = state.steps[-1]
    decoded = quantities.counted(last.decode_tokens, "sequence")
    prefilled = quantities.counted(last.prefill_tokens, "prompt token")
    told = (
        f"Step {last.step:,} decoded one token for each of {decoded} and prefilled {prefilled}, "
        f"in {last.seconds * 1000:,.1f} ms."
    )
    if info is None:
        return told
    used = last.decode_tokens + last.prefill_tokens
    told += f" That is {used:,} of the {info.max_batch_tokens:,} tokens that a step may have (--max-batch-tokens)."
    if used == info.max_batch_tokens:
        told += " The budget was spent: longer prompts go on in the next step, decodes always come first."
    return told


def _queue(snapshot: Snapshot) -> str:
    waiting = [row for row in snapshot.requests if row.state in ("waiting", "preempted")]
    if not waiting:
        if not snapshot.stats.running:
            return "The engine is idle: nothing runs and nothing waits."
        return "Nobody waits: every request that came is being computed."
    head = next((row for row in waiting if row.wait in ("slots", "blocks", "tokens")), None)
    preempted = sum(row.state == "preempted" for row in waiting)
    told = f"The queue has {quantities.counted(snapshot.stats.waiting + preempted, 'request')}."
    if head is not None:
        told += f" Request {head.id} is at the head and lacks {WAITS[head.wait]}{_remedy(head, snapshot)}."
    others = Counter(row.wait for row in waiting if row is not head)
    if others["turn"]:
        told += f" It has {others['turn']:,} behind it: the head never yields to a smaller one, or it could starve."
    for wait in ("mask", "fence"):
        if others[wait]:
            told += f" Waiting for {WAITS[wait]}: {others[wait]:,}."
    return told


def _remedy(head: RequestRow, snapshot: Snapshot) -> str:
    kv = snapshot.stats.kv
    if head.wait == "blocks":
        return (
            f": {kv.free:,} blocks are free and {kv.cached:,} could be evicted, too few for its "
            f"{head.prompt_tokens + head.output_tokens:,} tokens and for the running ones to grow; "
            "a larger --kv-blocks or --gpu-memory admits more"
        )
    if head.wait == "slots":
        return f": all {snapshot.stats.running:,} sequences that may run at once do; a larger --max-seqs admits more"
    return ": it comes in as soon as prefills before it leave room"


def _cache(snapshot: Snapshot, info: EngineInfo | None) -> str:
    stats, kv = snapshot.stats, snapshot.stats.kv
    told = (
        f"Of {kv.total:,} blocks {kv.in_use:,} hold running sequences, {kv.shared:,} of them for several at once; "
        f"{kv.cached:,} are kept in case their tokens come again; {kv.free:,} are free."
    )
    if kv.query_tokens:
        part = kv.hit_tokens / kv.query_tokens
        told += f" So far {part:.0%} of all prompt tokens were found in the cache and not computed."
    if kv.evictions:
        told += f" Evicted so far: {quantities.counted(kv.evictions, 'cached block')}, the least recently used first."
    if stats.preemptions:
        told += (
            f" {quantities.counted(stats.preemptions, 'preemption')} because a decode found no block: the youngest "
            "sequence gives way, and computes again later what was evicted meanwhile. The oldest is never preempted."
        )
    if info is not None and info.kv_cache == "naive":
        told += " This engine runs --kv-cache naive, which shares and keeps nothing."
    return told


def _speed(state: TopState) -> str:
    now = state.rates()
    told = (
        f"{quantities.rate(now.output)} output and {quantities.rate(now.prompt)} prompt tokens a second, "
        f"in {quantities.rate(now.steps)} steps a second."
    )
    middle, high = state.between_tokens(0.5, 0.99)
    if middle is not None and high is not None:
        told += (
            f" Half of all tokens came within {middle * 1000:,.0f} ms of the one before, "
            f"99% within {high * 1000:,.0f} ms."
        )
    if state.lost:
        told += (
            f" This dashboard missed {state.lost:,} snapshots; the figures are absolute, so nothing is wrong with them."
        )
    return told
