"""Tool calls in Llama 3.1's forms: against Meta's own parser, and over every way of cutting the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_models.llama3.chat_format import ChatFormat
from llama_models.llama3.tokenizer import Tokenizer as MetaTokenizer

from corellm.text.tool_calls import CallDelta, Piece, ToolCallParser

TOOLS = ("weather", "time_now", "brave_search", "wolfram_alpha", "code_interpreter")
Call = tuple[str, str]


def joined(pieces: Sequence[Piece]) -> tuple[str, list[Call]]:
    """Text and calls put together as a client does."""
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: list[Call] = []
    for piece in pieces:
        if not isinstance(piece, CallDelta):
            continue
        if piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1
            assert piece.arguments
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
    return text, calls


def parse(parts: Sequence[str], names: Sequence[str] = TOOLS, *, parallel: bool = True) -> tuple[str, list[Call]]:
    parser = ToolCallParser(names, parallel=parallel)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    found = joined(pieces)
    assert parser.calls == len(found[1])
    return found


ANSWERS: list[tuple[str, str, list[Call]]] = [
    ('{"name": "weather", "parameters": {"city": "Ro}m\\"e", "n": [{}]}}', "",
     [("weather", '{"city": "Ro}m\\"e", "n": [{}]}')]),
    ('{"type": "function", "name": "weather", "arguments": {}}', "", [("weather", "{}")]),
    ('{"name": "weather", "parameters": {}}; {"name": "time_now", "parameters": {"z": 1}}', "",
     [("weather", "{}"), ("time_now", '{"z": 1}')]),
    ('\n{"name":"weather","parameters":{"a":1}}\n{"name":"weather","parameters":{"a":2}}\n', "",
     [("weather", '{"a":1}'), ("weather", '{"a":2}')]),
    ('Let me see.\n\n{"name": "weather", "parameters": {}}', "Let me see.", [("weather", "{}")]),
    ('{"name": "weather", "parameters": {}}\nThat is it.', "\nThat is it.", [("weather", "{}")]),
    ('{"name": "weather"}', "", [("weather", "{}")]),
    ('{"name": "weather", "parameters": null}', "", [("weather", "{}")]),
    ('{"name": "weather", "parameters": {}, "id": "}"}', "", [("weather", "{}")]),
    ('<|python_tag|>{"name": "weather", "parameters": {"x": "é\\n"}}', "", [("weather", '{"x": "é\\n"}')]),
    ('<|python_tag|>brave_search.call(query="snow in \'Oslo\'")', "",
     [("brave_search", '{"query": "snow in \'Oslo\'"}')]),
    ('Hm <|python_tag|>wolfram_alpha.call(query="1+1"); <|python_tag|>brave_search.call(query="2")', "Hm",
     [("wolfram_alpha", '{"query": "1+1"}'), ("brave_search", '{"query": "2"}')]),
    ('<|python_tag|>x = {"a": "b\\\\"}\nprint(x)', "",
     [("code_interpreter", json.dumps({"code": 'x = {"a": "b\\\\"}\nprint(x)'}))]),
    ('<|python_tag|>brave_search.call(q=1)', "", [("code_interpreter", '{"code": "brave_search.call(q=1)"}')]),
    ("<|python_tag|>{1: 2}", "{1: 2}", []),
    # Cut off by max_tokens.
    ('{"name": "weather", "parameters": {"city": "Ro', "", [("weather", '{"city": "Ro')]),
    ('{"name": "wea', '{"name": "wea', []),
    ('<|python_tag|>brave_search.call(query="sn', "",
     [("code_interpreter", '{"code": "brave_search.call(query=\\"sn"}')]),
    # No calls.
    ("Plain words.\n", "Plain words.\n", []),
    (" \n ", " \n ", []),
    ("", "", []),
    ("A <|python tag|> or <|pyth", "A <|python tag|> or <|pyth", []),
    ('{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ('{"x": {"name": "weather", "parameters": {}}}', '{"x": {"name": "weather", "parameters": {}}}', []),
    ('See {"name": "weather", "parameters": {}}', 'See {"name": "weather", "parameters": {}}', []),
    ('{"name": ["weather"]}', '{"name": ["weather"]}', []),
    ('{"parameters": {}, "name": "weather"}', '{"parameters": {}, "name": "weather"}', []),
    ("if a:\n{\n  weather}", "if a:\n{\n  weather}", []),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS)
def test_forms(answer: str, text: str, calls: list[Call]) -> None:
    assert parse([answer]) == (text, calls)


@pytest.mark.parametrize(("answer", "text", "calls"), ANSWERS)
def test_every_cut_in_up_to_three_parts_gives_the_same(answer: str, text: str, calls: list[Call]) -> None:
    for one, two in combinations(range(len(answer) + 1), 2):
        assert parse([answer[:one], answer[one:two], answer[two:]]) == (text, calls), (one, two)
    assert parse(list(answer)) == (text, calls)


WORDS = st.sampled_from(
    [*TOOLS, "<|python_tag|>", "<|", '{"name": "', '", "parameters": ', '{"type": "function", ', '"', "{", "}", "{}",
     "}}", ";", "\n", " ", ".call(", 'query="', '")', "\\", "null", "text", "é"]
)  # fmt: skip


@given(words=st.lists(WORDS, max_size=14), data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_text_may_be_cut_anywhere(words: list[str], data: st.DataObject) -> None:
    answer = "".join(words)
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=6)))
    parts = [answer[start:end] for start, end in zip([0, *places], [*places, len(answer)], strict=True)]
    whole = parse([answer])
    assert parse(parts) == whole
    if not whole[1]:
        assert whole[0] == answer.replace("<|python_tag|>", "")


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    calls=st.lists(st.tuples(st.sampled_from(TOOLS), st.dictionaries(st.text(), ARGUMENTS, max_size=3)), min_size=1),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_json_writes_is_read(calls: list[tuple[str, object]], indent: int | None, ascii_only: bool) -> None:
    texts = [
        json.dumps({"name": name, "parameters": arguments}, indent=indent, ensure_ascii=ascii_only)
        for name, arguments in calls
    ]
    text, found = parse(list("; ".join(texts)))
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(
    "answer",
    [
        '{"type": "function", "name": "weather", "parameters": {"city": "Rome", "days": [1, 2]}}',
        '{"name": "time_now", "parameters": {}}',
        '<|python_tag|>brave_search.call(query="who won?")',
        '<|python_tag|>wolfram_alpha.call(query="x^2 = 2")',
        '<|python_tag|>import math\nprint(math.pi, "\\n", {"a": 1})',
        "Good morning!",
    ],
)
def test_single_calls_are_read_as_meta_reads_them(answer: str) -> None:
    tokenizer = MetaTokenizer.get_instance()
    theirs = ChatFormat(tokenizer).decode_assistant_message_from_content(answer + "<|eom_id|>", None)
    text, calls = parse([answer])
    assert text == theirs.content
    names = [getattr(call.tool_name, "value", call.tool_name) for call in theirs.tool_calls]
    assert [name for name, _ in calls] == names
    assert [json.loads(arguments) for _, arguments in calls] == [call.arguments for call in theirs.tool_calls]


def test_text_comes_without_delay() -> None:
    parser = ToolCallParser(TOOLS)
    steps = {
        "Hel": "Hel",
        "lo, ": "lo,",
        "you": " you",
        " {": " {",
        "a}\n": "a}",
        "{": "",
        '"x': '\n{"x',
        "y <": "y",
        "|p": "",
    }
    for part, text in steps.items():
        assert joined(parser.push(part)) == (text, [])
    assert joined(parser.push("!")) == (" <|p!", [])


def test_arguments_come_letter_by_letter() -> None:
    parser = ToolCallParser(TOOLS)
    assert parser.push('{"name": "weather", "parameters": ') == []
    assert parser.push("{") == [CallDelta(0, "weather"), CallDelta(0, None, "{")]
    assert parser.push('"a"') == [CallDelta(0, None, '"a"')]
    assert parser.push(": 1}") == [CallDelta(0, None, ": 1}")]
    assert parser.push("}") == []
    code = ToolCallParser(TOOLS)
    assert code.push("<|python_tag|>pri") == [
        CallDelta(0, "code_interpreter"),
        CallDelta(0, None, '{"code": "'),
        CallDelta(0, None, "pri"),
    ]


def test_only_one_call_unless_parallel() -> None:
    two = '{"name": "weather", "parameters": {}}; {"name": "time_now", "parameters": {}} and text'
    assert parse(list(two), parallel=False) == ("", [("weather", "{}")])


def test_python_is_text_where_no_interpreter_is_declared() -> None:
    assert parse(["<|python_tag|>print(1)"], ["weather"]) == ("print(1)", [])
