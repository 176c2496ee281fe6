"""Bodies of the OpenAI API: what is accepted, what it becomes, and that each refusal names its field."""

from __future__ import annotations

from typing import Any

import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completion
import pytest

from corellm.errors import InvalidRequestError
from corellm.openai_api.fields import TABLES, Endpoint
from corellm.openai_api.kinds import shown
from corellm.openai_api.requests import ChatRequest, CompletionRequest, parse_request
from corellm.openai_api.tokenize import parse_detokenize
from corellm.sampling_params import SamplingParams

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
HI = [{"role": "user", "content": "hi"}]


def chat(defaults: dict[str, Any] | None = None, **fields: Any) -> ChatRequest:
    request = parse_request(Endpoint.CHAT, {"messages": HI, **fields}, defaults or {})
    assert isinstance(request, ChatRequest)
    return request


def completion(defaults: dict[str, Any] | None = None, **fields: Any) -> CompletionRequest:
    request = parse_request(Endpoint.COMPLETIONS, {"prompt": "hi", **fields}, defaults or {})
    assert isinstance(request, CompletionRequest)
    return request


def test_every_field_of_openai_is_known() -> None:
    chat_fields = openai_chat.CompletionCreateParamsBase.__annotations__.keys()
    completion_fields = openai_completion.CompletionCreateParamsBase.__annotations__.keys()
    assert chat_fields <= TABLES[Endpoint.CHAT].keys()
    assert completion_fields <= TABLES[Endpoint.COMPLETIONS].keys()


def test_sampling_fields_reach_sampling_params_unchanged() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "seed": -7,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
    }
    expected = SamplingParams(**given, stop=("a", "b"), stop_token_ids=(5, 6), logit_bias={12: -100, 3: 1.5})
    fields = {**given, "stop": ["a", "b"], "stop_token_ids": [5, 6], "logit_bias": {"12": -100, "3": 1.5}}
    assert chat(**fields).generation.params == expected
    assert completion(**fields).generation.params == expected


def test_null_means_default() -> None:
    nulls = dict.fromkeys(TABLES[Endpoint.CHAT].keys() - {"messages"})
    assert chat(**nulls) == chat()
    nulls = dict.fromkeys(TABLES[Endpoint.COMPLETIONS].keys() - {"prompt"})
    assert completion(**nulls) == completion()


def test_omitted_max_tokens_fills_a_chat_and_gives_16_to_a_completion() -> None:
    assert chat().generation.params.max_tokens is None
    assert completion().generation.params.max_tokens == 16


def test_max_completion_tokens_is_max_tokens() -> None:
    assert chat(max_completion_tokens=7).generation.params.max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).generation.params.max_tokens == 7
    with pytest.raises(InvalidRequestError, match="max_tokens is 8 and max_completion_tokens is 7"):
        chat(max_completion_tokens=7, max_tokens=8)


def test_logprobs_of_each_api() -> None:
    assert chat(logprobs=True).generation.params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).generation.params.logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).generation.params.logprobs is None
    assert completion(logprobs=0).generation.params.logprobs == 0
    assert completion(logprobs=5).generation.params.logprobs == 5
    with pytest.raises(InvalidRequestError, match="top_logprobs is 3"):
        chat(top_logprobs=3)
    with pytest.raises(InvalidRequestError, match="logprobs is true"):
        completion(logprobs=True)
    with pytest.raises(InvalidRequestError, match="logprobs is 1"):
        chat(logprobs=1)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", ""], ("a", "")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_four_forms_of_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", 1], [1, True], [1, -1], [[1], "a"], {}, 5, [1.0], [True]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt(\[\d\])* is .*; it must be") as refused:
        completion(prompt=prompt)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("prompt", [1, -2], "prompt[1] is -2;"),
        ("prompt", [1, "a"], 'prompt[1] is "a";'),
        ("prompt", ["a", 1], "prompt[1] is 1;"),
        ("prompt", [True], "prompt[0] is true;"),
        ("prompt", [[1], "a"], 'prompt[1] is "a";'),
        ("prompt", [[1], []], "prompt[1] is an empty list;"),
        ("prompt", [[1], [2, 2**31]], "prompt[1][1] is 2147483648;"),
        ("stop", ["a", 1], "stop[1] is 1;"),
        ("stop", [""], 'stop[0] is "";'),
        ("stop", "", 'stop is "";'),
        ("stop_token_ids", [3, -1], "stop_token_ids[1] is -1;"),
        ("stop_token_ids", [None], "stop_token_ids[0] is null;"),
        ("response_format", {}, "response_format.type is missing;"),
        ("response_format", {"type": None}, "response_format.type is missing;"),
        ("response_format", {"type": []}, "response_format.type is an empty list;"),
        ("response_format", {"type": "xml"}, 'response_format.type is "xml";'),
        ("response_format", [], "response_format is an empty list;"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema is missing;"),
        ("response_format", {"type": "json_schema", "json_schema": "x"}, 'response_format.json_schema is "x";'),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {}},
            "response_format.json_schema.schema is missing;",
        ),
    ],
)
def test_what_is_wrong_within_a_field_is_named(field: str, value: Any, named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        completion(**{field: value})
    assert refused.value.message.startswith(f"{named} it must be ")
    assert (refused.value.param or "").startswith(field)


def test_a_token_to_turn_into_text_that_is_none_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r'^tokens\[1\] is "a"; it must be a token id') as refused:
        parse_detokenize({"tokens": [1, "a"]})
    assert refused.value.param == "tokens"


BAD_VALUES: list[Any] = [
    ("temperature", 2.1),
    ("temperature", -0.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", 1.5),
    ("min_p", -1),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("max_tokens", 0),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("max_completion_tokens", -1),
    pytest.param("max_tokens", 10**5000, id="max_tokens-huge"),
    ("n", 0),
    ("n", 129),
    ("seed", 2**63),
    ("stop", [""]),
    ("stop", [1]),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", 5),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": True}),
    ("logit_bias", [1]),
    ("ignore_eos", 1),
    ("model", 5),
    ("priority", -1),
    ("cache_salt", 1),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("messages", []),
    ("messages", "hi"),
    ("tools", {}),
    ("tools", [TOOL] * 129),
    ("tool_choice", "always"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("tool_choice", {"type": "function"}),
    ("tool_choice", ["auto"]),
    ("parallel_tool_calls", 1),
    ("response_format", "json_object"),
    ("prompt_logprobs", 21),
    ("audio", {}),
    ("echo", 1),
    ("best_of", 2),
    ("store", "a"),
    ("user", 1),
    ("metadata", "a"),
    ("service_tier", True),
    ("safety_identifier", 1),
    ("prompt_cache_key", ["a"]),
    ("prompt_cache_options", "a"),
    ("prompt_cache_retention", 24),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_in_one_short_line_that_names_the_field(field: str, value: Any) -> None:
    endpoint = Endpoint.CHAT if field in TABLES[Endpoint.CHAT] else Endpoint.COMPLETIONS
    base = {"messages": HI} if endpoint is Endpoint.CHAT else {"prompt": "hi"}
    with pytest.raises(InvalidRequestError) as refused:
        parse_request(endpoint, {**base, field: value})
    assert refused.value.param == field
    assert field in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 250


def test_a_value_that_asks_for_nothing_is_accepted() -> None:
    chat(user="u", metadata={"a": 1}, store=True, functions=[], reasoning_effort="none")
    completion(suffix="", best_of=3, n=3, service_tier="auto")
    with pytest.raises(InvalidRequestError, match="functions"):
        chat(functions=[{}])


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"\"temprature\" is not a field .* did you mean temperature\?"
    ) as bad:
        chat(temprature=1)
    assert bad.value.param == "temprature"
    with pytest.raises(InvalidRequestError, match='"messages" is not a field of /v1/completions'):
        completion(messages=HI)


def test_missing_prompt_and_messages() -> None:
    for endpoint, name in ((Endpoint.CHAT, "messages"), (Endpoint.COMPLETIONS, "prompt")):
        with pytest.raises(InvalidRequestError, match=f"{name} is missing"):
            parse_request(endpoint, {})


def test_continuing_the_final_message_adds_no_generation_prompt() -> None:
    assert chat().add_generation_prompt
    assert not chat(continue_final_message=True).add_generation_prompt
    with pytest.raises(InvalidRequestError, match="both true"):
        chat(continue_final_message=True, add_generation_prompt=True)


def test_stream_options() -> None:
    assert chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None}).generation.stream
    with pytest.raises(InvalidRequestError, match=r'stream_options\."other" is unknown'):
        chat(stream=True, stream_options={"other": True})


def test_defaults_hold_where_the_body_does_not_say() -> None:
    defaults = {"max_tokens": 5, "temperature": 0.0, "stop": ["x"]}
    params = chat(defaults, temperature=0.7, stop=None).generation.params
    assert (params.max_tokens, params.temperature, params.stop) == (5, 0.7, ("x",))
    assert chat(defaults, max_completion_tokens=9).generation.params.max_tokens == 9
    assert completion(defaults).generation.params.max_tokens == 5


def test_choices_of_a_seeded_request_differ_in_seed_alone() -> None:
    generation = chat(n=3, seed=2**63 - 2).generation
    seeds = [generation.choice_params(choice).seed for choice in range(3)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)]
    unseeded = chat(n=3).generation
    assert [unseeded.choice_params(choice).seed for choice in range(3)] == [None] * 3


def test_a_request_for_too_many_answers_names_prompts_and_n() -> None:
    assert len(completion(prompt=["a"] * 16, n=128).prompts) == 16
    for prompt, n in ((["a"] * 2000, 128), (["a"] * 2049, 1), ([[1]] * 17, 128)):
        with pytest.raises(InvalidRequestError, match=f"prompt holds {len(prompt)} prompts and n is {n}") as refused:
            completion(prompt=prompt, n=n)
        assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("é\n", '"é\\n"'),
        (1.5, "1.5"),
        ([1], "a list with 1 entry"),
        ({}, "an empty object"),
    ],
)
def test_refused_values_are_shown_as_json(value: Any, text: str) -> None:
    assert shown(value) == text
    assert len(shown("x" * 10_000)) < 100
