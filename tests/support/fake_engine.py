"""A real engine loop in a thread, over workers that compute nothing: the next token follows from the plan alone."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from llguidance import LLTokenizer

from corellm.comms.codec import i32
from corellm.comms.messages import EngineInfo, EngineMessage, StepPlan, StepResult
from corellm.comms.run_folder import RunFolder
from corellm.engine.admission import Limits
from corellm.engine.constraints import Constraints
from corellm.engine.engine import Engine
from corellm.engine.front_ends import FrontEnds
from corellm.engine.grammar import make_vocabulary
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.stats import StatsPublisher
from corellm.errors import CoreLLMError

VOCAB = 1000
END = 256  # of an answer that a grammar constrains; ids below are bytes


def byte_vocabulary() -> LLTokenizer:
    tokens = [bytes([token]) if token < END else b"" for token in range(VOCAB)]
    return make_vocabulary(tokens, list, special_ids=[END], eos_ids=[END])


class CountingWorkers:
    """Samples the number of tokens that the slot knows. Holds plans while `paused`."""

    def __init__(self) -> None:
        self.paused = False
        self.failing: set[int] = set()  # slots whose logits are NaN
        self.death: CoreLLMError | None = None
        self._plans: deque[StepPlan] = deque()
        self._known: dict[int, int] = {}

    def send(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def receive(self) -> Iterator[StepResult]:
        if self._plans and not self.paused:
            yield self._run(self._plans.popleft())

    def check(self) -> None:
        if self.death is not None:
            raise self.death

    def _run(self, plan: StepPlan) -> StepResult:
        for opened in plan.opens:
            self._known[opened.slot] = len(opened.tokens)
        tokens: list[int] = []
        failed: list[int] = []
        masks = plan.masks.reshape(len(plan.mask_rows), -(-VOCAB // 32))
        allowed = dict(zip(plan.mask_rows.tolist(), masks, strict=True))
        for slot, samples in zip(plan.row_slots.tolist(), plan.row_samples.tolist(), strict=True):
            if samples:
                if slot in self.failing:
                    failed.append(len(tokens))
                tokens.append(self._draw(self._known[slot], allowed.get(len(tokens))))
                self._known[slot] += 1
        return StepResult(step=plan.step, tokens=i32(tokens), failed=i32(failed), seconds=0.001)

    @staticmethod
    def _draw(known: int, mask: np.ndarray | None) -> int:
        """The number of known tokens, or one of the allowed tokens that depends on it."""
        if mask is None:
            return known % VOCAB
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        return int(allowed[known * 31 % len(allowed)])


class EngineThread:
    """Turns the loop until the block is left."""

    def __init__(self, folder: RunFolder, *, blocks: int, max_seqs: int, load: Callable[[], LLTokenizer]) -> None:
        self.folder = folder
        self._lock = folder.lock()
        self.workers = CountingWorkers()
        limits = Limits(max_seqs, 64, 512, VOCAB)
        self.scheduler = Scheduler(limits, make_allocator("radix", blocks, 4), time.monotonic)
        self.front_ends = FrontEnds(folder)
        self._stats = StatsPublisher(folder, "fake")
        self.constraints = Constraints(load, VOCAB)
        self._info = EngineInfo(
            name="fake", model="fake", model_path="", dtype="", device="", tp=1, kv_cache="radix", page_size=4,
            kv_blocks=blocks, max_model_len=512, max_batch_tokens=64, max_seqs=max_seqs, vocab=VOCAB, seed=0,
            load_format="dummy", max_request_tokens=257, startup_s=0.0,
        )  # fmt: skip
        self.announcements: deque[EngineMessage] = deque()  # sent by the loop's thread, which alone may use its sockets
        self.error: CoreLLMError | None = None
        self._outbox: deque[EngineMessage] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        death_pipe, write_end = os.pipe()
        engine = Engine(
            self._info,
            self.front_ends,
            self.workers,  # type: ignore[arg-type]
            self.scheduler,
            self._stats,
            self.constraints,
            death_pipe,
        )
        try:
            while not self._stop.is_set():
                engine.turn()
                while self._outbox:
                    self.front_ends.broadcast(self._outbox.popleft())
                time.sleep(0.0005)
            engine.settle()
        except CoreLLMError as error:
            self.error = error
        finally:
            os.close(death_pipe)
            os.close(write_end)

    def broadcast(self, message: EngineMessage) -> None:
        """Tell all front ends from the loop's own thread, the only one that may use its socket."""
        self._outbox.append(message)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, f"5 s have passed without {what}"
            time.sleep(0.005)

    def stop(self) -> None:
        """End the loop as the engine's own process would."""
        self._stop.set()
        self._thread.join(5)

    def close(self) -> None:
        self.stop()
        self.front_ends.close()
        self._stats.close()
        self.constraints.close()
        os.close(self._lock)


@contextlib.contextmanager
def fake_engine(
    path: Path, *, blocks: int = 64, max_seqs: int = 8, load: Callable[[], LLTokenizer] = byte_vocabulary
) -> Iterator[EngineThread]:
    """An engine whose sockets are in `path`; the KV cache must be whole and unused at the end."""
    thread = EngineThread(RunFolder(path), blocks=blocks, max_seqs=max_seqs, load=load)
    try:
        yield thread
        if thread.error is None:
            thread.until(lambda: thread.scheduler.kv.stats().in_use == 0, "all blocks given back")
            thread.scheduler.kv.check()
    finally:
        thread.close()
