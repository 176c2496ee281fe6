"""A worker process: one rank of the compute plane. Loads its shard, makes its KV blocks, then runs plans until told.

The main thread talks to the engine over one PAIR socket and computes. A second thread, with a socket of its own, sends
a heartbeat every second, so that the engine can tell busy from hung, and ends the process when the engine is gone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
import traceback
from collections import deque
from pathlib import Path

import msgspec
import torch
import zmq

from corellm.checkpoint import open_checkpoint
from corellm.comms import sockets
from corellm.comms.children import is_readable
from corellm.comms.codec import Decoder, encode
from corellm.comms.messages import (
    AllocateKV,
    Heartbeat,
    Progress,
    Shutdown,
    StepPlan,
    WeightsLoaded,
    WorkerCommand,
    WorkerFailed,
    WorkerReady,
    WorkerReport,
)
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Settings, read_settings
from corellm.errors import CoreLLMError, OutOfMemoryError
from corellm.models.llama.spec import weight_table
from corellm.worker.budget import block_budget, seq_budget
from corellm.worker.collectives import SingleRank, TorchDistributed, make_collectives
from corellm.worker.executor import Executor, Launched
from corellm.worker.slab import Slab
from corellm.worker.weight_loader import dummy_weights, load_weights

HEARTBEAT_S = 1.0

log = logging.getLogger(__name__)


def run(folder: RunFolder, rank: int, death_pipe: int) -> int:
    """Serve the engine that owns `folder` until it says so; the exit code."""
    settings = read_settings(folder)
    logging.basicConfig(level=settings.log_level.upper(), format=f"%(levelname)s worker {rank}: %(message)s")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    pulse = Pulse(context, folder, rank, death_pipe)
    pulse.start()
    worker = Worker(settings, folder, rank, sockets.pair(context, folder.worker(rank), bind=False), pulse)
    try:
        worker.serve()
    except CoreLLMError as error:
        worker.send(WorkerFailed(rank=rank, code=error.code, message=error.message))
        return 1
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(".")[0]
        message = f"worker {rank} ran out of GPU memory: {reason}; lower --gpu-memory, --max-batch-tokens or --max-seqs"
        worker.send(WorkerFailed(rank=rank, code=OutOfMemoryError.code, message=message))
        return 1
    except Exception as error:  # noqa: BLE001  the engine must learn of any end, whatever it was
        log.debug("%s", traceback.format_exc())
        last = (traceback.extract_tb(error.__traceback__) or [None])[-1]
        where = f" at {os.path.basename(last.filename)}:{last.lineno}" if last else ""
        message = f"worker {rank} failed: {type(error).__name__}: {error}{where}"
        worker.send(WorkerFailed(rank=rank, code="engine_dead", message=" ".join(message.split())))
        return 1
    finally:
        worker.socket.close()
    return 0


class Pulse(threading.Thread):
    """Heartbeats to the engine; leaves with it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: RunFolder, rank: int, death_pipe: int) -> None:
        super().__init__(name="pulse", daemon=True)
        self._context, self._address, self._rank, self._death_pipe = context, folder.heartbeats, rank, death_pipe
        self._step = 0
        self._busy_since: float | None = None

    def begin(self, step: int) -> None:
        """Step `step` has been launched, perhaps behind others."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()
        self._step = step

    def end(self, step: int) -> None:
        """Step `step` is done."""
        self._busy_since = None if step == self._step else time.monotonic()

    def run(self) -> None:
        socket = sockets.push(self._context, self._address)
        while True:
            since = self._busy_since
            busy = time.monotonic() - since if since is not None else 0.0
            with contextlib.suppress(zmq.Again):  # the engine does not read just now; the next beat says the same
                socket.send(encode(Heartbeat(rank=self._rank, step=self._step, busy_s=busy)), zmq.DONTWAIT)
            if is_readable(self._death_pipe, HEARTBEAT_S):
                os._exit(1)  # nothing of value is held here, and the main thread may be deep in a kernel


class Worker:
    """One rank: an executor behind a socket."""

    def __init__(
        self, settings: Settings, folder: RunFolder, rank: int, socket: zmq.Socket[bytes], pulse: Pulse
    ) -> None:
        self.settings, self.folder, self.rank, self.socket, self.pulse = settings, folder, rank, socket, pulse
        self.device = torch.device(f"cuda:{rank}" if settings.device == "cuda" else "cpu")
        self._commands: Decoder[WorkerCommand] = Decoder(WorkerCommand)
        self._launched: deque[Launched] = deque()

    def send(self, report: WorkerReport) -> None:
        self.socket.send(encode(report))

    def serve(self) -> None:
        """Run commands until `Shutdown`. After an error the group is left as it is: closing might wait for others."""
        group = self._join()
        executor = self._load(group)
        while True:
            self._answer()
            command = self._commands.decode(self.socket.recv())
            match command:
                case StepPlan():
                    self.pulse.begin(command.step)
                    self._launched.append(executor.execute(command))
                case AllocateKV():
                    executor.allocate(command)
                    executor.warm_up(self._report)
                    gc.freeze()  # what start-up made stays; looking it over again would hold up a step
                    self.send(WorkerReady(rank=self.rank))
                case Shutdown():
                    group.close()
                    return

    def _answer(self) -> None:
        """Send the results of steps as they end, until all have or a command waits to be read.

        It spins: to be woken takes longer than the device may be left without work, and while it works one core may.
        """
        while self._launched:
            if self._launched[0].is_done():
                step = self._launched.popleft()
                if self.rank == 0:
                    self.send(step.result())
                self.pulse.end(step.step)
            elif self.socket.poll(0):
                return

    def _report(self, progress: Progress) -> None:
        self.send(msgspec.structs.replace(progress, rank=self.rank))

    def _join(self) -> SingleRank | TorchDistributed:
        """Take the rank's device, and meet the other ranks."""
        settings = self.settings
        if settings.device == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(settings.threads)
        self._report(Progress(stage="start workers", done=1, total=1))
        return make_collectives(self.folder.rendezvous, self.rank, settings.tp, self.device)

    def _load(self, group: SingleRank | TorchDistributed) -> Executor:
        settings, rank, device = self.settings, self.rank, self.device
        dtype = getattr(torch, settings.dtype)
        checkpoint = open_checkpoint(Path(settings.model_path), settings.load_format)
        spec = checkpoint.spec
        table = weight_table(spec, dtype.itemsize, settings.tp, rank)
        blocks = block_budget(settings, spec, table.nbytes, device)
        kv_bytes = Executor.kv_bytes(spec, settings.tp, blocks, settings.page_size, dtype)
        slab = Slab(table.nbytes + kv_bytes, device)
        if settings.load_format == "dummy":
            weights = dummy_weights(table, slab, dtype, settings.seed, rank)
        else:
            weights = load_weights(checkpoint, table, slab, dtype, group, self._report)
        kv_memory = slab.view(table.nbytes, (kv_bytes,), torch.uint8)
        executor = Executor(
            spec, weights, kv_memory, page_size=settings.page_size, device=device, dtype=dtype, group=group
        )
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        seqs = seq_budget(settings, device)
        self.send(WeightsLoaded(rank=rank, block_budget=blocks, max_seqs=seqs, device_name=name))
        return executor
