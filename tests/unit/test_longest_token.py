"""The bound on what one token stands for: never above a count that a tokenizer makes, and close enough to be of use."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from corellm.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import write_byte_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ADVERSE = (
    " " * 4096,
    "-" * 4096,
    "\n" * 999,
    "a" * 3000,
    "<|eot_id|>" * 100,
    " <|im_end|> \n" * 100,
    "\u00e9" * 500,
    "e\u0301" * 500,
    "\U0001f44d" * 400,
    "\ud800" * 300,
    "\0" * 300,
)


def byte_level(*, removes: bool = False, vocab: list[str] = ALPHABET) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(vocab)}, []))
    cut = pre_tokenizers.Split(" ", "removed" if removes else "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece_like(*, byte_fallback: bool = True, bytes_known: int = 256) -> tokenizers.Tokenizer:
    symbols = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(bytes_known)), "\u2581", "a", "aa"]
    vocab = {symbol: number for number, symbol in enumerate(symbols)}
    model = models.BPE(vocab, [("a", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def check_never_above(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    texts = [*ADVERSE, *("".join(rng.choices("a -\n\u00e9<|eot_id|>0\U0001f44d", k=400)) for _ in range(50))]
    for text in texts:
        for special in (False, True):
            assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, special=special)), text[:20]


def test_llama_tokens_are_never_fewer(llama31_tokenizer: Tokenizer) -> None:
    check_never_above(llama31_tokenizer)
    assert llama31_tokenizer.least_tokens(" " * 128_000) == 1000  # its longest token is 128 spaces


def test_chatml_tokens_are_never_fewer(chatml_tokenizer: Tokenizer) -> None:
    check_never_above(chatml_tokenizer)
    assert chatml_tokenizer.least_tokens("a" * 1_000_000) > 10_000


def test_sentencepiece_like_tokens_are_never_fewer() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), {}, None)
    check_never_above(tokenizer)
    assert tokenizer.least_tokens("a" * 600) == 100  # `<0x41>` is spelled in six bytes


def test_bytes_are_tokens_one_by_one(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    assert Tokenizer.from_folder(tmp_path).least_tokens("\u00e9" * 100) == 200


def with_normalizer(normalizer: normalizers.Normalizer) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.normalizer = normalizer
    return backend


def with_added(token: AddedToken) -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([token])
    return backend


def word_level() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.model = models.WordLevel({symbol: number for number, symbol in enumerate(ALPHABET)}, unk_token="a")
    return backend


def test_added_tokens_count_as_the_longest_too() -> None:
    spelling = f"<{'x' * 50}>"
    tokenizer = Tokenizer(with_added(AddedToken(spelling)), {}, None)
    assert len(tokenizer.encode(spelling * 100)) == tokenizer.least_tokens(spelling * 100) == 100


@pytest.mark.parametrize(
    "backend",
    [
        with_normalizer(normalizers.Strip()),
        with_normalizer(normalizers.Replace("a", "")),
        with_normalizer(normalizers.Replace(tokenizers.Regex("a+"), "aa")),
        with_normalizer(normalizers.Sequence([normalizers.Prepend("x"), normalizers.NFC()])),
        with_added(AddedToken("<x>", lstrip=True)),
        with_added(AddedToken("<x>", rstrip=True)),
        byte_level(removes=True),
        byte_level(vocab=[symbol for symbol in ALPHABET if symbol != "a"]),
        word_level(),
        sentencepiece_like(bytes_known=255),
        sentencepiece_like(byte_fallback=False),
    ],
    ids=lambda backend: "",
)
def test_where_text_may_vanish_there_is_no_bound(backend: tokenizers.Tokenizer) -> None:
    assert Tokenizer(backend, {}, None).least_tokens("a" * 1_000_000) == 0
