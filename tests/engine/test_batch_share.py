"""Chats beside a batch, on machines whose steps take `base + per_token * tokens` seconds by a simulated clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corellm.comms.codec import i32
from corellm.comms.messages import Request, Sampling, StepPlan, StepResult
from corellm.engine.admission import Limits
from corellm.engine.batch_share import LINGER_S, OVERHEAD_S
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.sequence import Sequence, State

INTERACTIVE, BATCH = 0, 1
SEQS, BUDGET, BLOCKS, PAGE = 32, 512, 4000, 16
CPU, COMPUTE_BOUND, GPU = (0.040, 0.0027), (0.0, 0.003), (0.005, 0.00002)
MACHINES = {"cpu": CPU, "compute bound": COMPUTE_BOUND, "gpu": GPU}


@dataclass
class Step:
    plan: StepPlan
    seconds: float
    ends_at: float


class TimedEngine:
    """A scheduler and a worker that runs its steps one after another; two may be in flight, as in the engine's loop."""

    def __init__(self, machine: tuple[float, float], blocks: int = BLOCKS) -> None:
        self.base, self.per_token = machine
        self.now = 0.0
        limits = Limits(SEQS, BUDGET, max_model_len=4096, vocab=1000)
        self.scheduler = Scheduler(limits, make_allocator("radix", blocks, PAGE), lambda: self.now)
        self.steps: list[Step] = []
        self._in_flight: deque[Step] = deque()
        self._ids = 0

    def add(self, priority: int, prompt: int, max_tokens: int) -> Sequence:
        """Submit a request whose prompt shares nothing with that of another."""
        self._ids += 1
        tokens = i32(np.random.default_rng(self._ids).integers(0, 1000, prompt))
        request = Request(tag=self._ids, prompt=tokens, sampling=Sampling(max_tokens=max_tokens), priority=priority)
        sequence = Sequence(self._ids, b"client", request, self.now)
        self.scheduler.add(sequence)
        self._plan()
        return sequence

    def add_batch(self, rows: int = 4 * SEQS, prompt: int = 20, max_tokens: int = 60) -> list[Sequence]:
        return [self.add(BATCH, prompt, max_tokens) for _ in range(rows)]

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.now + seconds
        while self._in_flight and self._in_flight[0].ends_at <= until:
            self.end_step()
        self.now = until

    def run_until_ended(self, sequences: list[Sequence]) -> None:
        while any(s.state is not State.FINISHED for s in sequences):
            self.end_step()

    def first_token_time(self, prompt: int, max_tokens: int = 8) -> float:
        """A chat that comes now: seconds to its first token. Returns when it has ended."""
        chat = self.add(INTERACTIVE, prompt, max_tokens)
        self.run_until_ended([chat])
        assert chat.first_token_at is not None
        return chat.first_token_at - chat.arrived_at

    def _plan(self) -> None:
        while len(self._in_flight) < 2 and (plan := self.scheduler.schedule()) is not None:
            seconds = self.base + self.per_token * int(plan.row_tokens.sum())
            begins = self._in_flight[-1].ends_at if self._in_flight else self.now
            step = Step(plan, seconds, begins + seconds)
            self.steps.append(step)
            self._in_flight.append(step)

    def end_step(self) -> None:
        step = self._in_flight.popleft()
        self.now = step.ends_at
        tokens = i32(np.full(int(step.plan.row_samples.sum()), 7))
        self.scheduler.collect(StepResult(step=step.plan.step, tokens=tokens, failed=i32([]), seconds=step.seconds))
        self._plan()


def waits_beside_a_batch(engine: TimedEngine, prompt: int, batch_prompt: int, pauses: list[float]) -> list[float]:
    """First-token times of chats after a first one, by which the engine learns that it is shared."""
    engine.add_batch(prompt=batch_prompt)
    engine.run(1.0)
    engine.first_token_time(prompt)
    waits = []
    for pause in pauses:
        engine.run(pause)
        waits.append(engine.first_token_time(prompt))
    return waits


@settings(max_examples=60, deadline=None)
@given(
    base=st.floats(0, 0.2),
    per_token=st.floats(0.00001, 0.005),
    prompt=st.integers(5, 200),
    batch_prompt=st.integers(1, 100),
    pauses=st.lists(st.floats(0, 0.5), min_size=1, max_size=12),
)
def test_a_chat_waits_at_most_twice_as_long_beside_a_batch(
    base: float, per_token: float, prompt: int, batch_prompt: int, pauses: list[float]
) -> None:
    engine = TimedEngine((base, per_token))
    alone = base + per_token * prompt
    one_token_more = per_token  # the share is in whole tokens
    for wait in waits_beside_a_batch(engine, prompt, batch_prompt, pauses):
        assert wait + OVERHEAD_S <= 2 * (alone + OVERHEAD_S) + one_token_more + 1e-9


def test_the_first_chat_waits_for_no_more_than_the_steps_that_were_planned_before_it() -> None:
    engine = TimedEngine(CPU)
    engine.add_batch(max_tokens=1000)
    engine.run(60.0)
    planned = sum(step.seconds for step in engine.steps[-2:])
    assert engine.first_token_time(30) <= planned + 0.040 + 30 * 0.0027


def test_a_chat_that_finds_every_block_taken_is_in_the_very_next_step() -> None:
    engine = TimedEngine(GPU, blocks=60)
    engine.add_batch(prompt=100, max_tokens=400)
    engine.run(0.5)
    engine.first_token_time(200)
    engine.run(0.5)
    assert engine.scheduler.kv.stats().in_use > 48, "the batch fills the cache again"
    running = engine.steps[-1]
    chat = engine.add(INTERACTIVE, 200, 8)
    engine.run_until_ended([chat])
    assert any(opened.prompt_len == 200 for opened in engine.steps[running.plan.step].plan.opens)


@pytest.mark.parametrize("name", MACHINES)
def test_steps_between_chats_are_used_to_the_full(name: str) -> None:
    engine = TimedEngine(MACHINES[name])
    engine.add_batch(max_tokens=1500)
    engine.run(1.0)
    engine.first_token_time(60)
    engine.run(3.0)
    target = engine.base + 60 * engine.per_token + OVERHEAD_S
    for step in engine.steps[-10:-2]:
        everybody = len(step.plan.row_slots) == SEQS
        assert everybody or 0.9 * target <= step.seconds <= target + engine.per_token + 1e-9


@pytest.mark.parametrize("name", MACHINES)
def test_batch_rows_that_run_end_under_more_chats_than_the_machine_can_serve(name: str) -> None:
    engine = TimedEngine(MACHINES[name])
    rows = engine.add_batch(rows=16, max_tokens=20)
    while any(row.first_token_at is None for row in rows):
        engine.end_step()
    began = len(engine.steps)
    waiting: list[Sequence] = []
    while any(row.state is not State.FINISHED for row in rows):
        waiting = [chat for chat in waiting if chat.first_token_at is None]
        while len(waiting) < 6:
            waiting.append(engine.add(INTERACTIVE, 300, 2))
        engine.end_step()
        assert len(engine.steps) - began < 2 * 16 * 20, "the batch has less than a token in two steps"


def test_rows_that_do_not_fit_into_a_step_decode_in_turn() -> None:
    engine = TimedEngine(CPU)
    rows = engine.add_batch(rows=24, max_tokens=500)
    engine.run(3.0)
    engine.first_token_time(10)
    engine.run(2.0)
    before = {row.id: row.output_tokens for row in rows}
    engine.run(5.0)
    assert all(len(step.plan.row_slots) < 24 for step in engine.steps[-10:])
    gained = [row.output_tokens - before[row.id] for row in rows]
    assert min(gained) > 10
    assert max(gained) - min(gained) <= 2


@pytest.mark.parametrize("priority", [INTERACTIVE, BATCH])
def test_an_engine_with_requests_of_one_kind_plans_ahead_and_leaves_no_row_out(priority: int) -> None:
    engine = TimedEngine(CPU)
    rows = [engine.add(priority, 10, 40) for _ in range(SEQS)]
    engine.run(3.0)
    assert engine.scheduler.in_flight == 2
    assert all(len(step.plan.row_slots) == SEQS for step in engine.steps[-5:])
    engine.run_until_ended(rows)


def test_the_batch_has_the_engine_for_itself_again_some_seconds_after_the_last_chat() -> None:
    engine = TimedEngine(CPU)
    engine.add_batch(max_tokens=2000)
    engine.run(2.0)
    engine.first_token_time(10)
    engine.run(LINGER_S - 1)
    assert engine.scheduler.in_flight == 1
    assert len(engine.steps[-1].plan.row_slots) < SEQS
    engine.run(2.0)
    assert engine.scheduler.in_flight == 2
    assert len(engine.steps[-1].plan.row_slots) == SEQS
