"""What `EngineNode` takes for prompts, conversations and params, and how it refuses the rest."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corellm import EngineNode, SamplingParams
from corellm.errors import InvalidRequestError, OptionError
from corellm.node_inputs import check_text, params_for, plain_conversations, plain_prompt, plain_prompts

ONE = [[1, 2, 3]]
MESSAGE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", ["text"]),
        (np.str_("text"), ["text"]),
        ([], []),
        (["a", "b"], ["a", "b"]),
        (("a", [1, 2]), ["a", [1, 2]]),
        ({"a": 1}.keys(), ["a"]),
        ({"a"}, ["a"]),
        ([1, 2, 3], ONE),
        (range(1, 4), ONE),
        (array("i", [1, 2, 3]), ONE),
        (np.array([1, 2, 3]), ONE),
        (np.array([[1, 2], [3, 4]], dtype=np.uint8), [[1, 2], [3, 4]]),
        ([np.int64(1), np.int32(2), 3], ONE),
        ([HTTPStatus.OK, 3], [[200, 3]]),
        ([np.array([1, 2, 3])], ONE),
        ([np.array([1]), np.array([2, 3])], [[1], [2, 3]]),
        ([[np.int64(1)], range(2)], [[1], [0, 1]]),
        ([[]], [[]]),
        (np.array(["a", "b"]), ["a", "b"]),
    ],
)
def test_prompts_of_every_kind_become_texts_and_lists_of_ids(given: Any, expected: list[Any]) -> None:
    found = plain_prompts(given)
    assert found == expected
    assert {type(token) for prompt in found if not isinstance(prompt, str) for token in prompt} <= {int}


def test_what_becomes_of_the_callers_list_does_not_matter() -> None:
    given = [1, 2, 3]
    for found in (plain_prompt(given), plain_prompts([given])[0], plain_prompts(given)[0]):
        given.append(4)
        assert found == [1, 2, 3]
        del given[3:]


def test_generators_are_prompts_ids_conversations_and_params() -> None:
    assert plain_prompts(text for text in "ab") == ["a", "b"]
    assert plain_prompts(iter([1, 2, 3])) == ONE
    assert plain_prompts(iter([iter([1, 2, 3])])) == ONE
    assert plain_prompt(iter([1, 2, 3])) == [1, 2, 3]
    assert plain_conversations(iter([MESSAGE])) == [[MESSAGE]]
    assert plain_conversations(iter([iter([MESSAGE]), (MESSAGE,)])) == [[MESSAGE]] * 2
    each = [SamplingParams(max_tokens=n) for n in (1, 2)]
    assert params_for(2, iter(each)) == each


def test_an_error_in_a_callers_generator_stays_the_callers() -> None:
    def faulty() -> Iterator[str]:
        yield "a"
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        plain_prompts(faulty())


@pytest.mark.parametrize(
    ("check", "given", "named"),
    [
        (plain_prompts, None, "prompts is None"),
        (plain_prompts, 5, "prompts is 5"),
        (plain_prompts, 5.0, "prompts is 5.0"),
        (plain_prompts, np.int64(5), "prompts is 5"),
        (plain_prompts, np.array(5), "prompts is 5"),
        pytest.param(plain_prompts, 10**5000, "prompts is of type int", id="digits"),
        (plain_prompts, b"abc", "prompts is b'abc'"),
        (plain_prompts, bytearray(b"abc"), "prompts is bytearray"),
        (plain_prompts, memoryview(b"abc"), "prompts is <memory"),
        (plain_prompts, {"prompt": "a"}, "prompts is {'prompt': 'a'}"),
        (plain_prompts, Path("a"), "prompts is "),
        (plain_prompts, [b"abc"], "prompts[0] is b'abc'"),
        (plain_prompts, ["a", None], "prompts[1] is None"),
        (plain_prompts, ["a", 5], "prompts[1] is 5"),
        (plain_prompts, [5, "a"], "prompts[1] is 'a'"),
        (plain_prompts, [1, 2.0], "prompts[1] is 2.0"),
        (plain_prompts, [1, True], "prompts[1] is True"),
        (plain_prompts, [True], "prompts[0] is True"),
        (plain_prompts, np.array([[1.5]]), "prompts[0][0] is 1.5"),
        (plain_prompts, np.array([[[1]]]), "prompts[0][0] is [1]"),
        (plain_prompts, ["a", [1, "b"]], "prompts[1][1] is 'b'"),
        (plain_prompt, None, "prompt is None"),
        (plain_prompt, ["a"], "prompt[0] is 'a'"),
        (plain_prompt, b"a", "prompt is b'a'"),
        (plain_conversations, None, "conversations is None"),
        (plain_conversations, "hi", "conversations is 'hi'"),
        (plain_conversations, MESSAGE, "conversations is {"),
        (plain_conversations, ["hi"], "conversations[0] is 'hi'"),
        (plain_conversations, [[MESSAGE], MESSAGE], "conversations[1] is {"),
    ],
)
def test_anything_else_is_refused_in_one_line(check: Callable[[Any], Any], given: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(given)
    assert refused.value.message.startswith(named)
    assert "; it must be " in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 2}, "params is {'max_tokens': 2}; it must be SamplingParams, or a list with one for each"),
        (5, "params is 5; it must be SamplingParams"),
        ([None, SamplingParams()], "params[0] is None; it must be SamplingParams"),
        ([SamplingParams(), {"n": 1}], "params[1] is {'n': 1}; it must be SamplingParams"),
        ([SamplingParams()], "params has 1 entries for 2 prompts; give one, or one for each"),
        (itertools.repeat(SamplingParams()), "params has more than 2 entries for 2 prompts"),
    ],
)
def test_params_that_do_not_fit_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        params_for(2, given)
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("check", "given", "named"),
    [
        (plain_prompts, "ab\ud800", "prompts holds '\\ud800', half of a surrogate pair, at character 2 "),
        (plain_prompts, ["a", "\udfff"], "prompts[1] holds '\\udfff'"),
        (plain_prompt, "\ud800", "prompt holds"),
        (plain_conversations, [{"role": "user", "content": "\ud800"}], "conversations holds"),
        (
            plain_conversations,
            [[MESSAGE], [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]],
            "conversations[1] holds",
        ),
        (plain_conversations, [{"role": "assistant", "tool_calls": [{"function": {"\ud800": 1}}]}], "conversations h"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused(check: Callable[[Any], Any], given: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(given)
    assert refused.value.message.startswith(named)
    refused.value.message.encode()


def test_a_value_that_holds_itself_is_looked_through_once() -> None:
    endless: list[Any] = ["a"]
    endless.append({"itself": endless})
    check_text("tools", endless)


def test_a_model_may_be_a_path() -> None:
    assert EngineNode(Path("some") / "folder")._options.model == str(Path("some") / "folder")
    for wrong in (5, b"folder", ["folder"]):
        with pytest.raises(OptionError, match=r"--model is .*; it must be text"):
            EngineNode(wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"on_progress is 5; it must be a function"):
        EngineNode(on_progress=5)  # type: ignore[arg-type]
