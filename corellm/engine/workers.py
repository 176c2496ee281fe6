"""The engine's side of its workers: launch, start-up, plans out, results in, and who has died or hung."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import zmq

from corellm.comms import sockets
from corellm.comms.children import Child, spawn, stop_all
from corellm.comms.codec import Decoder, encode
from corellm.comms.messages import (
    AllocateKV,
    Heartbeat,
    Progress,
    Shutdown,
    StepResult,
    WeightsLoaded,
    WorkerCommand,
    WorkerFailed,
    WorkerReady,
    WorkerReport,
)
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Settings
from corellm.comms.silence import Silence
from corellm.errors import EngineDeadError, ProtocolError, StartupError, from_code

SILENCE_S = 8.0  # without a heartbeat, once ready: the process is stopped or starved
STARTING_SILENCE_S = 120.0  # importing and compiling may hold the interpreter for long
STEP_S = 300.0  # one step: hung, whatever the heartbeat says
BLAME_S = 0.3  # for the death of another rank to show, after one has failed
LEAVE_S = 1.0  # to end in order, when asked to
STOP_S = 2.0  # and when hung up on
REPORTS_A_TURN = 64  # of one worker: a flood of progress must not hold the loop


class Workers:
    """One worker process a rank. Every method returns at once, but for `stop`."""

    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.tp = settings.tp
        self._reports: Decoder[WorkerReport] = Decoder(WorkerReport)
        self._sockets = [sockets.pair(context, folder.worker(rank), bind=True) for rank in range(self.tp)]
        self._heartbeats = sockets.pull(context, folder.heartbeats)
        self._children: list[Child] = []
        self._loaded: dict[int, WeightsLoaded] = {}
        self._ready: set[int] = set()
        for rank in range(self.tp):
            arguments = [str(folder.path), str(rank)]
            self._children.append(spawn(f"worker {rank}", "corellm.worker", arguments, _environment(settings)))
        self._silences = [Silence() for _ in self._children]
        self._lost = False  # one has died or hangs, and others may wait for it for ever

    @property
    def is_ready(self) -> bool:
        return len(self._ready) == self.tp

    @property
    def has_loaded(self) -> bool:
        return len(self._loaded) == self.tp

    @property
    def device_name(self) -> str:
        return self._loaded[0].device_name

    def watch(self, poller: zmq.Poller) -> None:
        """Wake the poller for reports, heartbeats and deaths."""
        for socket in (*self._sockets, self._heartbeats):
            poller.register(socket, zmq.POLLIN)
        for child in self._children:
            poller.register(child.pidfd, zmq.POLLIN)

    def send(self, command: WorkerCommand) -> None:
        """The same command to every rank. Raises `EngineDeadError` if one does not take it."""
        frame = encode(command)
        for rank, socket in enumerate(self._sockets):
            try:
                socket.send(frame, zmq.DONTWAIT)
            except zmq.Again:
                raise EngineDeadError(f"worker {rank} does not read its commands") from None

    def allocate(self, settings: Settings) -> AllocateKV:
        """Once every rank has loaded: settle on the blocks and sequences that all of them hold, and tell them."""
        command = AllocateKV(
            num_blocks=min(loaded.block_budget for loaded in self._loaded.values()),
            max_batch_tokens=settings.max_batch_tokens,
            max_seqs=min(loaded.max_seqs for loaded in self._loaded.values()),
            max_model_len=settings.max_model_len,
        )
        self.send(command)
        return command

    def receive(self, report: Callable[[Progress], None] | None = None) -> Iterator[StepResult]:
        """Drain what workers sent: results out, progress to `report`.

        Raises the error that a worker reported.
        """
        while self._heartbeats.poll(0):
            beat = self._decode(self._heartbeats)
            if isinstance(beat, Heartbeat):
                self._silences[beat.rank].heard()
                if beat.busy_s > STEP_S:
                    self._lost = True
                    raise EngineDeadError(f"worker {beat.rank} hangs: step {beat.step} runs for {beat.busy_s:.0f} s")
        for socket in self._sockets:
            for _ in range(REPORTS_A_TURN):
                if not socket.poll(0):
                    break
                message = self._decode(socket)
                match message:
                    case StepResult():
                        yield message
                    case Progress():
                        if report is not None:
                            report(message)
                    case WeightsLoaded():
                        self._loaded[message.rank] = message
                    case WorkerReady():
                        self._ready.add(message.rank)
                    case WorkerFailed():
                        self._lost = True
                        self._blame_the_dead(message.rank)
                        raise from_code(message.code, message.message)
                    case Heartbeat():
                        raise ProtocolError("a heartbeat came over a worker's command socket")

    def check(self) -> None:
        """Raise `EngineDeadError` (`StartupError` before all are ready) if a worker has died or fallen silent."""
        limit = SILENCE_S if self.is_ready else STARTING_SILENCE_S
        for child, silence in zip(self._children, self._silences, strict=True):
            died, silent = child.exit_code() is not None, silence.seconds() > limit
            if died or silent:
                self._lost = True
            if died:
                raise self._end(f"{child.name} {child.describe_exit()}")
            if silent:
                raise self._end(f"{child.name} has been silent for {limit:.0f} s; it is stopped or hung")

    def _end(self, message: str) -> EngineDeadError | StartupError:
        return EngineDeadError(message) if self.is_ready else StartupError(message)

    def _blame_the_dead(self, reporter: int) -> None:
        """A rank whose sum another one left by dying reports that first; raise the death, which is what happened."""
        deadline = time.monotonic() + BLAME_S
        others = [child for rank, child in enumerate(self._children) if rank != reporter]
        while others and time.monotonic() < deadline:
            for child in others:
                if (child.exit_code() or 0) < 0:
                    raise self._end(f"{child.name} {child.describe_exit()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Ask them to leave, then make them; at once if one is lost."""
        if not self._lost:
            self._ask_to_leave()
        stop_all(self._children, 0.0 if self._lost else STOP_S)
        for socket in (*self._sockets, self._heartbeats):
            socket.close(linger=0)

    def _ask_to_leave(self) -> None:
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):  # it does not read: hanging up or killing ends it
                socket.send(encode(Shutdown()), zmq.DONTWAIT)
        deadline = time.monotonic() + LEAVE_S
        for child in self._children:
            child.wait(deadline - time.monotonic())

    def _decode(self, socket: zmq.Socket[bytes]) -> WorkerReport:
        return self._reports.decode(socket.recv())


def _environment(settings: Settings) -> dict[str, str]:
    # Collectives open sockets of their own: keep those on loopback. Threads are set before any library reads them.
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if settings.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(settings.threads)
        # OpenMP threads that spin at a barrier starve the very thread they wait for when something else wants a core:
        # 3 to 5 times slower beside one busy process, where a short spin costs 8 % on an idle machine.
        environment["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "1000")
    return environment
