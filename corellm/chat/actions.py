"""What each command of a chat does. Every function takes the chat and the command's argument, stripped.

They raise `ChatError` when they cannot do it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from corellm.chat.chat import Chat
from corellm.chat.conversation import ROOT, Conversation
from corellm.chat.files import named, text_or_file
from corellm.chat.session import Session
from corellm.chat.settings import DEFAULTS, RESET, SETTINGS, check_settings, parse_setting
from corellm.chat.store import SessionStore, read_session, write_session
from corellm.errors import ChatError
from corellm.openai_api.tools import ToolUse

_SNIPPET = 60  # characters of a question in a list
_LISTED = 20  # sessions in a list


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the user interface is to do next: print, then have the last message answered, offer a draft, or leave.

    `lines` may be broken between words; two spaces or more set a term apart from what is said of it. `verbatim` is
    shown as it is.
    """

    lines: tuple[str, ...] = ()
    verbatim: str = ""
    answer: bool = False
    draft: str = ""
    leave: bool = False


def set_system(chat: Chat, argument: str) -> Outcome:
    if argument:
        chat.session.system = "" if argument == "-" else text_or_file(argument)
        chat.save()
    return Outcome((f"system: {chat.session.system}" if chat.session.system else "there is no system message",))


def clear(chat: Chat, argument: str) -> Outcome:
    chat.conversation.head = ROOT
    chat.save()
    return Outcome(("a new conversation; /branch leads back",))


def undo(chat: Chat, argument: str) -> Outcome:
    question = chat.conversation.undo()
    chat.save()
    return Outcome((f"taken back: {snippet(question)}",))


def retry(chat: Chat, argument: str) -> Outcome:
    chat.conversation.reopen()
    return Outcome(answer=True)


def edit(chat: Chat, argument: str) -> Outcome:
    draft = chat.conversation.undo()
    chat.save()
    lines = ("taken back, to be written anew; /branch leads back",)
    return Outcome(lines, draft=f"/{draft}" if draft.startswith("/") else draft)


def branch(chat: Chat, argument: str) -> Outcome:
    conversation = chat.conversation
    ends = conversation.ends()
    if argument:
        number = _number(argument, len(ends))
        conversation.head = ends[number - 1]
        chat.save()
        return Outcome((f"on branch {number}: {snippet(conversation.question_of(conversation.head))}",))
    if not ends:
        return Outcome(("there is no branch yet",))
    lines = [_branch_line(conversation, number, end) for number, end in enumerate(ends, start=1)]
    return Outcome((*lines, "/branch N goes to one"))


def _branch_line(conversation: Conversation, number: int, end: int) -> str:
    mark = "*" if end == conversation.head else " "
    answer = conversation.messages[end]
    said = f" → {snippet(answer.content)}" if answer.role == "assistant" else ""
    return f"{mark} {number}  {snippet(conversation.question_of(end))}{said}"


def _number(text: str, most: int) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most:
        return int(text)
    raise ChatError(f"there is no branch {text!r}; /branch lists {most}" if most else "there is no branch yet")


def drop(chat: Chat, argument: str) -> Outcome:
    dropped = chat.make_room()
    last = chat.conversation.last()
    turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
    return Outcome((f"dropped {turns}; /branch leads back",), answer=last is not None and last.role != "assistant")


def set_sampling(chat: Chat, argument: str) -> Outcome:
    if not argument:
        return Outcome(tuple(f"{_setting(chat.session, name):<28} {SETTINGS[name]}" for name in SETTINGS))
    name, _, text = argument.partition(" ")
    text = text.strip()
    if name in SETTINGS and not text:
        raise ChatError(f"/set {name} needs a value, or {RESET}: {SETTINGS[name]}")
    others = {other: value for other, value in chat.session.sampling.items() if other != name}
    reset = text == RESET and name in SETTINGS
    changed = others if reset else {**others, name: parse_setting(name, text)}
    check_settings(changed)
    chat.session.sampling = changed
    chat.save()
    return Outcome((_setting(chat.session, name),))


def _setting(session: Session, name: str) -> str:
    value = session.sampling.get(name, DEFAULTS.get(name))
    return f"{name} {RESET if value is None else json.dumps(value, ensure_ascii=False)}"


def show(chat: Chat, argument: str) -> Outcome:
    session, backend = chat.session, chat.backend
    tokens = backend.count(session.messages(), session.tools)
    used = "unknown" if tokens is None else f"{tokens:,}"
    context = "unknown" if backend.context is None else f"{backend.context:,}"
    branches = len(chat.conversation.ends())
    return Outcome(
        (
            f"model     {backend.model}",
            f"session   {session.name}, begun {session.created}" + ("" if chat.store is not None else ", not saved"),
            f"system    {session.system or 'none'}",
            f"tools     {', '.join(ToolUse(session.tools, parallel=True).names) or 'none'}",
            f"turns     {len(chat.conversation.turns())}, branches {branches}",
            f"context   {used} tokens of {context}",
            f"sampling  {', '.join(_setting(session, name) for name in {**DEFAULTS, **session.sampling})}",
        )
    )


def raw(chat: Chat, argument: str) -> Outcome:
    """The prompt of the last answer; of the next one, if that is still to come."""
    session, messages = chat.session, chat.session.messages()
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ChatError("there is no prompt yet; ask something, or set a system message")
    prompt = chat.backend.raw(messages, session.sampling, session.tools)
    if prompt.ids is None:
        return Outcome(verbatim=prompt.text)
    return Outcome(verbatim=f"{prompt.text}\n\n{len(prompt.ids):,} ids: {' '.join(map(str, prompt.ids))}")


def tool(chat: Chat, argument: str) -> Outcome:
    if argument:
        chat.give_result(argument)
        return Outcome(waiting_calls(chat), answer=not chat.open_calls())
    return Outcome(waiting_calls(chat) or ("no tool call waits for a result",))


def waiting_calls(chat: Chat) -> tuple[str, ...]:
    """The calls that have no result yet, the one that `/tool` answers first."""
    calls = chat.open_calls()
    if not calls:
        return ()
    lines = (f"call of {call.name}: {call.arguments}" for call in calls)
    return (*lines, "nothing is executed; /tool RESULT answers the first one")


def save(chat: Chat, argument: str) -> Outcome:
    path = named(argument)
    if os.path.exists(path):  # unlike its namesake of `Path`, this says no where a look is refused
        try:
            read_session(path)
        except ChatError:
            raise ChatError(f"{path} exists and is no chat session; choose another name") from None
    write_session(path, chat.session)
    return Outcome((f"saved to {path}",))


def load(chat: Chat, argument: str) -> Outcome:
    session = read_session(named(argument))
    session.name = _store(chat).new().name
    chat.session = session
    chat.save()
    return Outcome((f"loaded {counted_turns(len(chat.conversation.turns()))}, as session {session.name}",))


def sessions(chat: Chat, argument: str) -> Outcome:
    store = _store(chat)
    if not argument:
        return Outcome(tuple(_session_line(chat, name) for name in store.names()[:_LISTED]) or ("none yet",))
    if argument not in store.names():
        raise ChatError(f"there is no session {argument!r}; /sessions lists them")
    chat.session = store.open(argument)
    return Outcome((f"opened {argument}, {counted_turns(len(chat.conversation.turns()))}",))


def _session_line(chat: Chat, name: str) -> str:
    mark = "*" if name == chat.session.name else " "
    try:
        conversation = _store(chat).peek(name).conversation
    except ChatError:
        return f"{mark} {name}  (not readable)"
    turns, question = counted_turns(len(conversation.turns())), conversation.question_of(conversation.head)
    return f"{mark} {name}  {turns}  {snippet(question)}"


def leave(chat: Chat, argument: str) -> Outcome:
    return Outcome(leave=True)


def _store(chat: Chat) -> SessionStore:
    if chat.store is None:
        raise ChatError("sessions are not kept here")
    return chat.store


def counted_turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def snippet(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SNIPPET else line[: _SNIPPET - 1] + "…"
