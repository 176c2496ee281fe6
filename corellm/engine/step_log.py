"""What each step was made of and how long it took, from its plan and its result, while someone watches."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from corellm.comms.messages import I32, StepPlan, StepResult
from corellm.comms.stats_messages import BUCKETS, STEPS_MAX, Histogram, StepRecord, bucket
from corellm.engine.scheduler import Scheduler


class LatencyCounts:
    """A histogram in the making."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[bucket(seconds)] += times

    def histogram(self) -> Histogram:
        return Histogram(self._counts.copy())


@dataclass(frozen=True, slots=True)
class _Planned:
    """A record that waits for the result of its step. `sampling` are the slots of the rows that sample."""

    record: StepRecord
    sampling: I32
    is_as_before: bool  # the same sequences sample as in the step before


class StepLog:
    """Records of the last steps, and the latencies between the tokens of each sequence.

    Times are seconds of the engine's uptime. A pause that a preemption makes is no latency between tokens: the sequence
    comes back in another slot. The count of preemptions tells of those.
    """

    def __init__(self, began: float, max_seqs: int) -> None:
        self.between_tokens = LatencyCounts()
        self._began = began
        self._planned: deque[_Planned] = deque()
        self._records: deque[StepRecord] = deque(maxlen=STEPS_MAX)
        self._rows = b""  # of the last plan, if all of them sampled
        # When the last token of each slot came; those of the last step are brought up to date when its rows change.
        self._token_at = np.full(max_seqs, np.nan)
        self._last: I32 | None = None
        self._last_at = np.nan

    def on_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        counters, kv = scheduler.counters, scheduler.kv.stats()
        record = StepRecord(
            step=plan.step,
            at_s=0.0,
            seconds=0.0,
            prefill_tokens=counters.last_prefill_tokens,
            decode_tokens=counters.last_decode_tokens,
            rows=len(plan.row_slots),
            waiting=len(scheduler.waiting),
            in_use=kv.in_use,
            cached=kv.cached,
            preemptions=counters.preemptions,
            evictions=kv.evictions,
        )
        if record.prefill_tokens:
            self._rows, sampling, is_as_before = b"", plan.row_slots[plan.row_samples != 0], False
        else:
            rows, sampling = plan.row_slots.tobytes(), plan.row_slots
            self._rows, is_as_before = rows, rows == self._rows
        self._planned.append(_Planned(record, sampling, is_as_before))
        for opened in plan.opens:
            self._forget(opened.slot)

    def on_result(self, result: StepResult) -> None:
        """Complete the record of a step. One that was planned before anyone watched is passed over."""
        if not self._planned or self._planned[0].record.step != result.step:
            return
        planned = self._planned.popleft()
        now = time.monotonic() - self._began
        self._records.append(msgspec.structs.replace(planned.record, at_s=now, seconds=result.seconds))
        if planned.is_as_before and self._last is not None:
            self.between_tokens.add(now - self._last_at, len(planned.sampling))
        else:
            self._measure(planned.sampling, now)
        self._last, self._last_at = planned.sampling, now

    def take(self) -> list[StepRecord]:
        """The records since the last call."""
        taken = list(self._records)
        self._records.clear()
        return taken

    def _forget(self, slot: int) -> None:
        """Another sequence has it now: its first token has none before it."""
        self._update()
        self._token_at[slot] = np.nan

    def _update(self) -> None:
        if self._last is not None:
            self._token_at[self._last] = self._last_at
            self._last = None

    def _measure(self, slots: I32, now: float) -> None:
        """Latencies of a step whose rows are not those of the step before."""
        self._update()
        gaps = now - self._token_at[slots]
        found, counts = np.unique(gaps[~np.isnan(gaps)], return_counts=True)  # nearly all are one
        for gap, times in zip(found.tolist(), counts.tolist(), strict=True):
            self.between_tokens.add(gap, times)
