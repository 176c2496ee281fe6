"""Stop strings against a search of the whole text, and the assembler that joins them with the detokenizer."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest

from corellm.sampling_params import SamplingParams
from corellm.text.assembler import TextAssembler, TextDelta
from corellm.text.stop_strings import StopStrings
from corellm.text.tokenizer import Tokenizer


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search the whole text: the match that ends first, of those the one that starts first."""
    found = [
        (end, end - len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)
    ]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


def feed(stops: StopStrings, chunks: list[str], result: str) -> str:
    """Push `chunks`; what is out must at every moment be a beginning of `result`."""
    out = ""
    for chunk in chunks:
        out += stops.push(chunk)
        assert result.startswith(out)
    return out + stops.flush()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("say STOP now", ["STOP"]),
        ("aaab", ["aab"]),
        ("abcde", ["abcd", "bc"]),
        ("abcde", ["bcd", "cd", "d"]),
        ("xababc", ["ababd", "abc"]),
        ("no match ababab", ["ababac"]),
        ("tail\n", ["\n\n"]),
        ("🫨🫨x", ["🫨x"]),
        ("abcabd", ["abcabe", "bd"]),
    ],
)
def test_every_split_gives_the_same(text: str, stops: list[str], include: bool) -> None:
    result, stop = expected(text, stops, include)
    for cuts in range(2 ** (len(text) - 1)):
        ends = [0, *(n + 1 for n in range(len(text) - 1) if cuts >> n & 1), len(text)]
        found = StopStrings(stops, include)
        assert feed(found, [text[a:b] for a, b in pairwise(ends)], result) == result
        assert found.matched == stop


def test_random_texts_and_stops() -> None:
    rng = random.Random(2)
    matched = 0
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("abc", [4, 4, 1], k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        include = rng.random() < 0.5
        result, stop = expected(text, stops, include)
        chunks, rest = [], text
        while rest:
            size = rng.randint(1, 6)
            chunks.append(rest[:size])
            rest = rest[size:]
        found = StopStrings(stops, include)
        assert feed(found, chunks, result) == result, (text, stops)
        assert found.matched == stop
        matched += stop is not None
    assert 500 < matched < 2900


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["END"], include=False)
    assert stops.push("the E") == "the "
    assert stops.push("N") == ""
    assert stops.push("E") == "EN"
    assert stops.flush() == "E"


def test_nothing_comes_after_a_match() -> None:
    stops = StopStrings(["b"], include=False)
    assert stops.push("abc") == "a"
    assert stops.push("def") == ""
    assert stops.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    stops = StopStrings([], include=False)
    assert stops.push("abc") == "abc"
    assert stops.flush() == ""


def test_a_match_that_ends_while_unarmed_does_not_count() -> None:
    stops = StopStrings(["ab"], include=False)
    assert stops.push("xab", armed=False) + stops.push("ya") + stops.push("b") == "xaby"
    assert stops.matched == "ab"


def test_cost_does_not_grow_with_the_stop_string() -> None:
    stops = StopStrings(["a" * 2000 + "b"], include=False)
    start = time.perf_counter()
    for _ in range(20000):
        stops.push("a")
    # About 0.02 s; trying 2000 beginnings for each character would take seconds.
    assert time.perf_counter() - start < 1.0


def params(**given: object) -> SamplingParams:
    return SamplingParams(**given)  # type: ignore[arg-type]


def test_tokens_count_up_to_the_one_that_completes_a_stop_string(chatml_tokenizer: Tokenizer) -> None:
    ids = [chatml_tokenizer.encode(char)[0] for char in "abcSTOPxyz"]
    whole = TextAssembler(chatml_tokenizer, params(stop=("STOP",)))
    assert whole.push(ids) == TextDelta("abc", 7)
    assert whole.stop == "STOP"
    assert whole.push(ids) == TextDelta("", 0)
    assert whole.finish() == ""
    single = TextAssembler(chatml_tokenizer, params(stop=("STOP",)))
    deltas = [single.push([token]) for token in ids]
    assert "".join(delta.text for delta in deltas) == "abc"
    assert [delta.tokens for delta in deltas] == [1] * 7 + [0] * 3


def test_stop_string_may_be_included(chatml_tokenizer: Tokenizer) -> None:
    text = TextAssembler(chatml_tokenizer, params(stop=("STOP",), include_stop_str_in_output=True))
    assert text.push(chatml_tokenizer.encode("abcSTOPxyz")).text + text.finish() == "abcSTOP"


def test_unfinished_stop_string_comes_out_at_the_end(chatml_tokenizer: Tokenizer) -> None:
    text = TextAssembler(chatml_tokenizer, params(stop=("STOP",)))
    assert text.push(chatml_tokenizer.encode("abcSTO")).text == "abc"
    assert text.finish() == "STO"
    assert text.stop is None


def test_unfinished_character_comes_out_at_the_end(chatml_tokenizer: Tokenizer) -> None:
    ids = chatml_tokenizer.encode("é")
    assert len(ids) == 2
    for stop in ((), ("STOP",)):
        text = TextAssembler(chatml_tokenizer, params(stop=stop))
        assert text.push(ids[:1]) == TextDelta("", 1)
        assert text.finish() == "\ufffd"


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize(
    ("include", "skip", "stop_text", "shown"),
    [
        (False, True, "!", ""),
        (True, True, "!", "!"),
        (False, False, "<|im_end|>", ""),
        (False, True, "<|im_end|>", ""),
        (True, True, "<|im_end|>", ""),
        (True, False, "<|im_end|>", "<|im_end|>"),
    ],
)
def test_stop_id_shows_only_when_asked(
    chatml_tokenizer: Tokenizer, stop: tuple[str, ...], include: bool, skip: bool, stop_text: str, shown: str
) -> None:
    settings = params(stop=stop, include_stop_str_in_output=include, skip_special_tokens=skip)
    ids = [*chatml_tokenizer.encode("ok"), *chatml_tokenizer.encode(stop_text, special=True)]
    text = TextAssembler(chatml_tokenizer, settings)
    delta = text.push(ids, ended_by_stop_id=True)
    assert delta.text + text.finish() == "ok" + shown
    assert delta.tokens == len(ids)


def test_stop_string_before_the_stop_id_leaves_it_uncounted(chatml_tokenizer: Tokenizer) -> None:
    ids = [*(chatml_tokenizer.encode(char)[0] for char in "aS"), 2]
    text = TextAssembler(chatml_tokenizer, params(stop=("S",)))
    assert text.push(ids, ended_by_stop_id=True) == TextDelta("a", 2)


def test_min_tokens_come_before_any_stop_string(chatml_tokenizer: Tokenizer) -> None:
    ids = [chatml_tokenizer.encode(char)[0] for char in "aSbSc"]
    for min_tokens in (2, 3):  # a stop string may come no sooner than a stop id: as token min_tokens + 1
        text = TextAssembler(chatml_tokenizer, params(stop=("S",), min_tokens=min_tokens))
        assert text.push(ids) == TextDelta("aSb", 4)
