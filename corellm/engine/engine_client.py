"""A front end's side of the engine: start or join one, submit token ids, get tokens back. No text, no torch.

Runs on one asyncio loop. Every open request ends in exactly one of: its stream is exhausted, or it raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq.asyncio

from corellm.comms import run_folder, sockets
from corellm.comms.children import Child, spawn, stop_all
from corellm.comms.codec import Decoder, encode, i32, i64
from corellm.comms.messages import (
    I32,
    PROTOCOL_VERSION,
    Abort,
    ClientMessage,
    Dying,
    EngineInfo,
    EngineMessage,
    Goodbye,
    Hello,
    Ping,
    Progress,
    QueryStats,
    Ready,
    Request,
    Sampling,
    StartupFailed,
    Stats,
    StatsMessage,
    StepEvents,
    Submit,
)
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, check_name, write_launch
from corellm.comms.silence import Silence
from corellm.engine.token_stream import TokenStream
from corellm.errors import (
    CoreLLMError,
    EngineDeadError,
    EngineTimeoutError,
    InvalidRequestError,
    ProtocolError,
    RequestAbortedError,
    from_code,
)
from corellm.sampling_params import JsonConstraint

PING_S = 1.0
STARTING_SILENCE_S = 60.0  # reading the headers of a large checkpoint from a slow disk takes its time
SILENCE_S = 15.0  # the engine publishes stats several times a second; none for this long: it is stopped or hung
STOP_S = 15.0
LOCK_S = 0.5  # between two looks at whether an engine that is not our child still runs
GOODBYE_MS = 500


class EngineClient:
    """One connection to one engine. Make it with `launch` or `connect`, end it with `close`.

    Errors: `StartupError` and its kin while it starts; `EngineDeadError` from every open stream when the engine dies,
    hangs or is stopped, and from `submit` afterwards.
    """

    def __init__(self, folder: RunFolder, engine: Child | None) -> None:
        self.latest_stats: Stats | None = None
        self.folder = folder
        self._engine = engine
        self._context = zmq.asyncio.Context()
        self._socket = sockets.dealer(self._context, folder.requests)
        self._stats_socket = sockets.subscriber(self._context, folder.stats)
        self._streams: dict[int, TokenStream] = {}
        self._tags = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._dead: CoreLLMError | None = None
        self._end: asyncio.Future[CoreLLMError] = asyncio.get_running_loop().create_future()
        self._silence = Silence()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._report: Callable[[Progress], None] = lambda _: None
        self._stats_waiters: list[asyncio.Future[Stats]] = []

    # ---- life -----------------------------------------------------------------------------------------------------

    @classmethod
    async def launch(cls, launch: Launch, report: Callable[[Progress], None]) -> EngineClient:
        """Start an engine of our own, which ends with us, and wait until it is ready."""
        await asyncio.to_thread(check_name, launch.options.name)
        folder = run_folder.create()
        engine = None
        try:
            write_launch(folder, launch)
            # The child gets a parent-death signal from this very thread: the loop's, which lives until `close`.
            engine = spawn("engine", "corellm.engine", [str(folder.path)])
            client = cls(folder, engine)
        except BaseException:
            if engine is not None:
                stop_all([engine], STOP_S)
            folder.remove()
            raise
        asyncio.get_running_loop().add_reader(engine.pidfd, client._on_engine_exit)
        await client._open(report)
        return client

    @classmethod
    async def connect(cls, folder: RunFolder, report: Callable[[Progress], None]) -> EngineClient:
        """Join a running engine, which outlives us."""
        client = cls(folder, None)
        await client._open(report)
        return client

    async def _open(self, report: Callable[[Progress], None]) -> None:
        self._report = report
        try:
            self._post(Hello(version=PROTOCOL_VERSION, front_end=f"pid {os.getpid()}"))
            work = [self._read, self._read_stats, self._keep_alive]
            if self._engine is None:
                work.append(self._watch_lock)
            self._tasks = [asyncio.create_task(part()) for part in work]
            for task in self._tasks:
                task.add_done_callback(self._on_task_end)
            await self.ready()
        except asyncio.CancelledError:
            # Whoever gives up a start does not wait for its imports and weights: it holds nothing worth an orderly end.
            await self.close(patience_s=0.0)
            raise
        except BaseException:
            await self.close()
            raise

    async def ready(self) -> EngineInfo:
        """What the engine is, once it is ready. Raises what kept it from becoming so."""
        return await asyncio.shield(self._ready)

    @property
    def death(self) -> CoreLLMError | None:
        """What ended the connection; None while it stands. Threads may ask."""
        return self._dead

    async def died(self) -> CoreLLMError:
        """Wait for the end of the connection, whatever ends it, and return the reason."""
        return await asyncio.shield(self._end)

    async def close(self, patience_s: float = STOP_S) -> None:
        """End the connection and, if we launched it, the engine, which has `patience_s` seconds before it is killed.

        Open streams raise `EngineDeadError`.
        """
        self._die(EngineDeadError("the connection to the engine was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._post(Goodbye())
        linger = GOODBYE_MS if self._engine is None else 0
        if self._engine is not None:
            asyncio.get_running_loop().remove_reader(self._engine.pidfd)
            await asyncio.to_thread(stop_all, [self._engine], patience_s)
            self._engine = None
            self.folder.remove()
        self._socket.close(linger=linger)
        self._stats_socket.close(linger=0)
        self._context.term()

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        cache_salt: str = "",
        constraint: JsonConstraint | None = None,
    ) -> TokenStream:
        """Queue one prompt of token ids.

        Raises `InvalidRequestError` for what is not one, `EngineDeadError` when there is no engine any more.
        """
        if self._dead is not None:
            raise self._dead
        stream = TokenStream(self, next(self._tags))
        request = Request(
            tag=stream.tag,
            prompt=_token_ids(prompt),
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
            constraint=constraint,
        )
        try:
            self._post(Submit(requests=[request]))
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "cache_salt holds half of a surrogate pair; send valid Unicode", "cache_salt"
            ) from None
        self._streams[stream.tag] = stream
        return stream

    def abort(self, stream: TokenStream) -> None:
        """Give a request up; its stream raises `RequestAbortedError` to whoever still reads it."""
        if stream.tag in self._streams:
            self.ask_to_end(stream, satisfied=False)
            del self._streams[stream.tag]
            stream.fail(RequestAbortedError("the request was aborted"))

    def abort_all(self) -> None:
        for stream in list(self._streams.values()):
            self.abort(stream)

    def ask_to_end(self, stream: TokenStream, *, satisfied: bool) -> None:
        """Tell the engine; the stream stays open for the terminal event."""
        if stream.tag in self._streams and self._dead is None:
            self._post(Abort(tags=i64([stream.tag]), satisfied=satisfied))

    async def stats(self) -> Stats:
        """The engine's figures now."""
        if self._dead is not None:
            raise self._dead
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._post(QueryStats())
        return await waiter

    # ---- the wire -------------------------------------------------------------------------------------------------

    def _post(self, message: ClientMessage) -> None:
        # Sent at once unless the engine has stopped reading; then the watch for its silence ends the wait.
        sent = asyncio.ensure_future(self._socket.send(encode(message)))
        sent.add_done_callback(_swallow)

    async def _read(self) -> None:
        decoder: Decoder[EngineMessage] = Decoder(EngineMessage)
        while True:
            frame = await self._socket.recv()
            try:
                self._on_message(decoder.decode(frame))
            except ProtocolError as error:
                self._die(error)
                return

    def _on_message(self, message: EngineMessage) -> None:
        self._silence.heard()
        match message:
            case StepEvents():
                self._on_events(message)
            case Progress():
                self._report(message)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message.info)
            case Stats():
                for waiter in self._stats_waiters:
                    if not waiter.done():
                        waiter.set_result(message)
                self._stats_waiters.clear()
            case StartupFailed() | Dying():
                self._die(from_code(message.code, message.message))

    def _on_events(self, events: StepEvents) -> None:
        streams = self._streams
        tags = events.tags.tolist()
        for logprobs in events.logprobs:
            if (stream := streams.get(tags[logprobs.row])) is not None:
                stream.push_logprobs(logprobs)
        for tag, found in events.prompt_logprobs:
            if (stream := streams.get(tag)) is not None:
                stream.push_prompt_logprobs(found)
        for tag, token, index in zip(tags, events.tokens.tolist(), events.indices.tolist(), strict=True):
            if (stream := streams.get(tag)) is not None:  # None: aborted here, not yet there
                stream.push(token, index)
        for finish in events.finished:
            if (stream := streams.pop(finish.tag, None)) is not None:
                stream.finish(finish)

    async def _read_stats(self) -> None:
        decoder: Decoder[StatsMessage] = Decoder(StatsMessage)
        while True:
            frame = await self._stats_socket.recv()
            self._silence.heard()
            with contextlib.suppress(ProtocolError):
                self.latest_stats = decoder.decode(frame)

    async def _keep_alive(self) -> None:
        while self._dead is None:
            await asyncio.sleep(PING_S)
            self._post(Ping())
            starts = self._engine is not None and not self._ready.done()
            limit = STARTING_SILENCE_S if starts else SILENCE_S
            if self._silence.seconds() > limit:
                self._die(EngineTimeoutError(f"the engine has been silent for {limit:.0f} s; it is stopped or hung"))

    async def _watch_lock(self) -> None:
        """Notice the death of an engine that is not our child: the kernel gives its lock back."""
        while self._dead is None:
            if not self.folder.is_alive():
                words = self.folder.last_words()
                self._die(from_code(*words) if words is not None else EngineDeadError("the engine was killed"))
            await asyncio.sleep(LOCK_S)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A task of ours that fails, such as in a caller's `report`, must not leave others waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(EngineDeadError(f"the connection to the engine failed: {type(error).__name__}: {error}"))

    def _on_engine_exit(self) -> None:
        engine = self._engine
        if engine is None:
            return
        asyncio.get_running_loop().remove_reader(engine.pidfd)
        words = self.folder.last_words()
        if words is not None:
            self._die(from_code(*words))
        else:
            self._die(EngineDeadError(f"the engine {engine.describe_exit()}"))

    def _die(self, error: CoreLLMError) -> None:
        """The first reason stays; everyone who waits gets it."""
        if self._dead is not None:
            return
        self._dead = error
        self._end.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it is raised where it is awaited; no complaint if it never is
        for stream in self._streams.values():
            stream.fail(error)
        self._streams.clear()
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_exception(error)
        self._stats_waiters.clear()


def _token_ids(prompt: Sequence[int]) -> I32:
    """Raises `InvalidRequestError` for anything but integers that fit 32 bits."""
    found = np.asarray(prompt)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise InvalidRequestError("the prompt must be a list of integer token ids", "prompt")
    if found.size and (found.min() < -(2**31) or found.max() >= 2**31):
        raise InvalidRequestError(
            "the prompt holds an id that does not fit 32 bits; send ids of the vocabulary", "prompt"
        )
    return i32(found)


def _swallow(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()  # a socket that closes under a send: the end is told by other ways
