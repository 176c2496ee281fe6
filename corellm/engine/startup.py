"""From an empty process to a ready engine, telling every front end that asks how far it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zmq

from corellm.checkpoint import open_checkpoint
from corellm.comms.messages import EngineInfo, Goodbye, Hello, Progress, Ready
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, Settings, write_settings
from corellm.engine.admission import Limits
from corellm.engine.constraints import Constraints
from corellm.engine.front_ends import FrontEnds
from corellm.engine.grammar import load_vocabulary
from corellm.engine.kv_cache import make_allocator
from corellm.engine.resolve import resolve
from corellm.engine.scheduler import Scheduler
from corellm.engine.workers import Workers
from corellm.errors import EngineDeadError
from corellm.models.llama.spec import LlamaSpec

POLL_MS = 100
ALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Started:
    """What a start-up ends with."""

    info: EngineInfo
    scheduler: Scheduler
    constraints: Constraints


class Startup:
    """Drives workers from launch to ready; `workers` must be stopped by whoever made the start-up."""

    def __init__(self, folder: RunFolder, launch: Launch, front_ends: FrontEnds, death_pipe: int) -> None:
        self._began = time.monotonic()
        self._folder = folder
        self._front_ends = front_ends
        self._death_pipe = death_pipe
        self._latest: dict[tuple[str, int], Progress] = {}  # of each stage and rank, for front ends that join late
        self._last = Progress(stage="start workers")
        checkpoint = open_checkpoint(Path(launch.model_path), launch.options.load_format)
        self._spec: LlamaSpec = checkpoint.spec
        self._settings: Settings = resolve(launch, checkpoint)
        write_settings(folder, self._settings)
        # Loads while the workers do: it holds the interpreter's lock for long, which would delay running requests.
        load = partial(load_vocabulary, checkpoint.path, self._spec.vocab, checkpoint.eos_ids)
        self._constraints = Constraints(load, self._spec.vocab)
        self.workers = Workers(self._settings, folder)

    def run(self) -> Started:
        """Block until every worker is ready. Raises `StartupError` or what a worker reports."""
        poller = zmq.Poller()
        self._front_ends.watch(poller)
        self.workers.watch(poller)
        poller.register(self._death_pipe, zmq.POLLIN)
        scheduler = None
        alive = time.monotonic() + ALIVE_S
        while not self.workers.is_ready:
            if self._death_pipe in dict(poller.poll(POLL_MS)):
                raise EngineDeadError("the front end that started this engine is gone")
            self._greet()
            if time.monotonic() > alive:
                self._front_ends.broadcast(self._last)  # a sign of life while a stage takes long
                alive = time.monotonic() + ALIVE_S
            for _ in self.workers.receive(self._report):
                raise EngineDeadError("a worker answered a step before any was planned")
            self.workers.check()
            if scheduler is None and self.workers.has_loaded:
                scheduler = self._allocate()
        if scheduler is None:
            raise EngineDeadError("a worker was ready before its KV blocks were settled")
        info = self._describe(scheduler)
        self._folder.write(self._folder.registration, msgspec.json.encode(info))
        self._front_ends.broadcast(Ready(info=info))
        return Started(info, scheduler, self._constraints)

    def _greet(self) -> None:
        for client, message in self._front_ends.receive():
            if isinstance(message, Hello):
                for progress in self._latest.values():
                    self._front_ends.send(client, progress)
            elif not isinstance(message, Goodbye):
                self._front_ends.refuse(client, "the engine is still starting; wait for it to be ready")

    def _report(self, progress: Progress) -> None:
        self._last = self._latest[(progress.stage, progress.rank)] = progress
        self._front_ends.broadcast(progress)

    def _allocate(self) -> Scheduler:
        settings = self._settings
        allocated = self.workers.allocate(settings)
        blocks = allocated.num_blocks
        self._report(Progress(stage="allocate KV", done=blocks, total=blocks, unit="blocks"))
        limits = Limits(allocated.max_seqs, settings.max_batch_tokens, settings.max_model_len, self._spec.vocab)
        return Scheduler(limits, make_allocator(settings.kv_cache, blocks, settings.page_size), time.monotonic)

    def _describe(self, scheduler: Scheduler) -> EngineInfo:
        settings = self._settings
        return EngineInfo(
            name=settings.name,
            model=settings.model,
            model_path=settings.model_path,
            dtype=settings.dtype,
            device=self.workers.device_name,
            tp=settings.tp,
            kv_cache=settings.kv_cache,
            page_size=settings.page_size,
            kv_blocks=scheduler.kv.num_blocks,
            max_model_len=settings.max_model_len,
            max_batch_tokens=settings.max_batch_tokens,
            max_seqs=scheduler.limits.max_seqs,
            vocab=self._spec.vocab,
            seed=settings.seed,
            load_format=settings.load_format,
            max_request_tokens=scheduler.max_request_tokens,
            startup_s=time.monotonic() - self._began,
        )
