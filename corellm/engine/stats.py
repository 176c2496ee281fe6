"""What the engine says of itself: snapshots on a PUB socket, a few a second, dropped rather than queued."""

from __future__ import annotations

import time

import zmq

from corellm.comms import sockets
from corellm.comms.codec import encode
from corellm.comms.messages import Stats
from corellm.comms.run_folder import RunFolder
from corellm.engine.scheduler import Scheduler

STATS_VERSION = 1
INTERVAL_S = 0.25


class StatsPublisher:
    """Publishes absolute values with a sequence number, so that a reader may join late and lose some."""

    def __init__(self, folder: RunFolder, model: str) -> None:
        self._socket = sockets.publisher(zmq.Context.instance(), folder.stats)
        self._model = model
        self._started = time.monotonic()
        self.state = "ready"  # or draining
        self._sequence = 0
        self._due = 0.0

    def publish(self, scheduler: Scheduler) -> None:
        """Send a snapshot if one is due."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + INTERVAL_S
        self._sequence += 1
        self._socket.send(encode(self.snapshot(scheduler)), zmq.DONTWAIT)

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
        )

    def close(self) -> None:
        self._socket.close(linger=0)
