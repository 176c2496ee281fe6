"""What the engine says of itself: figures for front ends, and for dashboards all that they draw.

Both go out a few times a second and are dropped rather than queued. Figures are absolute and numbered, so that a reader
may join late and lose some. What dashboards get is made only while one reads it, and never takes more than `SHARE` of
the engine's time: where a snapshot is costly, the next one comes later.
"""

from __future__ import annotations

import os
import time

import zmq

from corellm.comms import sockets
from corellm.comms.codec import encode
from corellm.comms.messages import Stats, StepPlan, StepResult
from corellm.comms.run_folder import RunFolder
from corellm.comms.stats_messages import SNAPSHOTS, TREES, Snapshot, Tree, WatchMessage, frame
from corellm.engine.scheduler import Scheduler
from corellm.engine.snapshot import block_map, request_rows
from corellm.engine.step_log import LatencyCounts, StepLog
from corellm.engine.steps import Outcome

STATS_VERSION = 1
INTERVAL_S = 0.25
TREE_INTERVAL_S = 1.0
SHARE = 0.005
SUBSCRIPTIONS_A_LOOK = 256
LAST_MS = 200  # for the last snapshot to leave


class StatsPublisher:
    """Publishes `Stats` to front ends, `Snapshot` and `Tree` to dashboards."""

    def __init__(self, folder: RunFolder, model: str) -> None:
        self._socket = sockets.publisher(zmq.Context.instance(), folder.stats)
        self._model = model
        self._started = time.monotonic()
        self.state = "ready"  # or draining
        self._sequence = 0
        self._due = 0.0
        self._watch = WatchPublisher(folder, self._started)

    def on_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        self._watch.on_plan(plan, scheduler)

    def on_result(self, result: StepResult, outcome: Outcome) -> None:
        self._watch.on_result(result, outcome)

    def publish(self, scheduler: Scheduler) -> None:
        """Send what is due."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + INTERVAL_S
            self._sequence += 1
            self._socket.send(encode(self.snapshot(scheduler)), zmq.DONTWAIT)
        if now >= self._watch.due:
            self._watch.publish(scheduler, self.snapshot(scheduler))

    def publish_last(self, scheduler: Scheduler) -> None:
        """The engine ends: its final figures, to whoever watches."""
        self._watch.publish(scheduler, self.snapshot(scheduler))

    def snapshot(self, scheduler: Scheduler) -> Stats:
        counters = scheduler.counters
        return Stats(
            version=STATS_VERSION,
            sequence=self._sequence,
            uptime_s=time.monotonic() - self._started,
            state=self.state,
            model=self._model,
            steps=scheduler.steps,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv=scheduler.kv.stats(),
            prompt_tokens=counters.prompt_tokens,
            output_tokens=counters.output_tokens,
            finished=counters.finished,
            aborted=counters.aborted,
            failed=counters.failed,
            preemptions=counters.preemptions,
            last_prefill_tokens=counters.last_prefill_tokens,
            last_decode_tokens=counters.last_decode_tokens,
            last_step_s=counters.last_step_s,
            busy_s=counters.busy_s,
        )

    def close(self) -> None:
        self._socket.close(linger=0)
        self._watch.close()


class WatchPublisher:
    """The stats protocol's sending end. A topic that nobody subscribes to costs nothing but a look now and then."""

    def __init__(self, folder: RunFolder, began: float) -> None:
        self._socket = sockets.watch_publisher(zmq.Context.instance(), folder.watch)
        self._began = began
        self._first_tokens = LatencyCounts()
        self._log: StepLog | None = None  # while snapshots are read
        self._subscriptions: set[bytes] = set()
        self._interval_s = INTERVAL_S
        self.due = 0.0
        self._tree_due = 0.0
        self._sequence = 0

    def on_plan(self, plan: StepPlan, scheduler: Scheduler) -> None:
        if self._log is not None:
            self._log.on_plan(plan, scheduler)

    def on_result(self, result: StepResult, outcome: Outcome) -> None:
        for sequence in outcome.started:
            if sequence.first_token_at is not None:
                self._first_tokens.add(sequence.first_token_at - sequence.arrived_at)
        if self._log is not None:
            self._log.on_result(result)

    def publish(self, scheduler: Scheduler, stats: Stats) -> None:
        """Look who reads what, and send what is due to them."""
        began = time.thread_time()  # not by the clock on the wall: to be kept waiting costs nothing
        self._look(scheduler)
        if self._log is not None:
            self._send(SNAPSHOTS, self._snapshot(self._log, scheduler, stats))
        now = time.monotonic()
        if self._is_read(TREES) and now >= self._tree_due:
            self._tree_due = now + TREE_INTERVAL_S
            tree = scheduler.kv.tree()
            self._send(
                TREES,
                Tree(
                    uptime_s=stats.uptime_s,
                    page_size=scheduler.kv.page_size,
                    segments=tree.segments,
                    pages=tree.pages,
                    complete=tree.complete,
                ),
            )
        self._interval_s = max(INTERVAL_S, (time.thread_time() - began) / SHARE)
        self.due = now + self._interval_s

    def close(self) -> None:
        self._socket.close(linger=LAST_MS)

    def _look(self, scheduler: Scheduler) -> None:
        """Read subscriptions. Only the first reader of a topic and the last one's leaving come up."""
        for _ in range(SUBSCRIPTIONS_A_LOOK):
            try:
                said = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                break
            if said[:1] == b"\x01":
                self._subscriptions.add(said[1:])
            else:
                self._subscriptions.discard(said[1:])
        if not self._is_read(SNAPSHOTS):
            self._log = None
        elif self._log is None:
            self._log = StepLog(self._began, scheduler.limits.max_seqs)

    def _is_read(self, topic: bytes) -> bool:
        """A subscription is a prefix, as always in ZeroMQ: the empty one reads every topic."""
        return any(topic.startswith(prefix) for prefix in self._subscriptions)

    def _snapshot(self, log: StepLog, scheduler: Scheduler, stats: Stats) -> Snapshot:
        requests, left_out = request_rows(scheduler, self._began)
        self._sequence += 1
        return Snapshot(
            sequence=self._sequence,
            pid=os.getpid(),
            interval_s=self._interval_s,
            stats=stats,
            steps=log.take(),
            blocks=block_map(scheduler.kv.states),
            requests=requests,
            requests_left_out=left_out,
            ttft=self._first_tokens.histogram(),
            itl=log.between_tokens.histogram(),
        )

    def _send(self, topic: bytes, message: WatchMessage) -> None:
        self._socket.send(frame(topic, message), zmq.DONTWAIT)
