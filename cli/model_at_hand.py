"""A model found on disk, before any process runs it: enough to check and count prompts, and to know its dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corellm.batch.engine_api import ModelLimits
from corellm.checkpoint import open_checkpoint
from corellm.comms.messages import Progress
from corellm.comms.settings import Launch, Settings
from corellm.config import EngineOptions
from corellm.engine.resolve import resolve
from corellm.engine.text_engine import encode_prompt, load_tokenizer, model_name
from corellm.errors import InvalidRequestError
from corellm.model_source import find_model
from corellm.text.prompt import PromptFormat, prompt_format
from corellm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelAtHand:
    """A checked checkpoint. `settings` is what an engine with these options would run with."""

    settings: Settings
    limits: ModelLimits
    tokenizer: Tokenizer | None
    format: PromptFormat | None

    def encode_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        return encode_prompt(self.tokenizer, prompt)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        if self.format is None:
            raise InvalidRequestError("the model has no tokenizer; send token ids as prompt", "messages")
        return self.format.encode(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )


def find(options: EngineOptions, report: Callable[[Progress], None]) -> ModelAtHand:
    """Find, fetch or convert the model, and check it and the options against each other.

    Raises the typed error of whatever is wrong. A limit that only memory sets is not known here.
    """
    name = model_name(options)
    report(Progress(stage="resolve model", detail=name))
    path = find_model(name, report)
    checkpoint = open_checkpoint(path, options.load_format)
    settings = resolve(Launch(options=options, model_path=str(path)), checkpoint)
    longest = settings.max_model_len
    if settings.kv_blocks is not None:
        longest = min(longest, settings.kv_blocks * settings.page_size + 1)
    tokenizer = load_tokenizer(path, options.load_format)
    return ModelAtHand(
        settings=settings,
        limits=ModelLimits(longest, checkpoint.spec.vocab),
        tokenizer=tokenizer,
        format=prompt_format(tokenizer) if tokenizer is not None else None,
    )
