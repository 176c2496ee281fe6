"""The loop of a chat, with a prompt that presses keys by itself: Ctrl-C at the moments between prompt and answer."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from corellm.chat.backend import Messages, Piece
from corellm.chat.chat import Chat
from corellm.chat.store import SessionStore
from corellm_tui.chat_answer import AnswerView, PlainAnswer
from corellm_tui.chat_repl import ChatRepl
from tests.support.fake_backend import FakeBackend


class ScriptedPrompt:
    """Reads these lines, after a Ctrl-C each."""

    def __init__(self, *lines: str) -> None:
        self._lines: Iterator[str] = iter(lines)

    async def read(self, draft: str = "") -> str:
        interrupt()
        await asyncio.sleep(0.01)
        return next(self._lines)

    def interrupt(self, error: Exception) -> None: ...


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def chatting(
    folder: Path, backend: FakeBackend, *lines: str, new_view: AnswerView | None = None, width: int = 80
) -> tuple[Chat, str]:
    """The chat after these lines, and what it printed."""
    store = SessionStore(folder)
    chat = Chat(backend, store.new(), store)
    console = Console(file=io.StringIO(), width=width)
    view = new_view or PlainAnswer(io.StringIO(), terminal=False)
    repl = ChatRepl(chat, ScriptedPrompt(*lines), console, lambda: view)  # type: ignore[arg-type]
    asyncio.run(repl.run())
    assert isinstance(console.file, io.StringIO)
    return chat, console.file.getvalue()


class Impatient:
    """The view of someone who presses Ctrl-C at the first sign of an answer, and again while it is being stopped."""

    def push(self, text: str) -> None:
        interrupt()

    def finish(self) -> None:
        interrupt()

    async def keep_painting(self) -> None:
        await asyncio.get_running_loop().create_future()


def test_ctrl_c_ends_an_answer_and_nothing_else_at_any_moment(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    chat, printed = chatting(tmp_path, FakeBackend(block=True), "one", "two", "/exit", new_view=Impatient())
    assert [(m.content, m.finish) for m in chat.conversation.path()] == [
        ("one", ""), ("fine", "interrupted"), ("two", ""), ("fine", "interrupted"),
    ]  # fmt: skip
    assert printed.count("interrupted; /retry asks again") == 2
    assert signal.getsignal(signal.SIGINT) == before


class SlowToStop(FakeBackend):
    """Has something to tell an engine when its answer is cancelled."""

    told = False

    async def stream(
        self, messages: Messages, sampling: Mapping[str, Any], tools: Messages
    ) -> AsyncGenerator[Piece, None]:
        try:
            async for piece in super().stream(messages, sampling, tools):
                yield piece
        finally:
            interrupt()
            await asyncio.sleep(0.02)
            self.told = True


def test_lists_hang_below_what_they_say(tmp_path: Path) -> None:
    question = "which of these words is the longest of all of them"
    for before in ((), ("/clear",)):  # the branch with its mark, and without
        _, printed = chatting(tmp_path, FakeBackend(), question, *before, "/branch", "/exit", width=40)
        listed = printed[printed.index(" 1  which of") :].splitlines()
        assert listed[1].startswith("     of all of them")


def test_a_second_ctrl_c_does_not_cut_off_the_abort_of_the_first(tmp_path: Path) -> None:
    backend = SlowToStop(block=True)
    chatting(tmp_path, backend, "one", "/exit", new_view=Impatient())
    assert backend.told
