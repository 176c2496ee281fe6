"""`EngineNode`: the engine in Python, without a server.

    with EngineNode("demo") as engine:
        for completion in engine.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(completion.text)

One engine process runs for each node. The node's own event loop runs in a thread, so that every method works from plain
code and, in its `a…` form, from any asyncio loop. Any number of threads may share a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from corellm.config import EngineOptions
from corellm.errors import EngineDeadError, OptionError
from corellm.node_inputs import (
    Params,
    Prompt,
    Prompts,
    check_text,
    params_for,
    plain_conversations,
    plain_prompt,
    plain_prompts,
)
from corellm.node_life import Life
from corellm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from corellm.comms.messages import EngineInfo, Progress, Stats
    from corellm.found_model import FoundModel
    from corellm.text_engine import Completion, Delta, TextEngine

Message = Mapping[str, Any]
Conversations = Iterable[Message] | Iterable[Iterable[Message]]
Request = tuple[Sequence[int], SamplingParams]
T = TypeVar("T")

_AHEAD = 4  # requests handed to the engine for each slot that it has: enough to keep it full, few enough to hold


class EngineNode:
    """An engine of one's own. Options are those of `EngineOptions`; it starts with `start`, `with` or `async with`.

    Raises `OptionError` for an option out of range; `start` raises the typed error of whatever stands in the way.
    After `close` every method raises `EngineDeadError`, and once the engine has died, what it died of. `start` then
    starts another.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        **options: Any,
    ) -> None:
        if on_progress is not None and not callable(on_progress):
            raise OptionError(f"on_progress is {on_progress!r}; it must be a function of one Progress, or None")
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        self._options = EngineOptions.from_env(model=name, **options)
        self._on_progress = on_progress or (lambda _: None)
        self._lock = threading.Lock()
        self._life: Life | None = None

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the engine and wait until it is ready; nothing, if one runs."""
        life = self._alive() or self._begin(self._find())
        try:
            life.engine.result()
        except BaseException:
            self._end(life)
            raise
        return self

    def close(self) -> None:
        """Stop the engine. Idempotent; open requests raise `EngineDeadError`."""
        life = self._life
        if life is not None:
            self._end(life)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        # A thread cannot be cancelled. So none is left to start an engine that nobody waits for any more.
        life = await asyncio.to_thread(self._alive) or self._begin(await asyncio.to_thread(self._find))
        started = asyncio.wrap_future(life.engine)
        started.add_done_callback(lambda future: future.exception())  # no complaint if nobody waits for it any more
        try:
            await asyncio.shield(started)
        except BaseException:
            await asyncio.to_thread(self._end, life)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def info(self) -> EngineInfo:
        """What runs: model, dtype, KV blocks, limits."""
        return self._running().info

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompts, params: Params | None = None) -> list[Completion]:
        """Complete plain prompts (text or token ids); results in input order. The first error is raised, the rest ends.

        `params` is one for all or one for each prompt.
        """
        return self._run(self._all(self._requests(prompts, params)))

    async def agenerate(self, prompts: Prompts, params: Params | None = None) -> list[Completion]:
        """`generate` for asyncio."""
        return await self._await(self._all(self._requests(prompts, params)))

    def chat(self, conversations: Conversations, params: Params | None = None, **template: Any) -> list[Completion]:
        """Complete conversations: one list of messages, or a list of such lists."""
        return self._run(self._all(self._chat_requests(conversations, params, template)))

    async def achat(
        self, conversations: Conversations, params: Params | None = None, **template: Any
    ) -> list[Completion]:
        """`chat` for asyncio."""
        return await self._await(self._all(self._chat_requests(conversations, params, template)))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt in pieces; the last has `end`. Closing the iterator aborts the request."""
        deltas = self._deltas(prompt, params)
        try:
            while (delta := self._run(_next(deltas))) is not None:
                yield delta
        finally:
            with contextlib.suppress(EngineDeadError):
                self._run(deltas.aclose())

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        deltas = self._deltas(prompt, params)
        try:
            while (delta := await self._await(_next(deltas))) is not None:
                yield delta
        finally:
            with contextlib.suppress(EngineDeadError):
                await self._await(deltas.aclose())

    def abort(self) -> None:
        """Abort every request that is open, in any thread: whoever waits for one gets `RequestAbortedError`."""
        engine = self._running()

        async def abort_all() -> None:
            engine.abort_all()

        self._run(abort_all())

    def stats(self) -> Stats:
        """The engine's figures now."""
        return self._run(self._running().stats())

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _find(self) -> FoundModel:
        from corellm.found_model import find  # tokenizers, zmq: not before they are needed

        return find(self._options, self._on_progress)

    def _alive(self) -> Life | None:
        """The life there is; one whose engine has died is ended, so that another may begin."""
        life = self._life
        if life is None or life.death is None:
            return life
        self._end(life)
        return None

    def _begin(self, model: FoundModel) -> Life:
        with self._lock:
            if self._life is None:
                self._life = Life(model, self._on_progress)
            return self._life

    def _end(self, life: Life) -> None:
        with self._lock:
            is_ours = self._life is life  # else another thread has ended it
            if is_ours:
                self._life = None
        if is_ours:
            life.end()

    def _requests(self, prompts: object, params: object) -> list[Request]:
        engine = self._running()
        plain = plain_prompts(prompts)
        each = params_for(len(plain), params)  # before the encoding, which takes its time
        return [(engine.encode_prompt(prompt), sampling) for prompt, sampling in zip(plain, each, strict=True)]

    def _chat_requests(self, conversations: object, params: object, template: dict[str, Any]) -> list[Request]:
        engine = self._running()
        plain = plain_conversations(conversations)
        for name, value in template.items():
            check_text(name, value)
        each = params_for(len(plain), params)
        return [
            (engine.encode_chat(messages, **template), sampling) for messages, sampling in zip(plain, each, strict=True)
        ]

    def _deltas(self, prompt: object, params: object) -> AsyncGenerator[Delta, None]:
        engine = self._running()
        plain = plain_prompt(prompt)
        (sampling,) = params_for(1, params)
        return engine.stream(engine.encode_prompt(plain), sampling)

    async def _all(self, requests: list[Request]) -> list[Completion]:
        engine = self._running()
        gate = asyncio.Semaphore(_AHEAD * engine.info.max_seqs)

        async def one(prompt: Sequence[int], sampling: SamplingParams) -> Completion:
            async with gate:
                return await engine.complete(prompt, sampling)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt, sampling)) for prompt, sampling in requests]
        return [task.result() for task in tasks]

    def _running(self) -> TextEngine:
        life = self._life
        if life is None or not life.engine.done():
            raise EngineDeadError(_NOT_RUNNING)
        if life.death is not None:
            raise life.death
        return life.engine.result()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:  # so that a life that ends knows of every call made in it
            if self._life is not None:
                return self._life.submit(work)
        work.close()
        raise EngineDeadError(_NOT_RUNNING)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseExceptionGroup as error:
            raise _single(error) from None
        except CancelledError:
            raise EngineDeadError(_NOT_RUNNING) from None
        finally:
            future.cancel()  # nothing once it is done; on Ctrl-C, the request must not run on unseen

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wrap_future(self._submit(work))
        except BaseExceptionGroup as error:
            raise _single(error) from None


_NOT_RUNNING = "the engine is not running; use `with EngineNode(…) as engine:` or call start()"


async def _next(deltas: AsyncIterator[Delta]) -> Delta | None:
    return await anext(deltas, None)


def _single(error: BaseException) -> BaseException:
    """The first cause in a task group's error: callers catch typed errors, not groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
