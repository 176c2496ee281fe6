"""Following real engine loops: joined late, killed, replaced, silent, of another version; and what the shell gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from corellm.comms import sockets
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch
from corellm.comms.stats_messages import SNAPSHOTS, TREES, Snapshot, Tree, frame
from corellm.config import EngineOptions
from corellm.errors import EngineDeadError, ProtocolError
from corellm.running_engines import RunningEngine
from corellm_tui import top_live, top_once
from corellm_tui.top_live import LiveFeed
from corellm_tui.top_once import picture, published, text_lines
from corellm_tui.top_recording import Event, Recorder, read_recording
from corellm_tui.top_state import Link
from tests.support.fake_engine import fake_engine
from tests.support.top_material import INFO, snapshot


def engine_in(folder: Path) -> RunningEngine:
    folder.mkdir(exist_ok=True)
    return RunningEngine(RunFolder(folder), INFO, Launch(EngineOptions(), "/model"))


class Seen:
    """What a feed hands on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.links: list[Link] = []
        self.engines: list[RunningEngine] = []

    def feed(self, engine: RunningEngine | None, found: list[RunningEngine], *, trees: bool = False) -> LiveFeed:
        return LiveFeed(
            engine,
            on_event=self.events.append,
            on_engine=self.engines.append,
            on_link=self.links.append,
            trees=trees,
            find=lambda: found,
        )

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"10 s have passed without {what}"
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(feed: LiveFeed) -> AsyncIterator[None]:
    task = asyncio.create_task(feed.run())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_killed_engine_is_told_and_the_one_in_its_place_is_joined(tmp_path: Path) -> None:
    first, second = engine_in(tmp_path / "a"), engine_in(tmp_path / "b")
    seen, found = Seen(), [first]

    async def work() -> None:
        async with following(seen.feed(None, found)):
            with fake_engine(first.folder.path):
                await seen.until(lambda: bool(seen.events), "a snapshot")
                assert seen.links[-1].is_live
            await seen.until(lambda: not seen.links[-1].is_live, "news of its end")
            assert "engine demo was killed; waiting for another" in seen.links[-1].message
            seen.events.clear()
            with fake_engine(second.folder.path):
                found.append(second)
                await seen.until(lambda: any(isinstance(e, Snapshot) for e in seen.events), "the second's snapshots")
                assert seen.engines == [first, second]
                assert seen.links[-1].is_live

    asyncio.run(work())


def test_trees_come_while_they_are_wanted(tmp_path: Path) -> None:
    engine, seen = engine_in(tmp_path / "a"), Seen()

    async def work() -> None:
        feed = seen.feed(engine, [engine])
        async with following(feed):
            await seen.until(lambda: len(seen.events) >= 3, "snapshots")
            assert not any(isinstance(event, Tree) for event in seen.events)
            feed.want_trees(True)
            await seen.until(lambda: any(isinstance(event, Tree) for event in seen.events), "a tree")

    with fake_engine(engine.folder.path):
        asyncio.run(work())


@contextlib.contextmanager
def a_publisher(folder: RunFolder) -> object:
    """The sending end alone, held by an engine that is alive by its lock."""
    import os

    lock = folder.lock()
    socket = sockets.watch_publisher(zmq.Context.instance(), folder.watch)
    try:
        yield socket
    finally:
        socket.close(linger=0)
        os.close(lock)


def test_another_version_and_silence_are_said_and_pass_when_they_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_live, "LOOK_S", 0.05)
    monkeypatch.setattr(top_live, "STALE_S", 0.1)
    engine, seen = engine_in(tmp_path / "a"), Seen()
    right = frame(SNAPSHOTS, snapshot(1))
    wrong = right[:1] + bytes([77]) + right[2:]

    async def work() -> None:
        with a_publisher(engine.folder) as publisher:
            async with following(seen.feed(engine, [engine])):
                await asyncio.to_thread(publisher.recv)
                publisher.send(wrong)
                await seen.until(lambda: "stats protocol 77" in seen.links[-1].message, "the version's refusal")
                publisher.send(right)
                await seen.until(lambda: seen.links[-1].is_live, "the right one")
                await seen.until(lambda: "stale" in seen.links[-1].message, "its silence")
            assert [event for event in seen.events if isinstance(event, Snapshot)] == [snapshot(1)]
            with pytest.raises(ProtocolError, match="use the same CoreLLM version"):
                await first_of(engine, publisher, wrong)

    asyncio.run(work())


async def first_of(engine: RunningEngine, publisher: zmq.Socket[bytes], raw: bytes) -> None:
    async def send() -> None:
        while True:  # what is sent before someone has subscribed is lost
            publisher.send(raw)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(send())
    try:
        async with contextlib.aclosing(published(engine, SNAPSHOTS)) as messages:
            async for _ in messages:
                break
    finally:
        task.cancel()


def test_one_picture_has_the_engines_figures(tmp_path: Path) -> None:
    engine = engine_in(tmp_path / "a")
    with fake_engine(engine.folder.path, blocks=48):
        text = "\n".join(text_lines(asyncio.run(picture(engine)), 100))
    assert "48 free" in text
    assert "waiting for the engine" not in text
    assert "engine " in text  # this process's own facts


def test_json_lines_and_recordings_end_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_once, "LOOK_S", 0.05)
    engine = engine_in(tmp_path / "a")
    lines: list[bytes] = []
    kinds: set[str] = set()
    recorder = Recorder(tmp_path / "run.stats", INFO)
    add = recorder.add
    monkeypatch.setattr(recorder, "add", lambda now, event: kinds.add(type(event).__name__) or add(now, event))

    async def work() -> None:
        with fake_engine(engine.folder.path):
            tasks = [
                asyncio.create_task(top_once.stream_json(engine, lines.append)),
                asyncio.create_task(top_once.record(engine, recorder)),
            ]
            await Seen().until(lambda: len(lines) >= 3 and len(kinds) == 3, "three lines, and every kind recorded")
        for task in tasks:
            with pytest.raises(EngineDeadError, match="engine demo was killed"):
                await task

    asyncio.run(work())
    recorder.close()
    assert [json.loads(line)["type"] for line in lines] == ["Snapshot"] * len(lines)
    recording = read_recording(tmp_path / "run.stats")
    played = {type(event).__name__ for event in recording.between(-1, 99)}
    assert played == kinds == {"Snapshot", "Tree", "Hardware"}
    recording.close()


def test_topics_differ_in_their_first_byte() -> None:
    assert len({SNAPSHOTS, TREES}) == len({topic[:1] for topic in (SNAPSHOTS, TREES)}) == 2
