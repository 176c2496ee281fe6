"""A conversation that does not fit its context: what is said to be too long, and that what is offered helps."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path

import pytest

from corellm.chat.backend import Messages
from corellm.chat.chat import Chat
from corellm.chat.commands import run_command
from corellm.chat.store import SessionStore
from corellm.errors import PromptTooLongError
from tests.support.fake_backend import FakeBackend, count_words


def chat_of(folder: Path, backend: FakeBackend) -> Chat:
    return Chat(backend, SessionStore(folder).new(), None)


def ask(chat: Chat, text: str) -> str:
    """Ask; returns what the user is told if it does not fit, and nothing if it is answered."""
    chat.ask(text)
    return answer(chat)


def answer(chat: Chat) -> str:
    try:
        asyncio.run(chat.answer(lambda text: None))
    except PromptTooLongError as error:
        return chat.overflow(error)
    return ""


def follow(chat: Chat, line: str) -> str:
    """Do what a command says; returns what the user is told then."""
    return answer(chat) if run_command(chat, line).answer else ""


def words(count: int) -> str:
    return "word " * count


def test_the_oldest_turns_are_dropped_and_the_chat_goes_on(tmp_path: Path) -> None:
    backend = FakeBackend(lambda messages: [words(9)], context=60)
    chat = chat_of(tmp_path, backend)
    for number in range(3):
        assert ask(chat, f"question {number} " + words(8)) == ""
    told = ask(chat, "the last one " + words(8))
    assert told == (
        "the conversation has 68 tokens, and prompt and answer may have 60 together. "
        "/drop lets go of the oldest turns and goes on, /clear starts over"
    )
    assert run_command(chat, "/drop").lines == ("dropped the 2 oldest turns; /branch leads back",)
    assert answer(chat) == ""
    assert [m["content"].split()[:2] for m in backend.asked[-1] if m["role"] == "user"] == [
        ["question", "2"],
        ["the", "last"],
    ]
    assert len(chat.conversation.ends()) == 2


def test_where_only_the_server_counts_one_turn_is_dropped(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, FakeBackend(context=None))
    for text in ("one", "two", "three"):
        ask(chat, text)
    assert run_command(chat, "/drop").lines == ("dropped the oldest turn; /branch leads back",)
    assert chat.conversation.path()[0].content == "two"


def test_drop_leaves_the_room_that_max_tokens_asks_for(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, FakeBackend(lambda messages: [words(10)], context=100))
    for _ in range(3):
        ask(chat, words(10))  # 60 words in all
    run_command(chat, "/set max_tokens 60")
    assert "/drop" in ask(chat, words(10))
    assert follow(chat, "/drop") == ""
    assert len(chat.conversation.turns()) == 2


@pytest.mark.parametrize(
    ("turns", "system", "message", "max_tokens", "told"),
    [
        (0, 0, 20, None, "the conversation has 20 tokens, and prompt and answer may have 10 together. "
            "The message alone is too long: shorten it by /edit, or start over by /clear"),
        (0, 0, 4, 50, "the conversation has 4 tokens and max_tokens is 50, and prompt and answer may have 10 together. "
            "max_tokens is more than is left: /set max_tokens 6, then /retry"),
        (2, 0, 2, 50, "max_tokens is more than is left: /set max_tokens 4, then /retry"),
        (2, 0, 7, 5, "max_tokens is more than can be left: /set max_tokens 3, then /drop"),
        (2, 0, 4, 5, "/clear starts over; /set max_tokens 2, then /retry, keeps all turns"),
        (2, 0, 4, 1, None),
        (2, 0, 10, None, "The message alone is too long"),
        (0, 12, 1, None, "The system message alone is too long: /system TEXT sets a shorter one, /system - takes it"),
        (2, 12, 1, 50, "The system message alone is too long"),
    ],
)  # fmt: skip
def test_what_is_too_long_is_named(
    tmp_path: Path, turns: int, system: int, message: int, max_tokens: int | None, told: str | None
) -> None:
    chat = chat_of(tmp_path, FakeBackend(lambda messages: ["a"], context=10))
    for _ in range(turns):  # of two words each
        ask(chat, "q")
    if system:
        run_command(chat, f"/system {words(system)}")
    if max_tokens is not None:
        run_command(chat, f"/set max_tokens {max_tokens}")
    found = ask(chat, words(message))
    assert (told in found) if told is not None else found == ""


def test_tools_that_are_too_long_are_named(tmp_path: Path) -> None:
    class WithTools(FakeBackend):
        def count(self, messages: Messages, tools: Messages) -> int | None:
            return count_words(messages) + 20 * len(tools)

    chat = chat_of(tmp_path, WithTools(context=10))
    chat.session.tools = [{"type": "function"}]
    chat.ask("q")
    assert "tools alone are too long: declare fewer in --tools" in chat.overflow(PromptTooLongError("too long"))


def test_what_is_offered_helps(tmp_path: Path) -> None:
    """Whatever is too long: the user who does what is said gets an answer."""
    cases = itertools.product((0, 1, 3), (0, 4, 25), (1, 6, 25), (None, 1, 8, 50))
    refused = 0
    for case, (turns, system, message, max_tokens) in enumerate(cases):
        chat = chat_of(tmp_path / str(case), FakeBackend(lambda messages: [words(3)], context=20))
        for _ in range(turns):
            ask(chat, words(2))
        chat.session.system = words(system)
        chat.session.sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
        told = ask(chat, words(message))
        refused += told != ""
        for _ in range(4):
            if told:
                told = do_as_told(chat, told)
        assert told == "", (turns, system, message, max_tokens)
    assert refused > 50


def do_as_told(chat: Chat, told: str) -> str:
    if "system message alone" in told:
        run_command(chat, "/system -")
        return follow(chat, "/retry")
    if "message alone" in told:
        assert run_command(chat, "/edit").draft
        return ask(chat, "short")
    for command in re.findall(r"/set max_tokens \d+|/drop|/retry", told.partition(". ")[2]):
        told = follow(chat, command)
        if command == "/drop":
            break
    return told


@pytest.mark.parametrize(
    ("turns", "system", "max_tokens", "field", "told"),
    [
        (1, "", 400, "max_tokens", "Lower max_tokens by /set max_tokens N, then /retry"),
        (2, "", None, "messages", "/drop lets go of the oldest turns and goes on, /clear starts over"),
        (2, "", 400, "messages", "/clear starts over. Lower max_tokens by /set max_tokens N, then /retry"),
        (1, "x", None, "messages", "Shorten the message by /edit, or the system message by /system TEXT"),
        (1, "", None, "messages", "The message alone is too long: shorten it by /edit"),
    ],
)
def test_where_only_the_server_counts_it_names_what_may_be_too_long(
    tmp_path: Path, turns: int, system: str, max_tokens: int | None, field: str, told: str
) -> None:
    chat = chat_of(tmp_path, FakeBackend(context=None))
    for _ in range(turns - 1):
        ask(chat, "q")
    chat.ask("q")
    chat.session.system = system
    chat.session.sampling = {} if max_tokens is None else {"max_tokens": max_tokens}
    offer = chat.overflow(PromptTooLongError("the server says no", field))
    assert offer.startswith("the server says no. ")
    assert told in offer
