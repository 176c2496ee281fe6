"""Answers of an engine as a chat takes them: text apart from tool calls, figures, and what is asked of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from corellm.chat.backend import AnswerEnd
from corellm.chat.engine_backend import EngineBackend
from corellm.sampling_params import SamplingParams
from corellm.text_engine import Completion, Delta
from tests.support.fake_text_engine import engine_info

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(text: str, reason: str) -> Completion:
    return Completion(
        text=text,
        token_ids=(1, 2),
        finish_reason=reason,
        stop_reason=None,
        prompt_tokens=20,
        cached_tokens=16,
        output_tokens=2,
        logprobs=None,
        queued_s=0.1,
        first_token_s=0.2,
        total_s=0.5,
        preemptions=0,
    )


class Engine:
    """Says `text` in pieces of a given size."""

    def __init__(self, text: str, size: int = 3, reason: str = "stop") -> None:
        self.info = engine_info()
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{list(ids)} {skip_special_tokens}")
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.encoded: list[dict[str, Any]] = []
        self._text, self._size, self._reason = text, size, reason

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        assert messages
        self.encoded.append({"messages": list(messages), **template})
        return [7, 8, 9]

    async def stream(self, prompt: list[int], params: SamplingParams) -> AsyncGenerator[Delta, None]:
        self.asked.append((prompt, params))
        for start in range(0, len(self._text), self._size):
            yield Delta(text=self._text[start : start + self._size])
        yield Delta(text="", end=completion(self._text, self._reason))


def answer(engine: Engine, tools: Sequence[Mapping[str, Any]] = (), **sampling: Any) -> tuple[str, AnswerEnd]:
    async def run() -> tuple[str, AnswerEnd]:
        backend = EngineBackend(engine, "26 Jul 2024")  # type: ignore[arg-type]
        pieces = [piece async for piece in backend.stream(MESSAGES, sampling, tools)]
        assert all(piece.end is None for piece in pieces[:-1])
        end = pieces[-1].end
        assert end is not None
        return "".join(piece.text for piece in pieces), end

    return asyncio.run(run())


def test_an_answer_and_its_figures() -> None:
    engine = Engine("hello there")
    text, end = answer(engine, temperature=0.1)
    assert text == "hello there"
    assert (end.prompt_tokens, end.cached_tokens, end.output_tokens) == (20, 16, 2)
    assert (end.finish_reason, end.first_token_s, end.total_s, end.tool_calls) == ("stop", 0.2, 0.5, [])
    assert engine.asked == [([7, 8, 9], SamplingParams(temperature=0.1, top_p=0.9))]
    assert engine.encoded == [{"messages": MESSAGES, "tools": None, "date": "26 Jul 2024"}]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_taken_out_of_the_text(size: int) -> None:
    engine = Engine('Let me see.\n{"name": "weather", "parameters": {"city": "Rome"}}', size)
    text, end = answer(engine, [WEATHER])
    assert text == "Let me see."
    assert end.finish_reason == "tool_calls"
    assert [(call.name, call.arguments) for call in end.tool_calls] == [("weather", '{"city": "Rome"}')]
    assert end.tool_calls[0].id.startswith("call_")
    assert engine.encoded[0]["tools"] == [WEATHER]
    assert not engine.asked[0][1].skip_special_tokens


def test_without_tools_an_answer_that_looks_like_a_call_is_text() -> None:
    text = '{"name": "weather", "parameters": {}}'
    assert answer(Engine(text))[0] == text


def test_a_call_that_was_cut_off_is_no_call_to_make() -> None:
    _, end = answer(Engine('{"name": "weather", "parameters": {"ci', reason="length"), [WEATHER])
    assert end.finish_reason == "length"


def test_the_raw_prompt_has_its_special_tokens() -> None:
    backend = EngineBackend(Engine(""), None)  # type: ignore[arg-type]
    raw = backend.raw(MESSAGES, {}, [])
    assert (raw.text, raw.ids) == ("[7, 8, 9] False", [7, 8, 9])
    assert backend.count(MESSAGES, []) == 3
    assert backend.count([], []) == 0  # prompt formats refuse to write no message
    assert (backend.model, backend.context) == ("fake-model", 200)
