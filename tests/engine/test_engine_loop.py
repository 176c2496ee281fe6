"""The real engine loop and the real client over real sockets, with workers that only count."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from corellm.comms.codec import Decoder, encode, i32
from corellm.comms.messages import Dying, EngineMessage, Hello, Progress, Request, Sampling, StepEvents, Submit
from corellm.comms.run_folder import RunFolder
from corellm.engine import engine_client, front_ends
from corellm.engine.admission import Limits
from corellm.engine.engine_client import EngineClient
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.token_stream import TokenStream
from corellm.errors import (
    EngineDeadError,
    EngineTimeoutError,
    InvalidRequestError,
    NumericalError,
    PromptTooLongError,
    ProtocolError,
    RequestAbortedError,
)
from tests.support.fake_engine import EngineThread, fake_engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineThread]:
    with fake_engine(tmp_path) as thread:
        yield thread


@asynccontextmanager
async def connected(engine: EngineThread) -> AsyncIterator[EngineClient]:
    client = await EngineClient.connect(engine.folder, lambda _: None)
    try:
        yield client
    finally:
        await client.close()


async def tokens(stream: TokenStream) -> list[int]:
    async with asyncio.timeout(10):
        return [token async for batch in stream for token in batch.tokens]


async def finish_reason(stream: TokenStream) -> str:
    async with asyncio.timeout(10):
        async for batch in stream:
            if batch.finish is not None:
                return batch.finish.reason
    return "none"


def test_tokens_arrive_in_order_to_the_length_asked_for(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            streams = [client.submit([1] * n, Sampling(max_tokens=20)) for n in (3, 40, 100, 1)]
            found = await asyncio.gather(*map(tokens, streams))
            assert found == [list(range(n, n + 20)) for n in (3, 40, 100, 1)]

    asyncio.run(work())


def test_a_stop_id_ends_the_request_and_is_its_last_token(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            assert await tokens(client.submit([1] * 5, Sampling(max_tokens=50, stop_ids=(9, 8)))) == [5, 6, 7, 8]
            assert await finish_reason(client.submit([1] * 5, Sampling(max_tokens=50, stop_ids=(8,)))) == "stop"
            assert await finish_reason(client.submit([1] * 5, Sampling(max_tokens=2, stop_ids=(8,)))) == "length"

    asyncio.run(work())


def test_more_requests_than_slots_and_blocks_all_finish(tmp_path: Path) -> None:
    async def work(engine: EngineThread) -> None:
        async with connected(engine) as client:
            streams = [client.submit([1, 2, n], Sampling(max_tokens=30), priority=n % 2) for n in range(40)]
            assert await asyncio.gather(*map(tokens, streams)) == [list(range(3, 33))] * 40

    with fake_engine(tmp_path, blocks=20, max_seqs=4) as engine:
        asyncio.run(work(engine))
        assert engine.scheduler.counters.preemptions > 0


def test_abort_gives_blocks_back_and_ends_the_stream(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            running = client.submit([1] * 9, Sampling(max_tokens=200))
            async for _ in running:
                break
            engine.workers.paused = True
            waiting = client.submit([1] * 9, Sampling(max_tokens=200))
            for stream in (running, waiting):
                stream.abort()
                stream.abort()
                with pytest.raises(RequestAbortedError):
                    await tokens(stream)
            engine.workers.paused = False

    asyncio.run(work())


def test_ending_early_brings_the_figures(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            stream = client.submit([1] * 9, Sampling(max_tokens=200))
            async for _ in stream:
                break
            finish = await stream.end()
            assert (finish.reason, finish.prompt_tokens) == ("stop", 9)
            done = client.submit([1] * 9, Sampling(max_tokens=1))
            for _ in range(500):
                await asyncio.sleep(0.01)
                if done.tag not in client._streams:  # its end has come
                    break
            assert (await done.end()).reason == "length"

    asyncio.run(work())


def test_a_front_end_that_leaves_takes_its_requests_with_it(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            stream = client.submit([1] * 9, Sampling(max_tokens=240))
            async for _ in stream:
                break
        with pytest.raises(EngineDeadError, match="closed"):
            await tokens(stream)

    asyncio.run(work())
    engine.until(lambda: not engine.scheduler.running, "the request ended")


def test_a_front_end_that_falls_silent_is_dropped(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    socket = raw_front_end(engine)
    request = Request(tag=1, prompt=i32([1]), sampling=Sampling(max_tokens=240))
    engine.workers.paused = True
    socket.send(encode(Submit(requests=[request])))
    engine.until(lambda: bool(engine.scheduler.running), "the request was admitted")
    monkeypatch.setattr(front_ends, "SILENCE_S", 0.0)
    engine.workers.paused = False
    engine.until(lambda: not engine.scheduler.running, "the request ended")
    socket.close(linger=0)


def test_what_can_never_fit_is_refused_at_once(engine: EngineThread) -> None:
    async def refused(client: EngineClient, prompt: list[int], sampling: Sampling) -> Exception:
        with pytest.raises(InvalidRequestError) as caught:
            await tokens(client.submit(prompt, sampling))
        return caught.value

    async def work() -> None:
        async with connected(engine) as client:
            long = await refused(client, [1] * 250, Sampling(max_tokens=10))
            assert isinstance(long, PromptTooLongError)
            assert "260" in long.message
            assert "257" in long.message  # 64 blocks of 4, and the last token's KV is not stored
            assert "token id 1000" in (await refused(client, [5, 1000], Sampling(max_tokens=1))).message
            assert "token id -1" in (await refused(client, [5, -1], Sampling(max_tokens=1))).message
            assert "no tokens" in (await refused(client, [], Sampling(max_tokens=1))).message
            assert len(await tokens(client.submit([1] * 250, Sampling(max_tokens=7)))) == 7

    asyncio.run(work())


@pytest.mark.parametrize(
    ("blocks", "page", "context", "longest"), [(10, 16, 1000, 161), (10, 16, 161, 161), (10, 16, 100, 100)]
)
def test_the_longest_request_is_bound_by_blocks_and_context(blocks: int, page: int, context: int, longest: int) -> None:
    scheduler = Scheduler(Limits(4, 512, context, 100), make_allocator("radix", blocks, page), lambda: 0.0)
    assert scheduler.max_request_tokens == longest


def test_nan_fails_one_request_alone(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            engine.workers.failing = {0}
            engine.workers.paused = True  # until each has a slot of its own
            sick = client.submit([1] * 9, Sampling(max_tokens=20))
            well = client.submit([2] * 9, Sampling(max_tokens=20))
            engine.until(lambda: len(engine.scheduler.running) == 2, "both running")
            engine.workers.paused = False
            with pytest.raises(NumericalError, match="NaN"):
                await tokens(sick)
            assert len(await tokens(well)) == 20
            engine.workers.failing = set()
            again = client.submit([1] * 9, Sampling(max_tokens=20))
            async for batch in again:
                if batch.finish is not None:
                    assert batch.finish.cached_tokens == 0  # what was computed with NaN is not kept

    asyncio.run(work())


def test_nan_of_a_request_that_has_ended_does_not_stay_in_the_cache(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            engine.workers.failing = {0}
            engine.workers.paused = True
            sick = client.submit([1] * 40, Sampling(max_tokens=20))
            engine.until(lambda: engine.scheduler.in_flight > 0, "its prefill in flight")
            sick.abort()
            engine.until(lambda: not engine.scheduler.running, "its end")
            engine.workers.paused = False
            engine.until(lambda: engine.scheduler.in_flight == 0, "the result")
            engine.workers.failing = set()
            async for batch in client.submit([1] * 40, Sampling(max_tokens=2)):
                if batch.finish is not None:
                    assert batch.finish.cached_tokens == 0

    asyncio.run(work())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=0),
        Sampling(max_tokens=3, min_tokens=4),
        Sampling(max_tokens=3, temperature=-1.0),
        Sampling(max_tokens=3, temperature=float("nan")),
        Sampling(max_tokens=3, top_p=0.0),
        Sampling(max_tokens=3, repetition_penalty=0.0),
        Sampling(max_tokens=3, logprobs=21),
        Sampling(max_tokens=3, prompt_logprobs=-1),
        Sampling(max_tokens=3, bias_ids=(1, 2), bias_values=(1.0,)),
        Sampling(max_tokens=3, bias_ids=(1000,), bias_values=(1.0,)),
        Sampling(max_tokens=3, stop_ids=(-1,)),
    ],
)
def test_sampling_that_would_hurt_a_worker_is_refused(engine: EngineThread, sampling: Sampling) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            with pytest.raises(InvalidRequestError):
                await tokens(client.submit([1], sampling))

    asyncio.run(work())


@pytest.mark.parametrize("prompt", [[2**40], [1.5, 2.5], ["a"], [[1], [2]], [-(2**31) - 1]])
def test_what_is_no_token_id_is_refused_before_it_is_sent(engine: EngineThread, prompt: list[Any]) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            with pytest.raises(InvalidRequestError):
                client.submit(prompt, Sampling(max_tokens=1))
            with pytest.raises(InvalidRequestError, match="cache_salt"):
                client.submit([1], Sampling(max_tokens=1), cache_salt="\ud800")
            assert len(await tokens(client.submit([1], Sampling(max_tokens=1)))) == 1

    asyncio.run(work())


def test_a_report_that_raises_ends_the_connection(engine: EngineThread) -> None:
    def report(progress: Progress) -> None:
        raise KeyError("broken display")

    async def work() -> None:
        client = await EngineClient.connect(engine.folder, report)
        engine.broadcast(Progress(stage="warm up"))
        stream = client.submit([1], Sampling(max_tokens=240))
        with pytest.raises(EngineDeadError, match="broken display"):
            await tokens(stream)
        await client.close()

    asyncio.run(work())


def test_an_engine_that_does_not_answer_is_said_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "SILENCE_S", 0.5)
    lock = RunFolder(tmp_path).lock()

    async def work() -> None:
        with pytest.raises(EngineTimeoutError, match="silent"):
            await EngineClient.connect(RunFolder(tmp_path), lambda _: None)

    asyncio.run(asyncio.wait_for(work(), 10))
    os.close(lock)


def test_an_engine_that_is_gone_is_said_at_once(tmp_path: Path) -> None:
    """No lock on the folder: nobody lives there. What it said last is the reason."""
    folder = RunFolder(tmp_path)

    async def reason() -> str:
        with pytest.raises(EngineDeadError) as caught:
            await EngineClient.connect(folder, lambda _: None)
        return caught.value.message

    assert asyncio.run(asyncio.wait_for(reason(), 2)) == "the engine was killed"
    folder.write_last_words("engine_dead", "worker 0 exited with code 3")
    assert asyncio.run(asyncio.wait_for(reason(), 2)) == "worker 0 exited with code 3"


def test_the_second_asker_takes_the_prefix_from_the_cache(engine: EngineThread) -> None:
    async def cached(client: EngineClient, salt: str) -> int:
        async for batch in client.submit(list(range(41)), Sampling(max_tokens=2), cache_salt=salt):
            if batch.finish is not None:
                return batch.finish.cached_tokens
        return -1

    async def work() -> None:
        async with connected(engine) as client:
            assert [await cached(client, "a"), await cached(client, "a"), await cached(client, "b")] == [0, 40, 0]

    asyncio.run(work())


def test_a_worker_death_ends_every_stream(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            engine.workers.paused = True
            streams = [client.submit([1], Sampling(max_tokens=5)) for _ in range(3)]
            engine.until(lambda: bool(engine.scheduler.running), "a request running")
            engine.workers.death = EngineDeadError("worker 0 was killed by SIGKILL")
            engine.until(lambda: engine.error is not None, "the loop noticed")
            engine.front_ends.broadcast(Dying(code="engine_dead", message="worker 0 was killed by SIGKILL"))
            for stream in streams:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await tokens(stream)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                client.submit([1], Sampling(max_tokens=5))

    asyncio.run(work())


def test_stats_are_published_and_answered(engine: EngineThread) -> None:
    async def work() -> None:
        async with connected(engine) as client:
            await tokens(client.submit([1] * 10, Sampling(max_tokens=5)))
            stats = await client.stats()
            assert (stats.output_tokens, stats.prompt_tokens, stats.finished) == (5, 10, 1)
            assert stats.kv.free + stats.kv.in_use + stats.kv.cached == stats.kv.total == 64
            await asyncio.sleep(0.6)  # more than twice the interval
            assert client.latest_stats is not None
            assert client.latest_stats.finished == 1

    asyncio.run(work())


def raw_front_end(engine: EngineThread, version: int = 1) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(engine.folder.requests)
    socket.send(encode(Hello(version=version, front_end="test")))
    assert socket.poll(5000)
    return socket


def answer(socket: zmq.Socket[bytes]) -> EngineMessage:
    assert socket.poll(5000)
    decoder: Decoder[EngineMessage] = Decoder(EngineMessage)
    return decoder.decode(socket.recv())


def test_another_protocol_version_is_told_so(engine: EngineThread) -> None:
    socket = raw_front_end(engine, version=999)
    said = answer(socket)
    assert isinstance(said, Dying)
    assert "protocol 999" in said.message
    socket.close(linger=0)


@pytest.mark.parametrize("garbage", [b"", b"\x93garbage", b"\x81\xa4type\xa6Nobody", b"\x00" * 1000])
def test_garbage_drops_its_sender_and_nothing_else(engine: EngineThread, garbage: bytes) -> None:
    socket = raw_front_end(engine)
    answer(socket)  # Ready
    socket.send(garbage)
    said = answer(socket)
    assert isinstance(said, Dying)
    assert said.code == ProtocolError.code
    socket.close(linger=0)

    async def work() -> None:
        async with connected(engine) as client:
            assert len(await tokens(client.submit([1], Sampling(max_tokens=3)))) == 3

    asyncio.run(work())


@pytest.mark.parametrize("answers", [True, False], ids=["a worker that answers", "one that does not"])
def test_an_engine_that_ends_takes_in_the_steps_of_rows_that_have_ended(tmp_path: Path, *, answers: bool) -> None:
    with fake_engine(tmp_path) as engine:
        engine.workers.paused = True

        async def leave_with_a_step_in_flight() -> None:
            async with connected(engine) as client:
                client.submit([1] * 9, Sampling(max_tokens=5))
                engine.until(lambda: engine.scheduler.in_flight > 0, "a step in flight")

        asyncio.run(leave_with_a_step_in_flight())
        engine.until(lambda: not engine.scheduler.running, "the end of its request")
        assert engine.scheduler.kv.stats().in_use > 0
        engine.workers.paused = not answers
        engine.stop()
        assert (engine.scheduler.kv.stats().in_use == 0) == answers
        engine.workers.paused = False
        while engine.scheduler.in_flight:
            for result in engine.workers.receive():
                engine.scheduler.collect(result)


def test_a_number_used_twice_is_refused(engine: EngineThread) -> None:
    socket = raw_front_end(engine)
    answer(socket)  # Ready
    engine.workers.paused = True
    request = Request(tag=7, prompt=i32([1]), sampling=Sampling(max_tokens=3))
    socket.send(encode(Submit(requests=[request, request])))
    events = answer(socket)
    assert isinstance(events, StepEvents)
    assert [(finish.tag, finish.code) for finish in events.finished] == [(7, ProtocolError.code)]
    engine.workers.paused = False
    socket.close(linger=1000)


def test_a_lost_token_fails_the_request_instead_of_going_unseen() -> None:
    async def work() -> None:
        stream = TokenStream(client=None, tag=1)  # type: ignore[arg-type]
        stream.push(5, 0)
        stream.push(6, 2)
        with pytest.raises(ProtocolError, match="token 1 of request 1 is lost"):
            await tokens(stream)

    asyncio.run(work())
