"""A model found on disk, checked against the options, before any process runs it: what a front end knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corellm.checkpoint import is_there, naming, open_checkpoint
from corellm.comms.messages import Progress
from corellm.comms.settings import Launch, Settings
from corellm.config import DEMO_MODEL, EngineOptions
from corellm.device import gpu_count
from corellm.engine.resolve import resolve
from corellm.errors import InvalidRequestError, OptionError, PromptTooLongError
from corellm.model_source import find_model
from corellm.text.prompt import PromptFormat, prompt_format
from corellm.text.tokenizer import Tokenizer

QUICK_CHARS = 1 << 18  # text that is encoded in some tenths of a second, so that its tokens may as well be counted
MAX_DETAIL = 200  # characters of a model's name, which may be a mistake of any length, in a line of progress


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A checked checkpoint with its text side. `launch` starts an engine on it; `settings` is what that would run with.

    `eos_ids` end a generation: those of the checkpoint's files and of the tokenizer. Threads may share one.
    """

    launch: Launch
    settings: Settings
    vocab: int
    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None
    prompt_format: PromptFormat | None

    @property
    def max_request_tokens(self) -> int:
        """Prompt + output of the longest request, as far as it is known before there is an engine."""
        settings = self.settings
        if settings.kv_blocks is None:
            return settings.max_model_len
        return min(settings.max_model_len, settings.kv_blocks * settings.page_size + 1)

    def encode_prompt(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Token ids of a plain prompt: text gets the model's BOS if it has one of its own, ids stay as they are.

        Raises `PromptTooLongError` for text that can be seen not to fit without encoding it, `InvalidRequestError`
        where there is no tokenizer.
        """
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer, so text cannot be encoded; send token ids", "prompt")
        self._check_length(prompt, self.tokenizer)
        return self.tokenizer.encode(prompt, special=True, bos=self.tokenizer.adds_bos)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation in the model's prompt format, whose options are those of `PromptFormat.encode`.

        Raises `InvalidRequestError`, naming the field.
        """
        if self.prompt_format is None:
            raise InvalidRequestError("the model has no tokenizer; send token ids as prompt", "messages")
        return self.prompt_format.encode(messages, **template)

    def _check_length(self, text: str, tokenizer: Tokenizer) -> None:
        limit = self.max_request_tokens
        least = tokenizer.least_tokens(text) if len(text) > QUICK_CHARS else 0
        if least >= limit:
            raise PromptTooLongError(
                f"the prompt has at least {least} tokens; with at least one of output, a request may have {limit}: "
                "shorten the prompt",
                "prompt",
            )


def model_name(options: EngineOptions) -> str:
    """The model that the options ask for; without a GPU the demo is the default. Raises `OptionError`."""
    if options.model is not None:
        return options.model
    if options.device == "cuda" or (options.device == "auto" and gpu_count()):
        raise OptionError("--model is not given; name a local folder, a Hugging Face id, or 'demo'")
    return DEMO_MODEL


def find(options: EngineOptions, report: Callable[[Progress], None]) -> FoundModel:
    """Find, fetch or convert the model, and check it and the options against each other.

    Raises the typed error of whatever is wrong.
    """
    name = model_name(options)
    report(Progress(stage="resolve model", detail=name[:MAX_DETAIL]))
    return load(Launch(options=options, model_path=str(find_model(name, report))))


def load(launch: Launch) -> FoundModel:
    """The model in a folder, checked against the options. Raises the typed error of whatever is wrong."""
    path, options = Path(launch.model_path), launch.options
    checkpoint = open_checkpoint(path, options.load_format)
    tokenizer = _tokenizer(path, options.load_format)
    with naming(path):
        chats = prompt_format(tokenizer) if tokenizer is not None else None
    vocab = checkpoint.spec.vocab
    # A tokenizer may know more tokens than the model, such as those of a model that was tuned further.
    ends = (token for token in tokenizer.eos_ids if token < vocab) if tokenizer is not None else ()
    return FoundModel(
        launch=launch,
        settings=resolve(launch, checkpoint),
        vocab=vocab,
        eos_ids=frozenset(checkpoint.eos_ids).union(ends),
        tokenizer=tokenizer,
        prompt_format=chats,
    )


def _tokenizer(path: Path, load_format: str) -> Tokenizer | None:
    """None only for dummy weights without a tokenizer: prompts must then be token ids."""
    if load_format == "dummy" and not is_there(path / "tokenizer.json"):
        return None
    return Tokenizer.from_folder(path)
