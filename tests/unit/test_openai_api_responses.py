"""Response bodies, checked by the models of the `openai` package, and by hand where these are lenient."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import openai.types
import openai.types.chat
import pytest

from corellm.errors import (
    CoreLLMError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    NumericalError,
    OverloadedError,
    PromptTooLongError,
)
from corellm.openai_api.responses import Head, chat_body, completion_body, error_body, error_status, usage
from corellm.sampling_params import SamplingParams
from corellm.text_engine import Completion, TokenLogprob
from tests.support.fake_text_engine import ByteTokenizer, answer

HEAD = Head("id-1", 1_700_000_000, "m")
token_bytes = ByteTokenizer().token_bytes


def strictly(model: type[openai.BaseModel], body: dict[str, object]) -> None:
    """The body has every required field, of the right type, and none that the model does not know."""
    parsed = model.model_validate(body, strict=True)
    assert parsed.model_dump(exclude_unset=True) == body
    assert not parsed.model_extra


def test_chat_body() -> None:
    plain = answer("hi", SamplingParams())
    body = chat_body(HEAD, [plain, replace(plain, finish_reason="length")], token_bytes)
    strictly(openai.types.chat.ChatCompletion, body)
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]
    assert body["choices"][1]["message"] == {"role": "assistant", "content": "<hi>", "refusal": None}
    assert body["choices"][1]["logprobs"] is None


def test_completion_body_is_prompt_major() -> None:
    params = SamplingParams(max_tokens=3)
    groups = [[answer("a", params), answer("b", params)], [answer("c", params), answer("d", params)]]
    body = completion_body(HEAD, groups, token_bytes)
    strictly(openai.types.Completion, body)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "<a>"),
        (1, "<b>"),
        (2, "<c>"),
        (3, "<d>"),
    ]


def test_usage_counts_a_prompt_once_and_its_cache_as_what_no_choice_computed() -> None:
    one = answer("abcdef", SamplingParams())
    first = replace(one, prompt_tokens=6, cached_tokens=2, output_tokens=5)
    second = replace(first, cached_tokens=6, output_tokens=7)
    other = replace(first, prompt_tokens=10, cached_tokens=0, output_tokens=1)
    assert usage([[first, second], [other, other]]) == {
        "prompt_tokens": 16,
        "completion_tokens": 14,
        "total_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def spelled(raw: bytes, text: str) -> Completion:
    """A completion of one token for each byte, with the second likeliest beside it."""
    logprobs = tuple(TokenLogprob(byte, -0.25, ((byte, -0.25), (0xE3, -2.0))) for byte in raw)
    return replace(answer("p", SamplingParams()), text=text, token_ids=tuple(raw), logprobs=logprobs)


def test_chat_logprobs_give_exact_bytes() -> None:
    body = chat_body(HEAD, [spelled("aé".encode(), "aé")], token_bytes)
    strictly(openai.types.chat.ChatCompletion, body)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "aé"
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -0.25, "bytes": [97]},
        {"token": "\ufffd", "logprob": -2.0, "bytes": [0xE3]},
    ]


def test_completion_logprobs_are_parallel_lists() -> None:
    body = completion_body(HEAD, [[spelled("aéb".encode(), "aéb")]], token_bytes)
    strictly(openai.types.Completion, body)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "bytes:\\xe3": -2.0}


def test_the_sampled_token_is_among_the_top_even_if_unlikely() -> None:
    unlikely = TokenLogprob(ord("z"), -9.0, ((ord("a"), -0.1),))
    one = replace(answer("p", SamplingParams()), text="z", logprobs=(unlikely,))
    top = completion_body(HEAD, [[one]], token_bytes)["choices"][0]["logprobs"]["top_logprobs"]
    assert top == [{"a": -0.1, "z": -9.0}]


def test_without_alternatives_completions_have_no_top_logprobs() -> None:
    body = completion_body(HEAD, [[answer("p", SamplingParams(logprobs=0))]], token_bytes)
    strictly(openai.types.Completion, body)
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None


def test_an_impossible_token_has_a_finite_logprob() -> None:
    one = replace(answer("p", SamplingParams()), text="z", logprobs=(TokenLogprob(122, -inf, ((97, -inf),)),))
    chat = chat_body(HEAD, [one], token_bytes)["choices"][0]["logprobs"]["content"][0]
    assert (chat["logprob"], chat["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    legacy = completion_body(HEAD, [[one]], token_bytes)["choices"][0]["logprobs"]
    assert (legacy["token_logprobs"], legacy["top_logprobs"]) == ([-9999.0], [{"a": -9999.0, "z": -9999.0}])


def test_offsets_behind_a_cut_text_stay_inside_it() -> None:
    body = completion_body(HEAD, [[spelled(b"ab##", "ab")]], token_bytes)
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("m", "top_p"), 400, "invalid_request_error", "top_p", None),
        (PromptTooLongError("m", "messages"), 400, "invalid_request_error", "messages", "context_length_exceeded"),
        (ModelNotFoundError("m"), 404, "invalid_request_error", None, "model_not_found"),
        (NumericalError("m"), 500, "server_error", None, "nan_logits"),
        (OverloadedError("m"), 429, "rate_limit_error", None, "over_capacity"),
        (EngineDeadError("m"), 503, "service_unavailable_error", None, "engine_dead"),
        (CoreLLMError("m"), 500, "server_error", None, "internal_error"),
    ],
)
def test_errors(error: CoreLLMError, status: int, kind: str, param: str | None, code: str | None) -> None:
    assert error_status(error) == status
    expected = {"error": {"message": "line 3: m", "type": kind, "param": param, "code": code}}
    assert error_body(error, prefix="line 3: ") == expected
