"""A session: a conversation with the settings it was held under, and its form as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from corellm.chat.conversation import Conversation
from corellm.chat.settings import check_settings
from corellm.errors import ChatError, InvalidRequestError
from corellm.openai_api.tools import tools

VERSION = 1


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class Session(msgspec.Struct, kw_only=True):
    """What one file holds. `model` is whose answers came last, `sampling` holds the fields that were set.

    Times are ISO 8601, with the offset of local time.
    """

    version: int = VERSION
    name: str
    model: str = ""
    created: str = msgspec.field(default_factory=_now)
    system: str = ""
    sampling: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    conversation: Conversation = msgspec.field(default_factory=Conversation)

    def messages(self, without_turns: int = 0) -> list[dict[str, Any]]:
        """The current conversation as OpenAI's API has it, its oldest turns left out.

        The system message comes first, if there is one.
        """
        system = [self.system_message()] if self.system else []
        turns = self.conversation.turns()[without_turns:]
        return [*system, *(message.to_api() for turn in turns for message in turn)]

    def system_message(self) -> dict[str, Any]:
        return {"role": "system", "content": self.system}


def to_json(session: Session) -> bytes:
    """Indented: people read these files, and compare them."""
    # JSON has no halves of surrogate pairs, which a paste may bring; they become question marks.
    plain = _valid(msgspec.to_builtins(session))
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def from_json(data: bytes, source: str) -> Session:
    """Raises `ChatError`, naming `source` and the field, for what is no session of this version."""
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.version != VERSION:
            raise ChatError(f"version is {header.version}; this CoreLLM reads version {VERSION}")
        session = msgspec.json.decode(data, type=Session)
        session.conversation.check()
        check_settings(session.sampling)
        tools("tools", session.tools)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ChatError(f"{source} is not a chat session: {error}") from None
    except (ChatError, InvalidRequestError) as error:
        raise ChatError(f"{source} is not a chat session: {error.message}") from None
    return session


class _Header(msgspec.Struct):
    version: int


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_valid(item) for item in value]
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    return value
