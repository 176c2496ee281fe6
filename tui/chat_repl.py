"""The chat itself: read, answer, show, until the user leaves."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.text import Text

from corellm.chat.actions import Outcome, counted_turns, snippet, waiting_calls
from corellm.chat.backend import AnswerEnd
from corellm.chat.chat import Chat
from corellm.chat.commands import is_command, message_of, run_command
from corellm.errors import CoreLLMError, EngineDeadError, PromptTooLongError
from corellm.text.terminal import terminal_safe

from .chat_answer import AnswerView
from .chat_footer import footer
from .chat_prompt import ChatPrompt


class ChatRepl:
    """`console` gets everything but the answers, whose views `new_view` makes."""

    def __init__(self, chat: Chat, prompt: ChatPrompt, console: Console, new_view: Callable[[], AnswerView]) -> None:
        self._chat, self._prompt, self._console, self._new_view = chat, prompt, console, new_view
        self._generating: asyncio.Future[AnswerEnd] | None = None  # what Ctrl-C ends

    async def run(self) -> None:
        """Until the user leaves. Raises the error that ended the engine, if it ends before."""
        watch = asyncio.create_task(self._watch_engine())
        try:
            with _on_interrupt(self._stop_generating):
                self._greet()
                await self._loop()
        finally:
            watch.cancel()
            self._tell_notices()

    async def _loop(self) -> None:
        outcome = Outcome()
        while not outcome.leave:
            self._show(outcome)
            if outcome.answer:
                outcome = await self._answer()
                continue
            self._tell_notices()
            try:
                line = await self._prompt.read(outcome.draft)
            except EOFError:
                return
            outcome = self._take(line)

    async def _watch_engine(self) -> None:
        self._prompt.interrupt(await self._chat.backend.died())

    def _take(self, line: str) -> Outcome:
        """Do what the user wrote."""
        if not line.strip():
            return Outcome()
        if not is_command(line):
            self._chat.ask(message_of(line))
            return Outcome(answer=True)
        try:
            return run_command(self._chat, line)
        except CoreLLMError as error:
            self._refuse(error)
            return Outcome()

    async def _answer(self) -> Outcome:
        """Show the next answer. What ends only this answer is told; the chat goes on."""
        try:
            end = await self._generate()
        except EngineDeadError:
            raise
        except PromptTooLongError as error:
            return Outcome(lines=(self._chat.overflow(error),))
        except CoreLLMError as error:
            self._console.print()
            self._refuse(error)
            return Outcome()
        interrupted = "interrupted; /retry asks again"
        line = footer(end, self._chat.backend.context) if end is not None else interrupted
        self._console.print(Text(f"\n{line}\n", "dim"))
        return Outcome(lines=waiting_calls(self._chat))

    async def _generate(self) -> AnswerEnd | None:
        """One answer onto the screen; None: Ctrl-C ended it."""
        self._console.print()
        view = self._new_view()
        self._generating = generating = asyncio.ensure_future(self._chat.answer(view.push))
        painting = asyncio.create_task(view.keep_painting())
        try:
            await asyncio.wait({generating, painting}, return_when=asyncio.FIRST_COMPLETED)
            if painting.done():
                painting.result()
        finally:
            self._generating = None
            painting.cancel()
            generating.cancel()
            with contextlib.suppress(asyncio.CancelledError, CoreLLMError):
                await generating
            view.finish()
        return None if generating.cancelled() else generating.result()

    def _stop_generating(self) -> None:
        """Once: a second Ctrl-C must not end what the first one has to tell the engine."""
        generating, self._generating = self._generating, None
        if generating is not None:
            generating.cancel()

    def _greet(self) -> None:
        turns = self._chat.conversation.turns()
        if turns:
            last = snippet(turns[-1][0].content)
            kept = f"session {self._chat.session.name}, {counted_turns(len(turns))}; the last one: {last}"
            self._console.print(Text(terminal_safe(kept), "dim"))
        self._console.print(Text(f"{terminal_safe(self._chat.backend.model)}; /help lists the commands", "dim"))

    def _show(self, outcome: Outcome) -> None:
        for line in outcome.lines:
            self._console.print(_hanging(Text(terminal_safe(line), "dim"), self._console))
        if outcome.verbatim:
            self._console.print(Text(terminal_safe(outcome.verbatim), "dim"), soft_wrap=True)

    def _tell_notices(self) -> None:
        """What a turn left to be told: not before the answer has been drawn."""
        for notice in self._chat.take_notices():
            self._console.print(Text(terminal_safe(notice), "yellow"))

    def _refuse(self, error: CoreLLMError) -> None:
        self._console.print(Text.assemble(("error: ", "bold red"), terminal_safe(error.message)))


def _hanging(line: Text, console: Console) -> Text:
    """`line`, broken between words to the console's width, with what is said of a term in a column of its own."""
    term = re.match(r" *\S.*? {2,}(?=\S)", line.plain)
    indent = term.end() if term is not None else 0
    if not 0 < indent <= console.width // 2:
        return line
    said = line[indent:].wrap(console, console.width - indent)
    return line[:indent].append(Text("\n" + " " * indent).join(said))


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """SIGINT calls `act`, and no more than that, at every moment at which the prompt does not read.

    The prompt puts a handler of its own in the place of ours, and ours back. It could not do so with one of the loop's.
    """
    loop = asyncio.get_running_loop()
    before = signal.signal(signal.SIGINT, lambda number, frame: loop.call_soon_threadsafe(act))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
