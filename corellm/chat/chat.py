"""One chat: a session, whoever answers, and where the session is kept. What a user interface drives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from corellm.chat import room
from corellm.chat.backend import AnswerEnd, Backend
from corellm.chat.conversation import Call, Conversation, Message
from corellm.chat.session import Session
from corellm.chat.store import SessionStore
from corellm.errors import ChatError, PromptTooLongError


class Chat:
    """`store` None: nothing is kept, as in a question asked from a script.

    `is_saved` says whether the session's file, if there is to be one, has all that was said.
    """

    def __init__(self, backend: Backend, session: Session, store: SessionStore | None) -> None:
        self.backend = backend
        self.session = session
        self.store = store
        self.is_saved = True
        self._notices: dict[str, str] = {}  # what the user is to be told, by what it is about

    @property
    def conversation(self) -> Conversation:
        return self.session.conversation

    async def answer(self, on_text: Callable[[str], None]) -> AnswerEnd:
        """Have the conversation's last message answered; `on_text` gets the answer in pieces.

        What came before an error or a cancellation is kept, marked as such. Raises `ChatError` when there is nothing to
        answer, `PromptTooLongError` when the conversation does not fit, and what the backend raises.
        """
        last = self.conversation.last()
        if last is None or last.role == "assistant":
            raise ChatError("there is nothing to answer; ask something")
        texts: list[str] = []
        end: AnswerEnd | None = None
        finish = "failed"
        try:
            stream = self.backend.stream(self.session.messages(), self.session.sampling, self.session.tools)
            async with aclosing(stream):
                async for piece in stream:
                    texts.append(piece.text)
                    on_text(piece.text)
                    if piece.end is not None:
                        end, finish = piece.end, piece.end.finish_reason
        except asyncio.CancelledError:
            finish = "interrupted"
            raise
        finally:
            self._keep("".join(texts), finish, end)
        if end is None:
            raise RuntimeError("a stream ended without its end")
        return end

    def _keep(self, text: str, finish: str, end: AnswerEnd | None) -> None:
        """Add an answer to the session, unless there is none: then the question stays open."""
        calls = end.tool_calls if end is not None else []
        if not text and not calls and end is None:
            return
        self.session.model = self.backend.model
        self.conversation.add(Message(role="assistant", content=text, finish=finish, tool_calls=calls))
        self.save()

    def ask(self, text: str) -> None:
        """Add a question, and keep it before anything is generated."""
        self.conversation.ask(text)
        self.save()

    def give_result(self, text: str) -> None:
        """Answer the oldest call of a tool that has no result yet. Raises `ChatError` when there is none."""
        calls = self.open_calls()
        if not calls:
            raise ChatError("no tool has been called; /tool takes the result of a call")
        self.conversation.add(Message(role="tool", content=text, tool_call_id=calls[0].id))
        self.save()

    def open_calls(self) -> list[Call]:
        """Calls in the last answer that have no result yet, in order."""
        results = 0
        for message in reversed(self.conversation.path()):
            if message.role == "tool":
                results += 1
            else:
                return message.tool_calls[results:]
        return []

    def save(self) -> None:
        """Keep the session. A chat goes on when that fails, or when another chat has taken the file: see notices."""
        if self.store is None:
            return
        try:
            renamed = self.store.save(self.session)
        except ChatError as error:
            self.is_saved = False
            self._notices["unsaved"] = f"the session is not saved: {error.message}"
            return
        self.is_saved = True
        self._notices.pop("unsaved", None)  # what failed before is in the file now
        if renamed is not None:
            self._notices["renamed"] = f"another chat has written this session since; this one goes on as {renamed}"

    def take_notices(self) -> list[str]:
        """What came of saving since the last call and the user is to be told, a line each.

        It waits here, because a session is saved while an answer is being drawn.
        """
        notices, self._notices = list(self._notices.values()), {}
        return notices

    def overflow(self, error: PromptTooLongError) -> str:
        """What to tell a user whose conversation does not fit any more."""
        return room.overflow(self.session, self.backend, error)

    def make_room(self) -> int:
        """Drop the fewest oldest turns that leave room for an answer; returns how many. Raises `ChatError`."""
        if len(self.conversation.turns()) < 2:
            raise ChatError("there is no older turn to drop; /clear starts over")
        dropped = room.turns_to_drop(self.session, self.backend)
        self.conversation.drop_oldest(dropped)
        self.save()
        return dropped
