"""Choose how a checkpoint's conversations become prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from corellm.models.llama.template import HEADER_TOKENS, LlamaTemplate
from corellm.text.chat_messages import DEFAULT_DATE
from corellm.text.tokenizer import Tokenizer


class PromptFormat(Protocol):
    """Messages to token ids. Threads may share one."""

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        date: str | None = DEFAULT_DATE,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, its BOS token included where the format has one.

        `date` is what the prompt gives as today's, where the format has a place for it; None leaves it out. With
        `continue_final_message` the last message stays open. Raises `InvalidRequestError`, naming the field, when there
        is no way to write the conversation.
        """
        ...


def prompt_format(tokenizer: Tokenizer) -> PromptFormat:
    """Llama 3.1's own format where the vocabulary has its headers, else the checkpoint's chat template."""
    if all(tokenizer.special_id(name) is not None for name in HEADER_TOKENS):
        return LlamaTemplate(tokenizer)
    from corellm.text.jinja_template import JinjaTemplate  # most checkpoints do without jinja2

    return JinjaTemplate(tokenizer)
