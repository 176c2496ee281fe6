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
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from corellm.config import EngineOptions
from corellm.errors import EngineDeadError, InvalidRequestError
from corellm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from corellm.comms.messages import EngineInfo, Progress, Stats
    from corellm.found_model import FoundModel
    from corellm.text_engine import Completion, Delta, TextEngine

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams]
T = TypeVar("T")

_AHEAD = 4  # requests handed to the engine for each slot that it has: enough to keep it full, few enough to hold


class EngineNode:
    """An engine of one's own. Options are those of `EngineOptions`; it starts with `start`, `with` or `async with`.

    Raises `OptionError` for an option out of range; `start` raises the typed error of whatever stands in the way.
    After `close`, or when the engine has died, every method raises `EngineDeadError`.
    """

    def __init__(
        self, model: str | None = None, *, on_progress: Callable[[Progress], None] | None = None, **options: Any
    ) -> None:
        self._options = EngineOptions.from_env(model=model, **options)
        self._on_progress = on_progress or (lambda _: None)
        self._lock = threading.Lock()
        self._life: _Life | None = None

    # ---- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the engine and wait until it is ready."""
        from corellm.found_model import find  # tokenizers, zmq: not before they are needed

        if self._life is None:
            model = find(self._options, self._on_progress)
            with self._lock:
                if self._life is None:
                    self._life = _Life(model, self._on_progress)
        try:
            self._life.engine.result()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop the engine. Idempotent; open requests raise `EngineDeadError`."""
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            life.end()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    @property
    def info(self) -> EngineInfo:
        """What runs: model, dtype, KV blocks, limits."""
        return self._running().info

    # ---- generation -----------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params | None = None) -> list[Completion]:
        """Complete plain prompts (text or token ids); results in input order. The first error is raised, the rest ends.

        `params` is one for all or one for each prompt.
        """
        return self._run(self._all(self._encoded(prompts), params))

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], params: Params | None = None) -> list[Completion]:
        """`generate` for asyncio."""
        return await self._await(self._all(self._encoded(prompts), params))

    def chat(self, conversations: Sequence[Any], params: Params | None = None, **template: Any) -> list[Completion]:
        """Complete conversations: one list of messages, or a list of such lists."""
        return self._run(self._all(self._encoded_chats(conversations, template), params))

    async def achat(
        self, conversations: Sequence[Any], params: Params | None = None, **template: Any
    ) -> list[Completion]:
        """`chat` for asyncio."""
        return await self._await(self._all(self._encoded_chats(conversations, template), params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt in pieces; the last has `end`. Closing the iterator aborts the request."""
        deltas = self._running().stream(self._running().encode_prompt(prompt), params or SamplingParams())
        try:
            while (delta := self._run(_next(deltas))) is not None:
                yield delta
        finally:
            with contextlib.suppress(EngineDeadError):
                self._run(deltas.aclose())

    async def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        deltas = self._running().stream(self._running().encode_prompt(prompt), params or SamplingParams())
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

    def _encoded(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        engine = self._running()
        if isinstance(prompts, str):
            return [engine.encode_prompt(prompts)]
        if prompts and isinstance(prompts[0], int):
            return [engine.encode_prompt(cast("Sequence[int]", prompts))]
        return [engine.encode_prompt(prompt) for prompt in cast("Sequence[Prompt]", prompts)]

    def _encoded_chats(self, conversations: Sequence[Any], template: dict[str, Any]) -> list[list[int]]:
        engine = self._running()
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        return [engine.encode_chat(messages, **template) for messages in conversations]

    async def _all(self, prompts: list[list[int]], params: Params | None) -> list[Completion]:
        engine = self._running()
        each = _params_for(len(prompts), params)
        gate = asyncio.Semaphore(_AHEAD * engine.info.max_seqs)

        async def one(prompt: list[int], sampling: SamplingParams) -> Completion:
            async with gate:
                return await engine.complete(prompt, sampling)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt, sampling)) for prompt, sampling in zip(prompts, each, strict=True)]
        return [task.result() for task in tasks]

    def _running(self) -> TextEngine:
        life = self._life
        if life is None or not life.engine.done():
            raise EngineDeadError(_NOT_RUNNING)
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


class _Life:
    """One engine from start to end, on an event loop in a thread of its own. `engine` resolves when it is ready."""

    def __init__(self, model: FoundModel, report: Callable[[Progress], None]) -> None:
        self.engine: Future[TextEngine] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(model, report), name="corellm-engine-node", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """Stop the engine and wait until it is gone, also while it still starts."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self, model: FoundModel, report: Callable[[Progress], None]) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live(model, report))

    async def _live(self, model: FoundModel, report: Callable[[Progress], None]) -> None:
        from corellm.text_engine import TextEngine

        stopping = asyncio.create_task(self._stop.wait())
        starting = asyncio.create_task(TextEngine.start(model, report))
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        try:
            engine = await starting
        except BaseException as error:  # noqa: BLE001  whoever waits for the engine gets it
            cancelled = isinstance(error, asyncio.CancelledError)
            self.engine.set_exception(EngineDeadError("the engine was closed while it started") if cancelled else error)
            await stopping
            return
        self.engine.set_result(engine)
        await stopping
        await engine.close()  # whoever waits for a request learns that it is over
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=1.0)


_NOT_RUNNING = "the engine is not running; use `with EngineNode(…) as engine:` or call start()"


async def _next(deltas: AsyncIterator[Delta]) -> Delta | None:
    return await anext(deltas, None)


def _single(error: BaseException) -> BaseException:
    """The first cause in a task group's error: callers catch typed errors, not groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _params_for(count: int, params: Params | None) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"params has {len(params)} entries for {count} prompts; give one, or one for each", "params"
        )
    return params
