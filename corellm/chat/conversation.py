"""A conversation as a tree of messages, of which one path, from the root to `head`, is current.

Nothing is ever taken out: `/undo`, `/retry`, `/edit` and `/clear` only move the head, so that every answer given stays
in the session's file and can be come back to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from corellm.errors import ChatError

ROOT = -1
ROLES = ("user", "assistant", "tool")


class Call(msgspec.Struct, kw_only=True):
    """A tool that an assistant called: the call's id, the function's name, and its arguments as JSON text."""

    id: str
    name: str
    arguments: str

    def to_api(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Message(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One message. `parent` is the index of the one before it, `ROOT` for a first one.

    `finish` says how an assistant's message ended: "stop", "length", "tool_calls", "interrupted" or "failed".
    `tool_call_id` is the id of the call that a tool's message answers.
    """

    role: str
    content: str
    parent: int = ROOT
    finish: str = ""
    tool_calls: list[Call] = []
    tool_call_id: str = ""

    def to_api(self) -> dict[str, Any]:
        """The message as OpenAI's API and the prompt formats take it."""
        only_calls = self.tool_calls and not self.content
        message: dict[str, Any] = {"role": self.role, "content": None if only_calls else self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_api() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class Conversation(msgspec.Struct):
    """Messages, each behind its parent, and the index of the last one of the current path (`ROOT`: none)."""

    messages: list[Message] = []
    head: int = ROOT

    def check(self) -> None:
        """Raise `ChatError` unless this is a tree: a file may hold anything."""
        for index, message in enumerate(self.messages):
            if not ROOT <= message.parent < index:
                raise ChatError(f"messages[{index}].parent is {message.parent}; it must be an earlier message's index")
            if message.role not in ROLES:
                raise ChatError(f"messages[{index}].role is {message.role!r}; it must be one of {', '.join(ROLES)}")
        if not ROOT <= self.head < len(self.messages):
            raise ChatError(f"head is {self.head}; it must be the index of one of {len(self.messages)} messages")

    def path(self) -> list[Message]:
        """The current messages, the oldest first."""
        return [self.messages[index] for index in reversed(list(self._upwards(self.head)))]

    def last(self) -> Message | None:
        return self.messages[self.head] if self.head != ROOT else None

    def add(self, message: Message) -> None:
        """Put `message` behind the head; it becomes the head."""
        message.parent = self.head
        self.messages.append(message)
        self.head = len(self.messages) - 1

    def ask(self, text: str) -> None:
        """Add a question. One that nobody has answered gives way to it, and becomes a branch of its own."""
        last = self.last()
        if last is not None and last.role == "user":
            self.head = last.parent
        self.add(Message(role="user", content=text))

    def undo(self) -> str:
        """Go back before the last question, which is returned. Raises `ChatError` when there is none."""
        for index in self._upwards(self.head):
            if self.messages[index].role == "user":
                self.head = self.messages[index].parent
                return self.messages[index].content
        raise ChatError("there is no question yet")

    def reopen(self) -> None:
        """Go back to the last question, unanswered. Raises `ChatError` when there is none."""
        for index in self._upwards(self.head):
            if self.messages[index].role == "user":
                self.head = index
                return
        raise ChatError("there is no question yet")

    def turns(self) -> list[list[Message]]:
        """The current path in turns: each begins with a question, and has all that came of it."""
        turns: list[list[Message]] = []
        for message in self.path():
            if message.role == "user" or not turns:
                turns.append([])
            turns[-1].append(message)
        return turns

    def drop_oldest(self, count: int) -> None:
        """Go on without the first `count` turns: the rest of the path becomes a branch that begins at the root."""
        kept = self.turns()[count:]
        self.head = ROOT
        for message in (message for turn in kept for message in turn):
            self.add(msgspec.structs.replace(message))

    def ends(self) -> list[int]:
        """Where each branch ends: messages without a successor, in the order in which they were written."""
        followed = {message.parent for message in self.messages}
        return [index for index in range(len(self.messages)) if index not in followed]

    def question_of(self, end: int) -> str:
        """The last question on the way to `end`."""
        texts = (self.messages[index].content for index in self._upwards(end) if self.messages[index].role == "user")
        return next(texts, "")

    def _upwards(self, index: int) -> Iterator[int]:
        while index != ROOT:
            yield index
            index = self.messages[index].parent
