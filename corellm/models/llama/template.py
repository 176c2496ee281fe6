"""The prompt format of Llama 3.1 Instruct, from messages straight to token ids.

Headers and ends of turn are ids; everything that a user can write is encoded with special tokens off, so that no text
can pose as one. The ids are those of Meta's own formatter: content is neither stripped nor joined with the newlines
after its header before it is encoded. What Meta's formatter leaves to its caller follows the chat template that Meta
publishes with the checkpoints: the date block, the place and wording of tools, and the form of a tool call. Where
built-in tools are declared, a message that calls any tool ends in `<|eom_id|>`: the turn goes on with what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corellm.errors import CheckpointError, InvalidRequestError
from corellm.text.chat_messages import (
    BUILT_IN_TOOLS,
    DEFAULT_DATE,
    ChatMessage,
    ToolCall,
    check_continuation,
    parse_messages,
    parse_tools,
)
from corellm.text.tokenizer import Tokenizer
from corellm.text.tool_calls import CODE_INTERPRETER, PYTHON_TAG
from corellm.text.tool_prompt import built_in_call_text, call_text, describe_functions, prefixed

HEADER_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class LlamaTemplate:
    """Prompts for a checkpoint that knows `HEADER_TOKENS`; raises `CheckpointError` for any other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin, self._open, self._close, self._end_of_turn = (_required(tokenizer, name) for name in HEADER_TOKENS)
        self._python, self._end_of_message = tokenizer.special_id(PYTHON_TAG), tokenizer.special_id("<|eom_id|>")
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

        `date` goes into the system block; None leaves the date block out. Of `tools`, functions are described in the
        first user message and built-in ones named in the system block. With `continue_final_message` the last message,
        an assistant's, stays open and no generation prompt follows. Raises `InvalidRequestError`, naming the field, for
        a conversation that is malformed.
        """
        definitions = parse_tools(tools)
        built_in = [tool["type"] for tool in definitions if tool.get("type") in BUILT_IN_TOOLS]
        self._check_built_in(built_in)
        functions = [tool for tool in definitions if "function" in tool]
        conversation = describe_functions(parse_messages(messages), functions)
        if continue_final_message:
            check_continuation(conversation[-1])
        preamble = _preamble(date, bool(definitions), built_in)
        if preamble:
            system = conversation.pop(0).parts if conversation[0].role == "system" else ()
            conversation.insert(0, ChatMessage("system", prefixed(preamble, system)))
        ids = [self._begin]
        for message in conversation:
            ids += self._header(message.role)
            for text in message.parts:
                ids += self._tokenizer.encode(text)
            for call in message.tool_calls:
                ids += self._call(call, built_in)
            ids.append(self._end(message, built_in))
        if continue_final_message:
            ids.pop()
        elif add_generation_prompt:
            ids += self._header("assistant")
        return ids

    def _call(self, call: ToolCall, built_in: Sequence[str]) -> list[int]:
        if self._python is None or call.name not in built_in:
            return self._tokenizer.encode(call_text(call))
        return [self._python, *self._tokenizer.encode(built_in_call_text(call))]

    def _end(self, message: ChatMessage, built_in: Sequence[str]) -> int:
        if built_in and message.tool_calls and self._end_of_message is not None:
            return self._end_of_message
        return self._end_of_turn

    def _check_built_in(self, built_in: Sequence[str]) -> None:
        if built_in and (self._python is None or self._end_of_message is None):
            raise InvalidRequestError(
                f"tools holds the built-in {built_in[0]}, which this model does not know; declare functions", "tools"
            )

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


def _preamble(date: str | None, has_tools: bool, built_in: Sequence[str]) -> str:
    """What comes before the system message's own text."""
    dates = "" if date is None else f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n"
    named = ", ".join(name for name in built_in if name != CODE_INTERPRETER)
    environment = "Environment: ipython\n" if has_tools else ""
    if named:
        environment += f"Tools: {named}\n" + ("\n" if dates else "")
    return f"{environment}{dates}\n" if environment or dates else ""
