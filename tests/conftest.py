"""Material that tests share: Llama 3.1's own tokenizer, and a small ChatML one trained here."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from corellm.model_source import find_model
from corellm.text.tokenizer import Tokenizer

MATERIAL = Path(__file__).parent.parent / ".material"

# SmolLM2's template: one default system message, ChatML turns.
CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def llama31_tokenizer_folder() -> Path:
    """Folder with Llama 3.1's tokenizer.json; CORELLM_TEST_MATERIAL names another folder than `.material`."""
    given = os.environ.get("CORELLM_TEST_MATERIAL")
    folder = Path(given or MATERIAL) / "llama31-tokenizer"
    if not (folder / "tokenizer.json").is_file():
        message = f"{folder} has no tokenizer.json; `make test` downloads it"
        pytest.fail(message)
    return folder


@pytest.fixture(scope="session")
def llama31_tokenizer(llama31_tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(llama31_tokenizer_folder)


@pytest.fixture(scope="session")
def chatml_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of a few hundred tokens, with SmolLM2's special tokens and chat template."""
    folder = tmp_path_factory.mktemp("chatml")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    backend.train_from_iterator([CHATML_TEMPLATE, "the quick brown fox jumps over the lazy dog " * 20], trainer)
    backend.add_tokens(["<think>"])  # an added token that is not special
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def chatml_tokenizer(chatml_tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(chatml_tokenizer_folder)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder, converted on first use."""
    return find_model("demo", lambda _: None)
