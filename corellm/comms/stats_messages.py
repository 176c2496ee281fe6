"""The stats protocol: what an engine publishes for whoever watches it. `docs/stats.md` describes it for readers.

    engine --Snapshot, Tree--> anyone       (XPUB / SUB, the run folder's `watch` address)

A frame is a topic (one byte), the protocol's version (one byte) and a msgpack message. A subscription to a topic is the
request for it: the engine makes nothing that nobody reads. Figures are absolute, so lost messages do no harm.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from corellm.comms.codec import Decoder, encode
from corellm.comms.messages import Stats
from corellm.errors import ProtocolError

WATCH_VERSION = 1

SNAPSHOTS = b"s"  # topics
TREES = b"t"

STEPS_MAX = 2048  # records in one snapshot; of more steps the oldest are left out
REQUESTS_MAX = 2000  # rows in one snapshot; the running go first, then the waiting in their order
MAP_MAX = 65_536  # units of the block map; of larger pools several blocks share one
SEGMENTS_MAX = 512  # of a tree

_PER_OCTAVE = 8
_SMALLEST_S = 1e-4
BUCKETS = 24 * _PER_OCTAVE  # of a latency histogram: up to 1,500 s

# States of a unit of the block map.
FREE, IN_USE, SHARED, CACHED = range(4)

RequestState = Literal["waiting", "prefill", "decode", "preempted"]
# What a waiting request lacks; "turn": the one at the head of the queue lacks something, and it never yields.
Wait = Literal["", "slots", "blocks", "tokens", "mask", "fence", "turn"]


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of `Snapshot`: one step, from its plan and its result. On the wire an array in this order."""

    step: int
    at_s: float  # the engine's uptime when the result was in
    seconds: float  # forward and sampling, as the worker measured them
    prefill_tokens: int
    decode_tokens: int
    rows: int  # sequences in the step
    waiting: int  # requests in the queue after it was planned
    in_use: int  # blocks
    cached: int
    preemptions: int  # since the engine's start, as are evictions
    evictions: int


class RequestRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of `Snapshot`: one open request. On the wire an array in this order."""

    id: int  # the engine's own number
    state: RequestState
    wait: Wait
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int  # of the prompt, when it was first admitted
    computed_tokens: int  # whose KV is planned or there
    blocks: int
    priority: int  # 0 interactive, 1 batch
    preemptions: int
    arrived_s: float  # engine's uptime
    first_token_s: float | None


class Histogram(msgspec.Struct, frozen=True):
    """Part of `Snapshot`: how often each latency occurred; bucket i counts `bucket_bound(i - 1)` up to (not including)
    `bucket_bound(i)` seconds, the first all below, the last all above."""

    counts: Annotated[list[int], msgspec.Meta(min_length=BUCKETS, max_length=BUCKETS)]


class BlockMap(msgspec.Struct, frozen=True):
    """Part of `Snapshot`: the state of every unit of the pool by run-length, `scale` blocks a unit (the last may have
    fewer). `runs` alternates state and length."""

    scale: int
    runs: list[int]

    def __post_init__(self) -> None:
        if len(self.runs) % 2:
            raise ValueError(f"runs has {len(self.runs)} numbers; a state and a length for each run are an even number")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to watchers, a few a second: everything but the tree. `steps` are those since the snapshot before."""

    sequence: int  # of the snapshots that were made; a gap is of lost ones
    pid: int
    interval_s: float  # to the next one; longer when snapshots are costly
    stats: Stats
    steps: list[StepRecord]
    blocks: BlockMap
    requests: list[RequestRow]
    requests_left_out: int
    ttft: Histogram  # since the start
    itl: Histogram  # between tokens of one request, while someone watches


class TreeSegment(msgspec.Struct, frozen=True, array_like=True):
    """Part of `Tree`: pages in a row with the same holders. On the wire an array in this order.

    `ends` are the open requests whose shared pages end here, so those that hold a segment are the `ends` of it and of
    all below. `common` leading tokens of its first page are those of its nearest sibling, after which `token` differs:
    a near miss where `common` is not 0. `token` is -1 without a sibling, and where they differ by their salt alone.
    """

    id: int
    parent: int  # 0: the root, which is no segment
    pages: int
    holders: int
    ends: list[int]
    common: int
    token: int


class Tree(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Engine to watchers, about one a second: the radix tree from its root down, level by level.

    The ids of segments count from 1, so that parents come before their children.
    """

    uptime_s: float
    page_size: int
    segments: list[TreeSegment]
    pages: int  # in all segments
    complete: bool  # False: the tree goes on below, or beside

    def __post_init__(self) -> None:
        for number, segment in enumerate(self.segments, 1):
            if segment.id != number or not 0 <= segment.parent < number:
                raise ValueError(f"segment {number} has id {segment.id} and parent {segment.parent}; it is no tree")


WatchMessage = Snapshot | Tree


def bucket(seconds: float) -> int:
    """The bucket that a latency falls into."""
    if seconds < _SMALLEST_S:
        return 0
    return min(BUCKETS - 1, 1 + int(math.log2(seconds / _SMALLEST_S) * _PER_OCTAVE))


def bucket_bound(index: int) -> float:
    """The upper bound of a bucket in seconds; each is 9 % above the one before."""
    return float(_SMALLEST_S * 2 ** (index / _PER_OCTAVE))


def frame(topic: bytes, message: WatchMessage) -> bytes:
    """A message as it is published."""
    return topic + bytes([WATCH_VERSION]) + encode(message)


_messages: Decoder[WatchMessage] = Decoder(WatchMessage)


def open_frame(raw: bytes) -> WatchMessage:
    """The message in a frame. Raises `ProtocolError` when it is damaged or of another version."""
    if len(raw) < 2:
        raise ProtocolError(f"a stats frame has {len(raw)} bytes; a topic and a version alone are 2")
    if raw[1] != WATCH_VERSION:
        raise ProtocolError(
            f"the engine speaks stats protocol {raw[1]}, this program {WATCH_VERSION}; "
            "use the same CoreLLM version for both"
        )
    return _messages.decode(raw[2:])
