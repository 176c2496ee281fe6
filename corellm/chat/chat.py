"""One chat: a session, whoever answers, and where the session is kept. What a user interface drives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from corellm.chat.backend import AnswerEnd, Backend
from corellm.chat.conversation import Call, Conversation, Message
from corellm.chat.session import Session
from corellm.chat.store import SessionStore
from corellm.errors import ChatError, PromptTooLongError

# What `/drop` leaves free for the answer: this part of the context, and never more tokens than that.
_ROOM_SHARE = 4
_ROOM_TOKENS = 1024


class Chat:
    """`store` None: nothing is kept, as in a question asked from a script. `notify` tells the user one line."""

    def __init__(
        self, backend: Backend, session: Session, store: SessionStore | None, notify: Callable[[str], None]
    ) -> None:
        self.backend = backend
        self.session = session
        self.store = store
        self._notify = notify

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
        """Keep the session. A chat goes on when that fails, or when another chat has taken the file: it is told."""
        if self.store is None:
            return
        try:
            renamed = self.store.save(self.session)
        except ChatError as error:
            self._notify(f"the session is not saved: {error.message}")
            return
        if renamed is not None:
            self._notify(f"another chat has written this session since; this one goes on as {renamed}")

    # ---- room -----------------------------------------------------------------------------------------------------

    def overflow(self, error: PromptTooLongError) -> str:
        """What to tell a user whose conversation does not fit any more."""
        tokens, context = self._count(), self.backend.context
        found = (
            error.message
            if tokens is None or context is None
            else (f"the conversation has {tokens:,} tokens, and prompt and answer may have {context:,} together")
        )
        if len(self.conversation.turns()) > 1:
            return f"{found}. /drop lets go of the oldest turns and goes on, /clear starts over"
        return f"{found}. The message alone is too long: shorten it by /edit, or start over by /clear"

    def make_room(self) -> int:
        """Drop the fewest oldest turns that leave room for an answer; returns how many. Raises `ChatError`."""
        turns = len(self.conversation.turns())
        if turns < 2:
            raise ChatError("there is no older turn to drop; /clear starts over")
        fitting = (count for count in range(1, turns) if self._fits_without(count))
        dropped = next(fitting, turns - 1)
        self.conversation.drop_oldest(dropped)
        self.save()
        return dropped

    def _fits_without(self, turns: int) -> bool:
        tokens, context = self._count(turns), self.backend.context
        return tokens is None or context is None or tokens + min(_ROOM_TOKENS, context // _ROOM_SHARE) <= context

    def _count(self, without_turns: int = 0) -> int | None:
        """Tokens of the prompt, its oldest turns left out."""
        return self.backend.count(self.session.messages(without_turns), self.session.tools)
