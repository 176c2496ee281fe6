"""SamplingParams: what is allowed, what is refused, and that a refusal names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from corellm.errors import InvalidRequestError
from corellm.sampling_params import FIELDS, SamplingParams

INT32_MAX = 2**31 - 1

RANGES: list[tuple[str, tuple[Any, ...], tuple[Any, ...]]] = [
    ("max_tokens", (None, 1, INT32_MAX), (0, -1, INT32_MAX + 1, 1.5, True, "8")),
    ("min_tokens", (0, 7), (-1, None, 1.0, True)),
    ("temperature", (0, 0.0, 1, 2.0), (-0.1, 2.1, math.nan, math.inf, "hot", None, True)),
    ("top_p", (0.001, 1, 1.0), (0, 0.0, -1, 1.01, math.nan, None)),
    ("top_k", (-1, 0, 1, INT32_MAX), (-2, 1.5, None, True)),
    ("min_p", (0, 0.5, 1), (-0.1, 1.1, math.nan)),
    ("presence_penalty", (-2, 0.5, 2), (-2.1, 2.1, math.nan)),
    ("frequency_penalty", (-2, 0.5, 2), (-2.1, 2.1, math.inf)),
    ("repetition_penalty", (0.1, 1, 10), (0, -1, 10.1)),
    ("seed", (None, 0, -(2**63), 2**63 - 1), (2**63, -(2**63) - 1, 0.5, True)),
    ("logprobs", (None, 0, 20), (-1, 21, True, "all")),
]


@pytest.mark.parametrize(("name", "allowed", "refused"), RANGES, ids=[name for name, _, _ in RANGES])
def test_range_of_each_number(name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(InvalidRequestError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name
        assert caught.value.message.startswith(f"{name} is ")
        assert "\n" not in caught.value.message


def test_min_tokens_may_reach_but_not_pass_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, above max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [("",), ("a", ""), (1,), (None,), tuple("abcdefghijklmnopq")])
def test_stop_strings_that_are_refused(stop: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop=stop)
    assert caught.value.param == "stop"


def test_sixteen_stop_strings_are_allowed() -> None:
    assert len(SamplingParams(stop=tuple("abcdefghijklmnop")).stop) == 16


@pytest.mark.parametrize("ids", [(-1,), (2**31,), (True,), ("1",), tuple(range(257))])
def test_stop_token_ids_that_are_refused(ids: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(stop_token_ids=ids)
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize("bias", [{-1: 0.0}, {"7": 0.0}, {7: 100.5}, {7: math.nan}, dict.fromkeys(range(1025), 0.0)])
def test_logit_bias_that_is_refused(bias: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("value", [None, 5, b"abc"])
def test_what_is_no_collection_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} is {value!r}; it must be a ")


def test_a_schema_alone_is_no_constraint() -> None:
    with pytest.raises(InvalidRequestError, match=r"^constraint is {'type': 'object'}; it must be a JsonConstraint"):
        SamplingParams(constraint={"type": "object"})  # type: ignore[arg-type]


def test_logit_bias_reaches_its_limits() -> None:
    bias = {0: -100.0, 1: 100, **dict.fromkeys(range(2, 1024), 0.0)}
    assert SamplingParams(logit_bias=bias).logit_bias == bias


def test_fields_name_every_parameter() -> None:
    assert set(FIELDS) == set(SamplingParams.__annotations__)
