"""The prompt format of Llama 3.1 Instruct, from messages straight to token ids.

Headers and ends of turn are ids; everything that a user can write is encoded with special tokens off, so that no text
can pose as one. The ids are those of Meta's own formatter: content is neither stripped nor joined with the newlines
after its header before it is encoded. What Meta's formatter leaves to its caller follows the chat template that Meta
publishes with the checkpoints: the date block, the place and wording of tools, and the form of a tool call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from corellm.errors import CheckpointError, InvalidRequestError
from corellm.text.chat_messages import (
    DEFAULT_DATE,
    ChatMessage,
    ToolCall,
    check_continuation,
    parse_messages,
    parse_tools,
)
from corellm.text.tokenizer import Tokenizer

HEADER_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

_TOOLS_INTRODUCTION = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


class LlamaTemplate:
    """Prompts for a checkpoint that knows `HEADER_TOKENS`; raises `CheckpointError` for any other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin, self._open, self._close, self._end_of_turn = (_required(tokenizer, name) for name in HEADER_TOKENS)
        self._headers: dict[str, list[int]] = {}

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        date: str | None = DEFAULT_DATE,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        `date` goes into the system block; None leaves the date block out. `tools` are described in the first user
        message. With `continue_final_message` the last message, an assistant's, stays open and no generation prompt
        follows. Raises `InvalidRequestError`, naming the field, for a conversation that is malformed.
        """
        conversation = _with_tools(parse_messages(messages), parse_tools(tools))
        if continue_final_message:
            check_continuation(conversation[-1])
        preamble = _preamble(date, bool(tools))
        if preamble:
            system = conversation.pop(0).parts if conversation[0].role == "system" else ()
            conversation.insert(0, ChatMessage("system", _prefixed(preamble, system)))
        ids = [self._begin]
        for message in conversation:
            ids += self._header(message.role)
            for text in (*message.parts, *map(_call_text, message.tool_calls)):
                ids += self._tokenizer.encode(text)
            ids.append(self._end_of_turn)
        if continue_final_message:
            ids.pop()
        elif add_generation_prompt:
            ids += self._header("assistant")
        return ids

    def _header(self, role: str) -> list[int]:
        name = "ipython" if role == "tool" else role
        header = self._headers.get(name)
        if header is None:
            encode = self._tokenizer.encode
            header = self._headers[name] = [self._open, *encode(name), self._close, *encode("\n\n")]
        return header


def _required(tokenizer: Tokenizer, name: str) -> int:
    found = tokenizer.special_id(name)
    if found is None:
        raise CheckpointError(f"the tokenizer has no special token {name}; its prompt format is not Llama 3.1's")
    return found


def _preamble(date: str | None, tools: bool) -> str:
    """What comes before the system message's own text."""
    environment = "Environment: ipython\n" if tools else ""
    dates = "" if date is None else f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n"
    return f"{environment}{dates}\n" if environment or dates else ""


def _with_tools(conversation: list[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """The conversation with `tools` described at the head of its first user message."""
    if not tools:
        return conversation
    first = next((index for index, message in enumerate(conversation) if message.role == "user"), None)
    if first is None:
        raise InvalidRequestError("tools are described in the first user message; add a message of role user", "tools")
    definitions = "".join(json.dumps(tool, ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
    described = ChatMessage("user", _prefixed(_TOOLS_INTRODUCTION + definitions, conversation[first].parts))
    return [*conversation[:first], described, *conversation[first + 1 :]]


def _prefixed(prefix: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    return (prefix + "".join(parts[:1]), *parts[1:])


def _call_text(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
