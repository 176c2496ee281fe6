"""The grammars of constrained sequences, worked out beside the engine loop so that it never waits for one.

    loop thread        open, advance ──────────────▶ verdicts, by `collect`
                          │         │                      ▲
    compile threads       │  a new schema is tried out ────┤  seconds at the worst, hostile ones
    mask thread           └─ all masks asked for so far ───┘  tens of microseconds each

The threads hold the interpreter's lock for moments only. A verdict wakes the loop through an eventfd.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, PriorityQueue, SimpleQueue

import zmq
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from corellm.comms.messages import I32
from corellm.device import cpu_count
from corellm.engine.grammar import compile_grammar, next_masks, refused
from corellm.engine.schema_check import check_schema
from corellm.engine.sequence import Order, Sequence
from corellm.errors import (
    CheckpointError,
    CoreLLMError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from corellm.sampling_params import JsonConstraint

COMPILE_THREADS = 2
COMPILE_S = 10.0  # from a request's arrival, those before it included
BATCH_COMPILE_S = 600.0  # of a batch, whose every row may bring a schema of its own, and where nobody waits
MASKS_AT_ONCE = 256
MASK_THREADS = 8
KEPT = 64  # compiled grammars, and refused schemas, remembered for whoever sends them again


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a constrained sequence's last token: what may follow it, that its answer is complete, or what went wrong."""

    sequence: Sequence
    mask: I32 | None = None  # None and no error: complete
    error: CoreLLMError | None = None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar at its beginning."""

    matcher: LLMatcher
    mask: I32


@dataclass(slots=True)
class _Waiting:
    deadline: float
    sequences: list[Sequence]


class Constraints:
    """Used by the loop's thread alone. `load` gives the vocabulary, `vocab` ids wide, and is called in a thread."""

    def __init__(self, load: Callable[[], LLTokenizer], vocab: int) -> None:
        self._vocab = vocab
        self._vocabulary: Future[LLTokenizer] = Future()
        self._known: OrderedDict[JsonConstraint, _Compiled | CoreLLMError] = OrderedDict()
        self._waiting: dict[JsonConstraint, _Waiting] = {}
        self._verdicts: list[Verdict] = []  # those that need no thread
        # None ends the thread that takes it. Schemas go by priority class and arrival, as their sequences do.
        self._schemas: PriorityQueue[tuple[Order, JsonConstraint | None]] = PriorityQueue()
        self._tokens: SimpleQueue[tuple[Sequence, int] | None] = SimpleQueue()
        self._done: deque[Verdict | tuple[JsonConstraint, _Compiled | CoreLLMError]] = deque()
        self._failure: BaseException | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._executor = LLExecutor(max(1, min(MASK_THREADS, cpu_count() // 2)))
        work = [lambda: self._load(load), self._follow_tokens, *[self._compile_schemas] * COMPILE_THREADS]
        for part in work:
            threading.Thread(target=self._guarded, args=(part,), name="constraints", daemon=True).start()

    def watch(self, poller: zmq.Poller) -> None:
        """Have the loop woken by a verdict."""
        poller.register(self._wake, zmq.POLLIN)

    def open(self, sequence: Sequence) -> None:
        """A constrained sequence has come: a verdict on its beginning follows."""
        constraint = _of(sequence)
        if (known := self._known.get(constraint)) is not None:
            self._known.move_to_end(constraint)
            self._begin(sequence, known)
        elif (waiting := self._waiting.get(constraint)) is not None:
            waiting.sequences.append(sequence)
        else:
            patience = BATCH_COMPILE_S if sequence.order[0] else COMPILE_S
            self._waiting[constraint] = _Waiting(time.monotonic() + patience, [sequence])
            self._schemas.put((sequence.order, constraint))

    def advance(self, sequence: Sequence, token: int) -> None:
        """Its next token is known: a verdict follows."""
        self._tokens.put((sequence, token))

    def collect(self) -> Iterator[Verdict]:
        """The verdicts since the last time, also of sequences that have ended since.

        Raises `EngineDeadError` when a thread has failed.
        """
        if self._failure is not None:
            raise EngineDeadError(f"a thread of the engine failed: {self._failure!r}")
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        else:
            while self._done:
                match self._done.popleft():
                    case Verdict() as verdict:
                        yield verdict
                    case constraint, compiled:
                        self._settle(constraint, compiled)
        self._expire()
        verdicts, self._verdicts = self._verdicts, []
        yield from verdicts

    def close(self) -> None:
        """Let the threads end once they are done with what they are at."""
        self._tokens.put(None)
        for number in range(COMPILE_THREADS):
            self._schemas.put(((-1, number), None))  # before any schema

    # ---- in the loop's thread -------------------------------------------------------------------------------------

    def _begin(self, sequence: Sequence, known: _Compiled | CoreLLMError) -> None:
        if isinstance(known, CoreLLMError):
            self._verdicts.append(Verdict(sequence, error=known))
            return
        sequence.grammar = known.matcher.deep_copy()
        self._verdicts.append(Verdict(sequence, mask=known.mask))

    def _settle(self, constraint: JsonConstraint, compiled: _Compiled | CoreLLMError) -> None:
        if not isinstance(compiled, OverloadedError):  # that says nothing of the schema
            self._known[constraint] = compiled
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        waiting = self._waiting.pop(constraint, None)
        for sequence in waiting.sequences if waiting is not None else ():
            self._begin(sequence, compiled)

    def _expire(self) -> None:
        now = time.monotonic()
        for constraint in [constraint for constraint, waiting in self._waiting.items() if waiting.deadline < now]:
            error = OverloadedError(
                f"the JSON schema of {constraint.param} was not compiled in time, because of others before it; "
                "try again later"
            )
            for sequence in self._waiting.pop(constraint).sequences:
                self._verdicts.append(Verdict(sequence, error=error))

    # ---- in other threads -----------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  a panic of the Rust side is not an Exception; the loop raises it
            self._failure = error
            os.eventfd_write(self._wake, 1)

    def _load(self, load: Callable[[], LLTokenizer]) -> None:
        try:
            self._vocabulary.set_result(load())
        except CoreLLMError as error:
            self._vocabulary.set_exception(error)
        except Exception as error:  # noqa: BLE001  whatever is odd about a vocabulary: free requests do without it
            self._vocabulary.set_exception(CheckpointError(f"the model's vocabulary cannot be used: {error}"))

    def _compile_schemas(self) -> None:
        while (constraint := self._schemas.get()[1]) is not None:
            if constraint not in self._waiting:
                continue  # whoever asked for it has been refused for want of time
            self._done.append((constraint, self._compile(constraint)))
            os.eventfd_write(self._wake, 1)

    def _compile(self, constraint: JsonConstraint) -> _Compiled | CoreLLMError:
        try:
            check_schema(constraint)
            matcher = compile_grammar(self._vocabulary.result(), constraint)
            mask = next_masks(self._executor, [matcher], self._vocab)[0]
            return refused(constraint, matcher.get_error()) if matcher.is_error() else _Compiled(matcher, mask)
        except OverloadedError as error:
            return error
        except CoreLLMError as error:
            return InvalidRequestError(error.message, constraint.param)

    def _follow_tokens(self) -> None:
        while (first := self._tokens.get()) is not None:
            steps = [first]
            with contextlib.suppress(Empty):
                while len(steps) < MASKS_AT_ONCE and (step := self._tokens.get_nowait()) is not None:
                    steps.append(step)
            self._done.extend(self._follow(steps))
            os.eventfd_write(self._wake, 1)

    def _follow(self, steps: list[tuple[Sequence, int]]) -> Iterator[Verdict]:
        """Take the tokens in, and work out what may follow them."""
        going = []
        for sequence, token in steps:
            matcher = sequence.grammar
            if matcher is None or not matcher.consume_token(token):
                yield Verdict(sequence, error=RequestFailedError(_LOST))
            elif matcher.is_stopped() and not matcher.is_error():
                yield Verdict(sequence)
            else:
                going.append((sequence, matcher))
        masks = next_masks(self._executor, [matcher for _, matcher in going], self._vocab) if going else []
        for (sequence, matcher), mask in zip(going, masks, strict=True):
            if matcher.is_error():
                yield Verdict(sequence, error=refused(_of(sequence), _COMPLEX))
            else:
                yield Verdict(sequence, mask=None if matcher.is_stopped() else mask)


def _of(sequence: Sequence) -> JsonConstraint:
    if sequence.constraint is None:
        raise ValueError(f"sequence {sequence.id} is not constrained")
    return sequence.constraint


_LOST = "a token came that the request's JSON schema does not allow here"
_COMPLEX = "it became too complex to follow; make it simpler"
