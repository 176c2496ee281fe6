"""What a dashboard knows: the last messages and as much of the past as it draws. Plain data, painted by others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from corellm.comms.messages import EngineInfo, Stats
from corellm.comms.stats_messages import BUCKETS, Snapshot, StepRecord, Tree, bucket_bound

from .top_hardware import Hardware
from .top_recording import Event

STEPS_KEPT = 4096
POINTS_KEPT = 1024  # of the history of use: four minutes at four a second
RATE_WINDOW_S = 5.0
LATENCY_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Link:
    """How the dashboard stands to its engine. `message` says what happened, in one line."""

    is_live: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Rates:
    """Over the last seconds. `hit` is the part of prompt tokens that the cache had, from 0 to 1; of all prompts there
    were, when those seconds saw none."""

    prompt: float  # tokens a second
    output: float
    steps: float
    hit: float


@dataclass(frozen=True, slots=True)
class _Counts:
    """A snapshot's histograms, for the latencies between two moments."""

    at_s: float
    ttft: list[int]
    itl: list[int]


class TopState:
    """Takes events in; `version` grows with each, so that a painter sees whether there is anything to paint."""

    def __init__(self, info: EngineInfo | None = None) -> None:
        self.info = info
        self.link = Link(is_live=False, message="waiting for the engine")
        self.version = 0
        self.clear()

    def clear(self) -> None:
        """Forget all of the engine but who it is."""
        self.snapshot: Snapshot | None = None
        self.tree: Tree | None = None
        self.hardware: Hardware | None = None
        self.lost = 0  # snapshots that were published and did not come
        self.steps: deque[StepRecord] = deque(maxlen=STEPS_KEPT)
        self.points: deque[Stats] = deque(maxlen=POINTS_KEPT)
        self._counts: deque[_Counts] = deque()
        self.version += 1

    def set_link(self, link: Link) -> None:
        if link != self.link:
            self.link = link
            self.version += 1

    def set_info(self, info: EngineInfo) -> None:
        self.info = info
        self.version += 1

    def add(self, event: Event) -> None:
        """Take one message in. A snapshot of another engine, or of an earlier time, begins the past anew."""
        if isinstance(event, Snapshot):
            self._add_snapshot(event)
        elif isinstance(event, Tree):
            self.tree = event
        else:
            self.hardware = event
        self.version += 1

    def rates(self) -> Rates:
        """Tokens and steps a second, from absolute counters: lost snapshots change nothing."""
        if not self.points:
            return Rates(0.0, 0.0, 0.0, 0.0)
        last = self.points[-1]
        first = self._point_at(last.uptime_s - RATE_WINDOW_S)
        seconds = max(last.uptime_s - first.uptime_s, 1e-6)
        asked = last.kv.query_tokens - first.kv.query_tokens
        hit = last.kv.hit_tokens - first.kv.hit_tokens
        if not asked:
            asked, hit = last.kv.query_tokens, last.kv.hit_tokens
        return Rates(
            (last.prompt_tokens - first.prompt_tokens) / seconds,
            (last.output_tokens - first.output_tokens) / seconds,
            (last.steps - first.steps) / seconds,
            hit / asked if asked else 0.0,
        )

    def time_to_first_token(self, *shares: float) -> list[float | None]:
        """Percentiles over the last minute, in seconds; over all there is when that minute saw none."""
        return self._percentiles(lambda counts: counts.ttft, shares)

    def between_tokens(self, *shares: float) -> list[float | None]:
        return self._percentiles(lambda counts: counts.itl, shares)

    def _add_snapshot(self, snapshot: Snapshot) -> None:
        before = self.snapshot
        if before is not None:
            if snapshot.pid != before.pid or snapshot.sequence <= before.sequence:
                self.clear()
            else:
                self.lost += snapshot.sequence - before.sequence - 1
        self.snapshot = snapshot
        self.steps.extend(snapshot.steps)
        self.points.append(snapshot.stats)
        at_s = snapshot.stats.uptime_s
        self._counts.append(_Counts(at_s, snapshot.ttft.counts, snapshot.itl.counts))
        while len(self._counts) > 2 and self._counts[1].at_s <= at_s - LATENCY_WINDOW_S:
            self._counts.popleft()

    def _point_at(self, uptime_s: float) -> Stats:
        """The last point that is at least as old as `uptime_s`, or the first there is."""
        found = self.points[0]
        for point in reversed(self.points):
            found = point
            if point.uptime_s <= uptime_s:
                break
        return found

    def _percentiles(self, counts_of: Callable[[_Counts], list[int]], shares: Sequence[float]) -> list[float | None]:
        if not self._counts:
            return [None for _ in shares]
        new = counts_of(self._counts[-1])
        old = counts_of(self._counts[0])
        recent = [b - a for a, b in zip(old, new, strict=True)]
        counts = recent if any(recent) else new
        return [percentile(counts, share) for share in shares]


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The latency in seconds that `share` of those counted do not exceed, to the width of a bucket; None of none."""
    rank = share * sum(counts)
    if rank <= 0:
        return None
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            low, high = (bucket_bound(index - 1) if index else 0.0), bucket_bound(min(index, BUCKETS - 1))
            return low + (high - low) * (rank - seen) / count
        seen += count
    return bucket_bound(BUCKETS - 1)
