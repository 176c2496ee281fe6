"""The real demo model held to JSON schemas, beside free requests; and the scores of its prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from corellm import EngineNode, SamplingParams
from corellm.errors import InvalidRequestError
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.requests import ChatRequest, parse_request
from corellm.openai_api.tools import split_calls
from corellm.sampling_params import JsonConstraint

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "snow"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a person as JSON."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[EngineNode]:
    with EngineNode(str(demo_model), device="cpu", max_model_len=1024) as node:
        yield node


def held(seed: int, temperature: float = 1.2) -> SamplingParams:
    constraint = JsonConstraint(json.dumps(PERSON))
    return SamplingParams(temperature=temperature, max_tokens=120, seed=seed, constraint=constraint)


def test_answers_are_of_the_schema_and_free_ones_are_what_they_are_alone(engine: EngineNode) -> None:
    free = SamplingParams(temperature=0, max_tokens=24)
    conversations = [[{"role": "user", "content": f"What is {number} plus 1?"}] for number in range(4)]
    alone = [completion.text for completion in engine.chat(conversations, [free] * 4)]
    answers = engine.chat([ASK] * 6 + conversations, [*(held(seed) for seed in range(6)), *[free] * 4])
    for completion in answers[:6]:
        person = json.loads(completion.text)
        assert list(person) == ["name", "age", "likes"]
        assert 0 <= person["age"] <= 120
        assert set(person["likes"]) <= {"tea", "coffee", "snow"}
        assert completion.finish_reason == "stop"
        assert completion.output_tokens == len(completion.token_ids)
    assert len({completion.text for completion in answers[:6]}) > 1
    assert [completion.text for completion in answers[6:]] == alone


def test_an_answer_does_not_depend_on_what_runs_beside_it(engine: EngineNode) -> None:
    prompt = "A person as JSON:"
    (alone,) = engine.generate(prompt, held(3))
    beside = engine.generate([prompt] * 3, [SamplingParams(temperature=0, max_tokens=60), held(3), held(4)])
    assert beside[1].text == alone.text
    assert "".join(delta.text for delta in engine.stream(prompt, held(3))) == alone.text
    json.loads(alone.text)


def test_a_required_tool_is_called(engine: EngineNode) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 60,
    }
    request = parse_request(Endpoint.CHAT, body)
    assert isinstance(request, ChatRequest)
    assert request.tools is not None
    (completion,) = engine.chat(request.messages, request.generation.params, tools=request.tools.definitions)
    content, calls = split_calls(completion.text, request.tools)
    assert content is None
    assert [call["function"]["name"] for call in calls] == ["weather"]
    arguments = json.loads(calls[0]["function"]["arguments"])
    assert arguments["city"] == "Oslo"
    assert arguments["unit"] in ("C", "F")


def test_the_prompt_is_scored_as_if_it_had_been_generated(engine: EngineNode) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=3, ignore_eos=True)
    (written,) = engine.generate([[504, 2365, 282]], params)
    prompt = [504, 2365, 282, *written.token_ids]
    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    for _ in range(2):  # the second time the prompt is in the cache, which may not be used
        (scored,) = engine.generate([prompt], scoring)
        found = scored.prompt_logprobs
        assert found is not None
        assert written.logprobs is not None
        assert scored.cached_tokens == 0
        assert [token.token_id for token in found] == prompt
        assert (found[0].logprob, found[0].rank, found[0].top) == (None, None, ())
        for token, known in zip(found[3:], written.logprobs, strict=True):
            assert token.logprob == pytest.approx(known.logprob, abs=1e-3)
            assert token.rank == 1
            assert [top for top, _ in token.top] == [top for top, _ in known.top]
    (free,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    assert free.cached_tokens > 0


def test_an_unusable_schema_is_refused_and_the_engine_goes_on(engine: EngineNode) -> None:
    with pytest.raises(InvalidRequestError, match="Invalid type: objekt"):
        engine.generate("Hi", SamplingParams(constraint=JsonConstraint('{"type": "objekt"}')))
    assert engine.generate("Hi", SamplingParams(max_tokens=2))[0].output_tokens == 2
