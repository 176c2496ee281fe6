"""The engine loop: the control plane's one thread.

    receive      drain front ends, workers' reports and heartbeats
    collect      the result of the oldest step in flight, and what may follow the tokens of constrained sequences
    schedule     the next plan, dispatched to every rank while the step before it still runs
    emit         tokens and terminal events to front ends, stats to whoever listens

At most two steps are in flight: one that runs and one that waits behind it, so that a worker never waits for Python.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import time

import zmq

from corellm.comms.children import is_readable
from corellm.comms.messages import (
    Abort,
    ClientMessage,
    EngineInfo,
    Finish,
    Goodbye,
    Hello,
    QueryStats,
    Ready,
    Request,
    StepEvents,
    StepResult,
    Submit,
)
from corellm.engine.constraints import Constraints, Verdict
from corellm.engine.emit import finish_message, only_finished, refusal, step_events
from corellm.engine.front_ends import FrontEnds
from corellm.engine.scheduler import Scheduler
from corellm.engine.sequence import End, Sequence
from corellm.engine.stats import StatsPublisher
from corellm.engine.steps import Outcome
from corellm.engine.workers import Workers
from corellm.errors import CoreLLMError, EngineDeadError, InvalidRequestError, ProtocolError

STEPS_IN_FLIGHT = 2
TICK_MS = 250  # the longest that the loop sleeps
DRAIN_S = 30.0  # from the first SIGTERM to the end, whatever is still open
SETTLE_S = 0.5  # for the steps in flight at the end, when nobody waits for them


class Engine:
    """A ready engine: front ends on one side, workers on the other, the scheduler between them."""

    def __init__(
        self,
        info: EngineInfo,
        front_ends: FrontEnds,
        workers: Workers,
        scheduler: Scheduler,
        stats: StatsPublisher,
        constraints: Constraints,
        death_pipe: int,
    ) -> None:
        self._info = info
        self._front_ends = front_ends
        self._workers = workers
        self._scheduler = scheduler
        self._stats = stats
        self._constraints = constraints
        self._death_pipe = death_pipe
        self._open: dict[tuple[bytes, int], Sequence] = {}  # by connection and the front end's own number
        self._ids = itertools.count(1)
        self._signals = 0
        self._drain_until: float | None = None

    def serve(self) -> None:
        """Run until told to stop. Raises `EngineDeadError` or `ProtocolError` when a worker dies, hangs or errs."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        poller = zmq.Poller()
        self._front_ends.watch(poller)
        self._workers.watch(poller)
        self._constraints.watch(poller)
        poller.register(self._death_pipe, zmq.POLLIN)
        gc.freeze()  # what start-up made stays; looking it over again would hold up the loop
        while not self._should_stop():
            poller.poll(TICK_MS)
            self.turn()
        self.settle()
        self._stats.publish_last(self._scheduler)

    def settle(self) -> None:
        """Where every request has ended, take in the steps in flight: rows that were planned before they ended hold
        their blocks until then, and the last figures are to be whole."""
        deadline = time.monotonic() + SETTLE_S
        with contextlib.suppress(CoreLLMError):  # a worker that fails now costs nobody anything
            while not self._open and self._scheduler.in_flight and time.monotonic() < deadline:
                for result in self._workers.receive():
                    self._collect(result)
                time.sleep(0.001)

    def turn(self) -> None:
        """One round of the loop: whatever has come in, and the plans and messages that follow from it."""
        for client, message in self._front_ends.receive():
            self._on_message(client, message)
        for verdict in self._constraints.collect():  # of tokens that earlier turns have sent out
            self._on_verdict(verdict)
        outcomes = [self._collect(result) for result in self._workers.receive()]
        for outcome in outcomes:
            for sequence, token in outcome.constrained:
                self._constraints.advance(sequence, token)
        while self._scheduler.in_flight < STEPS_IN_FLIGHT and (plan := self._scheduler.schedule()) is not None:
            self._workers.send(plan)
            self._stats.on_plan(plan, self._scheduler)
        for outcome in outcomes:
            for sequence in outcome.ended:
                self._open.pop((sequence.client, sequence.tag), None)
            for client, events in step_events(outcome):
                self._send(client, events)
        self._workers.check()
        for client in self._front_ends.silent():
            self._drop(client)
        self._stats.publish(self._scheduler)

    def _collect(self, result: StepResult) -> Outcome:
        outcome = self._scheduler.collect(result)
        self._stats.on_result(result, outcome)
        return outcome

    # ---- front ends -----------------------------------------------------------------------------------------------

    def _on_message(self, client: bytes, message: ClientMessage) -> None:
        match message:
            case Hello():
                self._front_ends.send(client, Ready(info=self._info))
            case Submit():
                refused = [no for request in message.requests if (no := self._add(client, request)) is not None]
                if refused:
                    self._send(client, only_finished(refused))
            case Abort():
                end = End("stop" if message.satisfied else "abort")
                for tag in message.tags.tolist():
                    self._end(client, tag, end)
            case QueryStats():
                self._front_ends.send(client, self._stats.snapshot(self._scheduler))
            case Goodbye():
                self._drop(client)
            case _:
                pass  # a ping has done its work by arriving

    def _add(self, client: bytes, request: Request) -> Finish | None:
        """Queue a request, or the terminal event that refuses it."""
        key = (client, request.tag)
        try:
            if key in self._open:
                raise ProtocolError(f"request number {request.tag} is open already on this connection")
            if self._drain_until is not None:
                raise EngineDeadError("the engine is stopping and takes no new requests")
            sequence = Sequence(next(self._ids), client, request, time.monotonic())
            self._scheduler.add(sequence)
        except CoreLLMError as error:
            return refusal(request, error)
        self._open[key] = sequence
        if sequence.constraint is not None:
            self._constraints.open(sequence)
        return None

    def _on_verdict(self, verdict: Verdict) -> None:
        sequence, error = verdict.sequence, verdict.error
        if sequence.end is not None:
            return
        if verdict.mask is not None:
            self._scheduler.allow(sequence, verdict.mask)
        elif error is None:
            self._finish(sequence, End("stop"))
        else:
            param = error.param if isinstance(error, InvalidRequestError) else None
            self._finish(sequence, End("error", code=error.code, message=error.message, param=param or ""))

    def _end(self, client: bytes, tag: int, end: End) -> None:
        if (sequence := self._open.get((client, tag))) is not None:
            self._finish(sequence, end)

    def _finish(self, sequence: Sequence, end: End) -> None:
        del self._open[(sequence.client, sequence.tag)]
        if self._scheduler.release(sequence, end):
            self._send(sequence.client, only_finished([finish_message(sequence)]))

    def _send(self, client: bytes, events: StepEvents) -> None:
        if not self._front_ends.send(client, events):
            self._drop(client)

    def _drop(self, client: bytes) -> None:
        """A front end has gone: what it asked for is aborted and its blocks come back."""
        for key in [key for key in self._open if key[0] == client]:
            self._scheduler.release(self._open.pop(key), End("abort"))

    # ---- stopping -------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    def _should_stop(self) -> bool:
        """The first signal drains, the second stops, a dead parent stops at once."""
        if is_readable(self._death_pipe):
            return True
        if self._signals and self._drain_until is None:
            self._drain_until = time.monotonic() + DRAIN_S
            self._stats.state = "draining"
        if self._drain_until is None:
            return False
        return self._signals > 1 or not self._open or time.monotonic() > self._drain_until
