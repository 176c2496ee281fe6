"""Stream chunks: put together they say what the unstreamed body says, however the answer was split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletionChunk

from corellm.openai_api.chunks import StreamedAnswer
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.requests import ChatRequest, CompletionRequest, parse_request
from corellm.openai_api.responses import Head, response_body
from corellm.text_engine import Completion, Delta, TokenLogprob

HEAD = Head("id-1", 17, "m")
TEXT = "naïve 🦙 STOP"
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Endpoint.COMPLETIONS: {"prompt": ["x", "y"]},
}


def token_bytes(token: int) -> bytes:
    return bytes([token])


def request_of(endpoint: Endpoint, **fields: Any) -> ChatRequest | CompletionRequest:
    return parse_request(endpoint, {**BODIES[endpoint], "stream": True, **fields})


def completion(tokens: bytes, text: str, *, logprobs: bool) -> Completion:
    scored = tuple(TokenLogprob(token, -0.1 * (i + 1), ((token, -0.1), (65, -2.0))) for i, token in enumerate(tokens))
    return Completion(
        text=text, token_ids=tuple(tokens), finish_reason="stop", stop_reason=None, prompt_tokens=5, cached_tokens=3,
        output_tokens=len(tokens), logprobs=scored if logprobs else None, queued_s=0.0, first_token_s=0.0, total_s=0.0,
        preemptions=0,
    )  # fmt: skip


@st.composite
def answers(draw: st.DrawFn, logprobs: bool) -> tuple[Completion, list[Delta]]:
    """An answer whose tokens are bytes and whose text may be cut at a stop string, split anywhere: text lags behind
    its tokens, as it does while it may still be a stop string or is part of a character."""
    raw = TEXT.encode()
    text = TEXT[: draw(st.integers(0, len(TEXT)))]
    end = completion(raw, text, logprobs=logprobs)
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    deltas, sent = [], 0
    for start, stop in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        out = len(text) if stop == len(raw) and start == ([0, *cuts])[-1] else draw(st.integers(sent, len(text)))
        out = min(out, len(raw[:stop].decode(errors="ignore")))
        out = max(out, sent)
        deltas.append(
            Delta(
                text=text[sent:out],
                token_ids=list(raw[start:stop]),
                logprobs=list((end.logprobs or ())[start:stop]),
            )
        )
        sent = out
    deltas[-1].text += text[sent:]
    deltas[-1].end = end
    return end, deltas


def joined(endpoint: Endpoint, chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of an unstreamed body, put together from chunks."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = found.setdefault(part["index"], {"text": "", "logprobs": None, "finish_reason": None})
            whole["text"] += part["delta"].get("content", "") if endpoint is Endpoint.CHAT else part["text"]
            whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
            for name, values in (part["logprobs"] or {}).items():
                if values is not None:
                    whole["logprobs"] = whole["logprobs"] or {}
                    whole["logprobs"].setdefault(name, []).extend(values)
    return [found[index] for index in sorted(found)]


def expected(endpoint: Endpoint, body: dict[str, Any]) -> list[dict[str, Any]]:
    choices = []
    for choice in body["choices"]:
        logprobs = choice["logprobs"] and {
            name: value for name, value in choice["logprobs"].items() if value is not None
        }
        text = choice["message"]["content"] if endpoint is Endpoint.CHAT else choice["text"]
        choices.append({"text": text, "logprobs": logprobs, "finish_reason": choice["finish_reason"]})
    return choices


@pytest.mark.parametrize("endpoint", list(Endpoint))
@given(data=st.data())
def test_chunks_join_to_the_whole_body(endpoint: Endpoint, data: st.DataObject) -> None:
    logprobs = data.draw(st.booleans())
    asked = {"logprobs": True, "top_logprobs": 2} if endpoint is Endpoint.CHAT else {"logprobs": 2}
    request = request_of(endpoint, n=2, stream_options={"include_usage": True}, **(asked if logprobs else {}))
    prompts = 1 if endpoint is Endpoint.CHAT else 2
    drawn = [data.draw(answers(logprobs)) for _ in range(2 * prompts)]
    streamed = StreamedAnswer(request, HEAD, token_bytes, [5] * prompts)
    chunks: list[dict[str, Any]] = []
    left = [list(deltas) for _, deltas in drawn]
    while any(left):
        index = data.draw(st.sampled_from([i for i, deltas in enumerate(left) if deltas]))
        chunks += streamed.push(index, left[index].pop(0))
    last = list(streamed.finish())
    ends = [end for end, _ in drawn]
    body = response_body(request, HEAD, [ends[i : i + 2] for i in range(0, len(ends), 2)], token_bytes)
    assert joined(endpoint, chunks) == expected(endpoint, body)
    assert [chunk["usage"] for chunk in last] == [body["usage"]]
    assert all(chunk["usage"] is None for chunk in chunks)
    for chunk in [*chunks, *last]:
        if endpoint is Endpoint.CHAT:
            ChatCompletionChunk.model_validate(chunk, strict=True)
        else:
            OpenAICompletion.model_validate({**chunk, "choices": [c for c in chunk["choices"] if c["finish_reason"]]})


def test_a_message_opens_with_its_role_and_ends_with_its_reason() -> None:
    streamed = StreamedAnswer(request_of(Endpoint.CHAT), HEAD, token_bytes, [5])
    end = completion(b"hi", "hi", logprobs=False)
    first = list(streamed.push(0, Delta(text="h", token_ids=[104])))
    last = list(streamed.push(0, Delta(text="i", token_ids=[105], end=end)))
    deltas = [chunk["choices"][0]["delta"] for chunk in first + last]
    assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {"content": "h"}, {"content": "i"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in first + last] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in first + last)
    assert list(streamed.finish()) == []


def test_continuous_usage_counts_as_it_goes() -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    streamed = StreamedAnswer(request_of(Endpoint.COMPLETIONS, stream_options=options), HEAD, token_bytes, [5, 7])
    end = completion(b"hi", "hi", logprobs=False)
    chunks = [*streamed.push(0, Delta(text="h", token_ids=[104]))]
    chunks += streamed.push(1, Delta(text="hi", token_ids=[104, 105], end=end))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [13, 15]


@pytest.mark.parametrize("endpoint", list(Endpoint))
def test_a_delta_without_text_says_nothing(endpoint: Endpoint) -> None:
    streamed = StreamedAnswer(request_of(endpoint), HEAD, token_bytes, [5, 5][: 1 if endpoint is Endpoint.CHAT else 2])
    list(streamed.push(0, Delta(text="h", token_ids=[104])))
    assert list(streamed.push(0, Delta(text="", token_ids=[240]))) == []
