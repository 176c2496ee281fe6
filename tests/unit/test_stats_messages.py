"""The stats protocol's messages: what goes in comes out, in msgpack and in JSON, and what is damaged is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corellm.comms.messages import KVStats, Stats
from corellm.comms.stats_messages import (
    BUCKETS,
    SNAPSHOTS,
    WATCH_VERSION,
    BlockMap,
    Histogram,
    RequestRow,
    Snapshot,
    StepRecord,
    Tree,
    TreeSegment,
    bucket,
    bucket_bound,
    frame,
    open_frame,
)
from corellm.errors import ProtocolError

KV = KVStats(total=8, free=1, in_use=4, cached=3, shared=2, evictions=5, hit_tokens=6, query_tokens=7)
SNAPSHOT = Snapshot(
    sequence=3,
    pid=42,
    interval_s=0.25,
    stats=Stats(
        version=1, sequence=3, uptime_s=1.5, state="ready", model="demo", steps=9, running=2, waiting=1, kv=KV,
        prompt_tokens=10, output_tokens=11, finished=1, aborted=0, failed=0, preemptions=2,
        last_prefill_tokens=3, last_decode_tokens=4, last_step_s=0.1,
    ),
    steps=[StepRecord(9, 1.4, 0.1, 3, 4, 5, 1, 4, 3, 2, 5)],
    blocks=BlockMap(1, [0, 1, 1, 2, 2, 2, 3, 3]),
    requests=[RequestRow(1, "decode", "", 5, 2, 9, 4, 7, 2, 1, 0, 0.5, 0.75)],
    requests_left_out=0,
    ttft=Histogram([0] * BUCKETS),
    itl=Histogram([1] * BUCKETS),
)  # fmt: skip
TREE = Tree(uptime_s=1.5, page_size=4, segments=[TreeSegment(1, 0, 2, 3, [7, 8], 1, 99)], pages=2, complete=True)


@pytest.mark.parametrize("message", [SNAPSHOT, TREE])
def test_messages_come_back_as_they_went(message: Snapshot | Tree) -> None:
    assert open_frame(frame(SNAPSHOTS, message)) == message
    assert msgspec.json.decode(msgspec.json.encode(message), type=Snapshot | Tree) == message


def test_a_frame_of_another_version_names_both() -> None:
    raw = bytearray(frame(SNAPSHOTS, SNAPSHOT))
    raw[1] = 9
    with pytest.raises(ProtocolError, match=f"protocol 9, this program {WATCH_VERSION}; use the same CoreLLM"):
        open_frame(bytes(raw))


@given(st.binary(max_size=60))
def test_damage_is_a_protocol_error(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        open_frame(b"s" + bytes([WATCH_VERSION]) + noise)
    with pytest.raises(ProtocolError):
        open_frame(noise[:1])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (msgspec.to_builtins(SNAPSHOT) | {"blocks": {"scale": 1, "runs": [0, 1, 2]}}, "runs has 3 numbers"),
        (msgspec.to_builtins(TREE) | {"segments": [[1, 1, 1, 1, [], 0, -1]]}, "segment 1 has id 1 and parent 1"),
        (msgspec.to_builtins(TREE) | {"segments": [[0, 0, 1, 1, [], 0, -1]]}, "it is no tree"),
    ],
)
def test_what_could_not_be_drawn_is_refused(broken: dict[str, Any], said: str) -> None:
    frame_of_it = bytes([0, WATCH_VERSION]) + msgspec.msgpack.encode(broken)
    with pytest.raises(ProtocolError, match=said):
        open_frame(frame_of_it)


def test_a_histogram_of_another_size_is_refused() -> None:
    raw = msgspec.json.encode(SNAPSHOT).replace(b'"ttft":{"counts":[0,', b'"ttft":{"counts":[')
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=Snapshot)


@given(st.floats(min_value=0, max_value=1e5, allow_nan=False))
def test_a_latency_lies_within_its_bucket(seconds: float) -> None:
    index = bucket(seconds)
    assert 0 <= index < BUCKETS
    if index > 0:
        assert seconds >= bucket_bound(index - 1) * (1 - 1e-9)
    if index < BUCKETS - 1:
        assert seconds < bucket_bound(index) * (1 + 1e-9)


def test_bounds_are_nine_percent_apart_up_to_half_an_hour() -> None:
    assert bucket_bound(8) / bucket_bound(0) == pytest.approx(2)
    assert bucket_bound(BUCKETS - 1) > 1500
