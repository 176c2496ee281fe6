"""A checkpoint's own chat template, rendered in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from corellm.errors import CheckpointError, InvalidRequestError
from corellm.text.chat_messages import DEFAULT_DATE, ChatMessage, check_continuation, parse_messages, parse_tools
from corellm.text.tokenizer import Tokenizer
from corellm.text.tool_prompt import call_text, describe_functions

# What a template's own code can raise on a conversation that it was not written for.
_RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class JinjaTemplate:
    """Prompts by `tokenizer.chat_template`, with the globals and filters that such templates expect.

    A template that says nothing of tools gets them in words, in the text of the messages.

    The rendered text is encoded with special tokens on, because the template spells its own. A control token that a
    message, tool or date spells out must stay text, so a seam is set behind its first character before rendering, and
    the rendered text is cut there and encoded piece by piece. The seam is a random string in the middle of text that no
    template looks for: stripping, joining and testing content work as ever, and text without such spellings renders
    exactly as it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `CheckpointError` when the template is not valid Jinja. It may be missing until `encode`."""
        self._tokenizer = tokenizer
        self._knows_tools = "tool" in (tokenizer.chat_template or "")
        self._spelling = _spelling_pattern(tokenizer.added_tokens)
        try:
            self._template = (
                None if tokenizer.chat_template is None else _environment().from_string(tokenizer.chat_template)
            )
        except TemplateError as error:
            raise CheckpointError(f"the tokenizer's chat_template is not valid: {error}") from None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        date: str | None = DEFAULT_DATE,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. `date`, unless None, is the template's `date_string`.

        Raises `InvalidRequestError` when there is no template, or when it refuses the conversation.
        """
        parsed, definitions = parse_messages(messages), parse_tools(tools)
        if built_in := [tool["type"] for tool in definitions if "function" not in tool]:
            raise InvalidRequestError(
                f"tools holds the built-in {built_in[0]}, which this model does not know; declare functions", "tools"
            )
        if not self._knows_tools:
            parsed, definitions = _in_words(parsed, definitions), []
        # Private-use characters survive every filter, and 64 random bits keep a message from guessing the seam.
        seam = f"\ue000{secrets.token_hex(8)}\ue001"
        conversation = [
            self._neutral(_template_message(raw, message), seam) for raw, message in zip(messages, parsed, strict=True)
        ]
        end = ""
        if continue_final_message:
            check_continuation(parsed[-1])
            end = f"\ue000{secrets.token_hex(8)}\ue001"
            conversation[-1]["content"] += end
        values: dict[str, Any] = {} if date is None else {"date_string": self._neutral(date, seam)}
        text = self._render(
            messages=conversation,
            tools=self._neutral(definitions, seam) or None,
            documents=None,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **self._tokenizer.special_tokens,
            **values,
        )
        if end:
            text, found, _ = text.rpartition(end)
            if not found:
                raise InvalidRequestError(
                    "continue_final_message is true, but the chat template drops the last message",
                    "continue_final_message",
                )
        return [token for piece in text.split(seam) for token in self._tokenizer.encode(piece, special=True)]

    def _render(self, **values: Any) -> str:
        if self._template is None:
            raise InvalidRequestError("the model has no chat template; send a prompt instead of messages", "messages")
        try:
            return self._template.render(values)
        except _RENDER_ERRORS as error:
            reason = " ".join(str(error).split())
            raise InvalidRequestError(f"the model's chat template refuses messages: {reason}", "messages") from None

    def _neutral(self, value: Any, seam: str) -> Any:
        """A copy of a JSON value with a seam in every control token that its strings spell."""
        if isinstance(value, str):
            return self._spelling.sub(lambda match: match[0] + seam, value)
        if isinstance(value, Mapping):
            return {self._neutral(key, seam): self._neutral(item, seam) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._neutral(item, seam) for item in value]
        return value


def _in_words(conversation: list[ChatMessage], functions: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """For a template without a place for tools: their descriptions and their calls as text of the messages."""
    return [
        replace(message, parts=(*message.parts, *map(call_text, message.tool_calls)), tool_calls=())
        for message in describe_functions(conversation, functions)
    ]


def _template_message(raw: Mapping[str, Any], message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it: content is one string, arguments are objects, other fields plain values."""
    fields: dict[str, Any] = {name: value for name, value in raw.items() if isinstance(value, str | int | float)}
    fields["role"], fields["content"] = message.role, message.text
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": str(given.get("id", "")),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for given, call in zip(raw["tool_calls"], message.tool_calls, strict=True)
        ]
    return fields


def _spelling_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches the first character of every spelling of one of `tokens`, also where spellings overlap.

    Runs of white space, which some vocabularies add as tokens, control nothing.
    """
    rests: dict[str, list[str]] = {}
    for token in sorted(tokens):
        if len(token) > 1 and not token.isspace():
            rests.setdefault(token[0], []).append(re.escape(token[1:]))
    branches = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
    return re.compile("|".join(branches) or r"(?!)")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
