"""Messages as an engine might publish them, made up: for tests and benchmarks of the dashboard."""

from __future__ import annotations

import msgspec

from corellm.comms.messages import EngineInfo, KVStats, Stats
from corellm.comms.stats_messages import (
    BUCKETS,
    BlockMap,
    Histogram,
    RequestRow,
    Snapshot,
    StepRecord,
    bucket,
)

INFO = EngineInfo(
    name="demo", model="demo", model_path="/nowhere", dtype="float32", device="CPU", tp=1, kv_cache="radix",
    page_size=16, kv_blocks=100, max_model_len=2048, max_batch_tokens=64, max_seqs=8, vocab=1000, seed=0,
    load_format="auto", max_request_tokens=1601, startup_s=1.0,
)  # fmt: skip
STATES = ("decode", "prefill", "preempted", "waiting")
WAITS = {"decode": "", "prefill": "", "preempted": "fence", "waiting": "turn"}


def histogram(**counts_by_ms: int) -> Histogram:
    """`histogram(ms5=3)`: three latencies of 5 ms."""
    counts = [0] * BUCKETS
    for name, count in counts_by_ms.items():
        counts[bucket(int(name.removeprefix("ms")) / 1000)] += count
    return Histogram(counts)


def request(number: int, **changes: object) -> RequestRow:
    state = STATES[number % 4]
    row = RequestRow(number, state, WAITS[state], 40, 10, 64, 16, 50, 4, 1, 0, 1.0, 1.5)  # type: ignore[arg-type]
    return msgspec.structs.replace(row, **changes)


def snapshot(sequence: int, **changes: object) -> Snapshot:
    """At a quarter of a second for each sequence number; a hundred tokens came in each, a step in each."""
    uptime = sequence / 4
    stats = Stats(
        version=1, sequence=sequence, uptime_s=uptime, state="ready", model="demo", steps=sequence, running=3,
        waiting=1,
        kv=KVStats(
            total=100, free=20, in_use=50, cached=30, shared=10, evictions=2, hit_tokens=25 * sequence,
            query_tokens=100 * sequence,
        ),
        prompt_tokens=50 * sequence, output_tokens=100 * sequence, finished=0, aborted=0, failed=0, preemptions=1,
        last_prefill_tokens=4, last_decode_tokens=3, last_step_s=0.05,
    )  # fmt: skip
    made = Snapshot(
        sequence=sequence,
        pid=7,
        interval_s=0.25,
        stats=stats,
        steps=[StepRecord(sequence, uptime, 0.05, 4, 3, 4, 1, 50, 30, 1, 2)],
        blocks=BlockMap(1, [0, 20, 1, 40, 2, 10, 3, 30]),
        requests=[request(number) for number in range(1, 5)],
        requests_left_out=0,
        ttft=histogram(ms500=sequence),
        itl=histogram(ms50=sequence * 10),
    )
    return msgspec.structs.replace(made, **changes)
