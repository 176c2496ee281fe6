"""What a running engine publishes to dashboards, read off its socket, against the engine's own state and counts.

`CORELLM_WATCHERS=1000` makes one test as long as the promise: a thousand watchers that come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import numpy as np
import pytest

from corellm.comms.codec import i32
from corellm.comms.messages import Request, Sampling
from corellm.comms.stats_messages import CACHED, FREE, IN_USE, MAP_MAX, SHARED, SNAPSHOTS, TREES, Snapshot, Tree
from corellm.engine.admission import Limits
from corellm.engine.engine_client import EngineClient
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.sequence import Sequence
from corellm.engine.snapshot import block_map, request_rows
from tests.support.fake_engine import EngineThread, fake_engine
from tests.support.watcher import watching

VISITORS = int(os.environ.get("CORELLM_WATCHERS", "200"))


async def run_requests(engine: EngineThread, prompts: list[list[int]], max_tokens: int) -> None:
    client = await EngineClient.connect(engine.folder, lambda _: None)
    try:
        for stream in [client.submit(prompt, Sampling(max_tokens=max_tokens)) for prompt in prompts]:
            async with asyncio.timeout(20):
                async for _ in stream:
                    pass
    finally:
        await client.close()


def test_the_figures_at_the_end_are_the_engines_own_and_every_step_is_told_once(tmp_path: Path) -> None:
    with fake_engine(tmp_path, blocks=20, max_seqs=4) as engine, watching(engine.folder) as watcher:
        watcher.next()  # from here on every step is told
        asyncio.run(run_requests(engine, [[1, 2, 3, 4, n] for n in range(30)], 30))
        engine.until(lambda: engine.scheduler.in_flight == 0, "the end of the last step")
        told = watcher.until(lambda s: s.stats.finished == 30 and not s.stats.running, "the end of all requests")
        steps = [step for snapshot in told for step in snapshot.steps]
        counters, stats = engine.scheduler.counters, told[-1].stats
        assert counters.preemptions > 0
        assert (stats.output_tokens, stats.prompt_tokens) == (30 * 30, counters.prompt_tokens)
        assert (stats.preemptions, stats.finished) == (counters.preemptions, 30)
        assert stats.kv == engine.scheduler.kv.stats()
        assert [step.step for step in steps] == list(range(1, engine.scheduler.steps + 1))
        assert sum(step.prefill_tokens for step in steps) == counters.prompt_tokens
        assert (steps[-1].preemptions, steps[-1].evictions) == (counters.preemptions, stats.kv.evictions)
        assert sum(told[-1].ttft.counts) == 30
        # Every token but a request's first has one before it; those after a preemption are not counted.
        assert 30 * 29 - counters.preemptions <= sum(told[-1].itl.counts) <= 30 * 29


def test_a_watcher_may_join_at_any_moment_and_hears_of_the_present(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine:
        asyncio.run(run_requests(engine, [[1] * 9], 5))
        with watching(engine.folder) as watcher:
            snapshot = watcher.until(lambda s: True, "a snapshot")[0]
        assert (snapshot.stats.finished, snapshot.stats.output_tokens) == (1, 5)
        assert snapshot.steps == []
        assert sum(snapshot.ttft.counts) == 1


def test_block_runs_are_the_allocators_states(tmp_path: Path) -> None:
    with fake_engine(tmp_path, blocks=64) as engine, watching(engine.folder) as watcher:
        asyncio.run(run_requests(engine, [[5] * 50], 2))
        blocks = watcher.until(lambda s: s.stats.finished == 1 and not s.stats.kv.in_use, "the end")[-1].blocks
        states = np.repeat(blocks.runs[::2], blocks.runs[1::2])
        assert states.tolist() == list(engine.scheduler.kv.states)
        kv = engine.scheduler.kv.stats()
        assert [np.count_nonzero(states == state) for state in (FREE, CACHED)] == [kv.free, kv.cached]


def test_trees_are_made_for_those_who_ask_and_stop_with_them(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine:
        asyncio.run(run_requests(engine, [[7] * 9, [7] * 9], 2))
        with watching(engine.folder, TREES) as watcher:
            tree = watcher.next()
            assert isinstance(tree, Tree)
            assert tree.pages == engine.scheduler.kv.stats().cached
        with watching(engine.folder, SNAPSHOTS) as watcher:
            for _ in range(6):
                assert not isinstance(watcher.next(), Tree)


def test_a_subscription_to_everything_gets_everything(tmp_path: Path) -> None:
    with fake_engine(tmp_path, blocks=64) as engine, watching(engine.folder, b"") as watcher:
        told = {type(watcher.next()) for _ in range(2)}
    assert told == {Snapshot, Tree}


def test_nobody_watching_means_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    with fake_engine(tmp_path) as engine:
        monkeypatch.setattr("corellm.engine.stats.request_rows", lambda *_: made.append(1) or ([], 0))
        asyncio.run(run_requests(engine, [[1] * 5] * 4, 50))
        assert made == []
        with watching(engine.folder) as watcher:
            watcher.next()
        assert made
        engine.until(lambda: engine._stats._watch._log is None, "the last watcher's leaving to be noticed")
        count = len(made)
        asyncio.run(run_requests(engine, [[1] * 5] * 4, 100))
        assert len(made) == count


def test_a_watcher_that_reads_nothing_and_hundreds_that_come_and_go_change_nothing(tmp_path: Path) -> None:
    with fake_engine(tmp_path) as engine, watching(engine.folder) as stuck, watching(engine.folder) as watcher:
        watcher.next()
        for _ in range(VISITORS // 100):
            with contextlib.ExitStack() as leaving:
                for visitor in [leaving.enter_context(watching(engine.folder)) for _ in range(100)]:
                    visitor.next()
        asyncio.run(run_requests(engine, [[1, 2, n] for n in range(20)], 40))
        told = watcher.until(lambda s: s.stats.finished == 20, "the end of all requests")
        assert told[-1].stats.output_tokens == 20 * 40
        assert engine.error is None
        assert stuck.next()  # what it did not read waited for it within bounds, and it is heard again


def rows_of(scheduler: Scheduler) -> dict[int, tuple[str, str]]:
    return {row.id: (row.state, row.wait) for row in request_rows(scheduler, 0.0)[0]}


def scheduler_with(*prompts: int, blocks: int, seqs: int, budget: int) -> Scheduler:
    """Requests of these prompt lengths, numbered from 1, after one step."""
    scheduler = Scheduler(Limits(seqs, budget, 64, 100), make_allocator("naive", blocks, 4), lambda: 1.0)
    for number, length in enumerate(prompts, 1):
        request = Request(tag=number, prompt=i32([1] * length), sampling=Sampling(max_tokens=4))
        scheduler.add(Sequence(number, b"client", request, 0.0))
    assert scheduler.schedule() is not None
    return scheduler


def test_the_head_of_the_queue_lacks_what_kept_it_out_and_the_others_wait_behind_it() -> None:
    lacks_slots = scheduler_with(4, 4, 4, 4, blocks=16, seqs=2, budget=32)
    assert rows_of(lacks_slots) == {
        1: ("decode", ""), 2: ("decode", ""), 3: ("waiting", "slots"), 4: ("waiting", "turn"),
    }  # fmt: skip
    lacks_blocks = scheduler_with(8, 12, 1, blocks=4, seqs=3, budget=32)
    assert rows_of(lacks_blocks) == {1: ("decode", ""), 2: ("waiting", "blocks"), 3: ("waiting", "turn")}
    lacks_tokens = scheduler_with(20, 4, blocks=16, seqs=3, budget=8)
    assert rows_of(lacks_tokens) == {1: ("prefill", ""), 2: ("waiting", "tokens")}


def test_large_pools_are_drawn_by_what_most_of_a_unit_is() -> None:
    states = bytearray([IN_USE]) * (2 * MAP_MAX) + bytearray([FREE, SHARED, SHARED])
    found = block_map(states)
    assert (found.scale, sum(found.runs[1::2])) == (3, -(-len(states) // 3))
    assert found.runs[::2] == [IN_USE, SHARED]
    assert block_map(bytearray([FREE, FREE, CACHED])).runs == [FREE, 2, CACHED, 1]


def test_a_costly_snapshot_makes_the_next_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes, no more than half a percent of the time goes into it."""

    def burn(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    with fake_engine(tmp_path) as engine, watching(engine.folder) as watcher:
        watcher.next()
        real = request_rows
        monkeypatch.setattr("corellm.engine.stats.request_rows", lambda *given: burn(0.01) or real(*given))
        told = [watcher.next() for _ in range(3)]
        assert not isinstance(told[-1], Tree)
        assert told[-1].interval_s >= 2.0
