"""What a front end knows of a model before any process runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from corellm.comms.messages import Progress
from corellm.comms.settings import Launch
from corellm.config import EngineOptions
from corellm.errors import CheckpointError, ModelNotFoundError, OptionError, PromptTooLongError
from corellm.found_model import QUICK_CHARS, FoundModel, find, load
from corellm.text.tokenizer import Tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 403,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


@pytest.fixture
def folder(chatml_tokenizer_folder: Path, tmp_path: Path) -> Path:
    """A model of 403 tokens, as many as its tokenizer has: its own end of turn is id 2."""
    return shutil.copytree(chatml_tokenizer_folder, tmp_path / "model")


def loaded(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> FoundModel:
    (folder / "config.json").write_text(json.dumps(config))
    chosen = EngineOptions(load_format="dummy", device="cpu", **options)
    return load(Launch(options=chosen, model_path=str(folder)))


def test_stop_ids_are_those_of_the_files_and_of_the_tokenizer(folder: Path) -> None:
    assert loaded(folder).eos_ids == {0, 2}


def test_an_end_that_the_tokenizer_alone_knows_is_no_stop_id(folder: Path) -> None:
    """Every request carries the stop ids to the engine, which refuses those that the model does not have."""
    assert loaded(folder, CONFIG | {"vocab_size": 2}).eos_ids == {0}


def test_a_chat_template_that_is_no_template_names_its_folder(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% if")
    with pytest.raises(CheckpointError) as refused:
        loaded(folder)
    assert refused.value.message.startswith(f"{folder}: the tokenizer's chat_template is not valid")


def test_progress_shows_no_more_of_a_name_than_a_line_holds() -> None:
    seen: list[Progress] = []
    with pytest.raises(ModelNotFoundError):
        find(EngineOptions(model="x" * 5000), seen.append)
    assert [len(progress.detail) for progress in seen] == [200]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_tokens": 1}, "--max-batch-tokens is 1; it must be at least 2, and above --max-seqs"),
        (
            {"max_batch_tokens": 1, "max_seqs": 1},
            "--max-batch-tokens is 1; it must be at least 2, and above --max-seqs",
        ),
        ({"max_batch_tokens": 8, "max_seqs": 8}, "--max-batch-tokens is 8; with --max-seqs 8 it must be at least 9"),
        ({"max_model_len": 65}, "--max-model-len is 65; this model allows up to 64"),
    ],
)
def test_a_limit_that_cannot_be_says_what_can(folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        loaded(folder, **options)
    assert refused.value.message == message


def test_limits_may_be_as_small_as_is_said(folder: Path) -> None:
    settings = loaded(folder, max_batch_tokens=2).settings
    assert (settings.max_batch_tokens, settings.max_seqs) == (2, 1)
    assert loaded(folder, max_batch_tokens=9, max_seqs=8).settings.max_batch_tokens == 9


def test_a_length_beyond_32_bits_is_cut(folder: Path) -> None:
    config = CONFIG | {"max_position_embeddings": 10**12}
    assert loaded(folder, config).settings.max_model_len == 2**31 - 2
    with pytest.raises(OptionError, match=r"allows up to 2147483646$"):
        loaded(folder, config, max_model_len=2**31)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(folder)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    longest = max(size for size in range(100) if tokenizer.least_tokens("a" * size) <= 1)
    encoded: list[str] = []

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return []

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(
        PromptTooLongError, match=r"^the prompt has at least \d{5,} tokens; .* may have 64: "
    ) as refused:
        model.encode_prompt("a" * 1_000_000)
    assert refused.value.param == "prompt"
    assert encoded == []
    model.encode_prompt("a" * QUICK_CHARS)  # quickly counted, and then refused by its exact number
    monkeypatch.setattr("corellm.found_model.QUICK_CHARS", 0)
    for text in ("a" * 64, "a" * (63 * longest)):  # these may fit, for all that is known
        model.encode_prompt(text)
    assert len(encoded) == 3
    with pytest.raises(PromptTooLongError, match="at least 64 tokens"):
        model.encode_prompt("a" * (63 * longest + 1))
