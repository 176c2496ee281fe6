"""Grammars over Llama 3.1's vocabulary: what JSON allows is allowed in the very tokens that the tokenizer writes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLTokenizer

from corellm.engine.grammar import compile_grammar, load_vocabulary, next_masks
from corellm.errors import CheckpointError, InvalidRequestError
from corellm.sampling_params import JsonConstraint
from corellm.text.tokenizer import Tokenizer

VOCAB = 128256
END = 128009


@pytest.fixture(scope="module")
def vocabulary(llama31_tokenizer_folder: Path) -> LLTokenizer:
    return load_vocabulary(llama31_tokenizer_folder, VOCAB, [128001])


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def value(rng: random.Random, depth: int = 3) -> Any:
    texts = ("", "Oslo", "naïve 你好 🦙", 'a "quoted" \\ line\n', "<|eot_id|>", " leading", "x" * 50)
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(texts): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    return rng.choice((texts[rng.randrange(len(texts))], rng.randint(-(10**9), 10**9), -1.5e-7, True, None))


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_json_is_allowed_as_the_tokenizer_writes_it(
    vocabulary: LLTokenizer, llama31_tokenizer: Tokenizer, layout: dict[str, Any]
) -> None:
    rng, executor = random.Random(5), LLExecutor(1)
    start = compile_grammar(vocabulary, JsonConstraint('{"type": "object"}'))
    for _ in range(25):
        matcher = start.deep_copy()
        text = json.dumps({"first": value(rng), "second": value(rng)}, ensure_ascii=False, **layout)
        for token in llama31_tokenizer.encode(text):
            (mask,) = next_masks(executor, [matcher], VOCAB)
            assert len(mask) == VOCAB // 32
            assert token in allowed(mask), (text, llama31_tokenizer.token_bytes(token))
            assert matcher.consume_token(token)
        assert matcher.is_accepting()


def test_no_control_token_is_allowed_but_those_that_end_an_answer_where_it_may_end(vocabulary: LLTokenizer) -> None:
    matcher, executor = compile_grammar(vocabulary, JsonConstraint('{"type": "integer"}')), LLExecutor(1)
    (before,) = next_masks(executor, [matcher], VOCAB)
    assert not {token for token in allowed(before) if token >= 128000}
    matcher.consume_token(16)  # "1"
    (after,) = next_masks(executor, [matcher], VOCAB)
    assert {token for token in allowed(after) if token >= 128000} == {128001, END}


def test_masks_of_several_grammars_are_those_of_each(vocabulary: LLTokenizer) -> None:
    executor = LLExecutor(1)
    matchers = [compile_grammar(vocabulary, JsonConstraint(json.dumps({"type": kind}))) for kind in ("object", "null")]
    together = next_masks(executor, matchers, VOCAB)
    alone = [next_masks(executor, [matcher], VOCAB)[0] for matcher in matchers]
    assert [mask.tolist() for mask in together] == [mask.tolist() for mask in alone]
    assert together[0].tolist() != together[1].tolist()


def test_white_space_does_not_go_on_for_ever(vocabulary: LLTokenizer, llama31_tokenizer: Tokenizer) -> None:
    matcher = compile_grammar(vocabulary, JsonConstraint('{"type": "object"}'))
    assert matcher.consume_tokens(llama31_tokenizer.encode("{"))
    (newline,) = llama31_tokenizer.encode("\n")
    taken = matcher.try_consume_tokens([newline] * 100)
    assert 10 <= taken <= 40


def test_a_model_without_a_tokenizer_or_an_end_has_no_vocabulary(
    tmp_path: Path, llama31_tokenizer_folder: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path, VOCAB, [])
    with pytest.raises(InvalidRequestError, match="ends an answer"):
        load_vocabulary(llama31_tokenizer_folder, 100, [200])
