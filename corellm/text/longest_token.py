"""How much text one token can stand for.

It bounds a text's tokens from below. So a text that is far too long for a model can be refused without encoding it,
which takes a minute and gigabytes of memory for what a request may hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers.models import BPE

_KEEPS_ALL = ("ByteLevel", "Digits", "Metaspace", "Split")  # pre-tokenizers that only cut, or write longer


def longest_token(backend: tokenizers.Tokenizer, byte_alphabet: Mapping[str, int]) -> int | None:
    """The most bytes of UTF-8 text that one token stands for; None where some text may go without a token.

    Text does so where a normalizer or pre-tokenizer drops or shortens it, where an added token swallows the space
    around it, and where the vocabulary lacks bytes: those are dropped, or a run of them becomes one unknown token.
    """
    normalizer, cutter = _state(backend.normalizer), _state(backend.pre_tokenizer)
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(backend.model, BPE) or not all(map(_lengthens, normalizer)) or not all(map(_only_cuts, cutter)):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    if any(step["type"] == "ByteLevel" for step in cutter):
        has_bytes, longest = byte_alphabet.keys() <= vocabulary.keys(), max(map(len, vocabulary), default=0)
    else:
        fallback = (f"<0x{byte:02X}>" for byte in range(256))
        has_bytes = backend.model.byte_fallback and all(token in vocabulary for token in fallback)
        longest = max((len(token.encode()) for token in vocabulary), default=0)
    if not has_bytes:
        return None
    return max([longest, *(len(token.content.encode()) for token in added)])


def _state(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if part is None:
        return []
    return _steps(json.loads(part.__getstate__()))


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    parts = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for part in parts for step in _steps(part)] if state["type"] == "Sequence" else [state]


def _lengthens(normalizer: Mapping[str, Any]) -> bool:
    """Whether no text gets shorter in it: SentencePiece's mark in front, and for each space."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return isinstance(pattern, str) and len(normalizer["content"].encode()) >= len(pattern.encode())
    return bool(normalizer["type"] == "Prepend")


def _only_cuts(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer["type"] in _KEEPS_ALL and pre_tokenizer.get("behavior") != "Removed"
