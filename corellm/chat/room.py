"""Whether a conversation and its answer fit the context, and what helps when they do not."""

from __future__ import annotations

from corellm.chat.backend import Backend
from corellm.chat.session import Session
from corellm.errors import PromptTooLongError

# What `/drop` leaves free for an answer without max_tokens: this part of the context, and never more tokens than that.
_ROOM_SHARE = 4
_ROOM_TOKENS = 1024

_DROP = "/drop lets go of the oldest turns and goes on, /clear starts over"
_SHORTER = "shorten it by /edit, or start over by /clear"


def turns_to_drop(session: Session, backend: Backend) -> int:
    """The fewest oldest turns without which an answer has room; all but the last one if none are enough.

    One turn where only the server counts. There are two turns or more.
    """
    turns, context = len(session.conversation.turns()), backend.context
    if context is None:
        return 1
    room = session.sampling.get("max_tokens") or min(_ROOM_TOKENS, context // _ROOM_SHARE)
    for dropped in range(1, turns):
        tokens = _count(session, backend, without_turns=dropped)
        if tokens is None or tokens + room <= context:
            return dropped
    return turns - 1


def overflow(session: Session, backend: Backend, error: PromptTooLongError) -> str:
    """What to tell a user whose conversation was refused with `error`: what is too long, and what helps."""
    tokens, context = _count(session, backend), backend.context
    if tokens is None or context is None:
        return f"{error.message}. {_uncounted_remedy(session, error)}"
    most = session.sampling.get("max_tokens")
    found = f"the conversation has {tokens:,} tokens" + (f" and max_tokens is {most:,}" if most is not None else "")
    return f"{found}, and prompt and answer may have {context:,} together. {_remedy(session, backend, tokens, context)}"


def _remedy(session: Session, backend: Backend, tokens: int, context: int) -> str:
    """For a prompt of `tokens`, of which at least the system message, the tools and the last turn have to stay."""
    answer = session.sampling.get("max_tokens") or 1
    nothing_asked = [{"role": "user", "content": ""}]
    if (backend.count(nothing_asked, session.tools) or 0) >= context:
        return "The tools alone are too long: declare fewer in --tools"
    if session.system and (backend.count([session.system_message(), *nothing_asked], session.tools) or 0) >= context:
        return "The system message alone is too long: /system TEXT sets a shorter one, /system - takes it away"
    last_turn = _count(session, backend, without_turns=len(session.conversation.turns()) - 1) or 0
    if last_turn >= context:
        return f"The message alone is too long: {_SHORTER}"
    if last_turn + answer > context:
        if tokens < context:
            return f"max_tokens is more than is left: /set max_tokens {context - tokens}, then /retry"
        return f"max_tokens is more than can be left: /set max_tokens {context - last_turn}, then /drop"
    if tokens < context:
        return f"{_DROP}; /set max_tokens {context - tokens}, then /retry, keeps all turns"
    return _DROP


def _uncounted_remedy(session: Session, error: PromptTooLongError) -> str:
    """Where only the server can count, and may say which field is too long."""
    lower = "Lower max_tokens by /set max_tokens N, then /retry"
    if error.param == "max_tokens":
        return lower
    if len(session.conversation.turns()) > 1:
        remedy = _DROP
    elif session.system:
        remedy = "Shorten the message by /edit, or the system message by /system TEXT"
    else:
        remedy = f"The message alone is too long: {_SHORTER}"
    return f"{remedy}. {lower}" if "max_tokens" in session.sampling else remedy


def _count(session: Session, backend: Backend, without_turns: int = 0) -> int | None:
    """Tokens of the prompt, its oldest turns left out; None: only the server knows."""
    return backend.count(session.messages(without_turns), session.tools)
