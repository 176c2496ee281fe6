"""Answers held to a JSON schema, from `Submit` to the last token: real grammars, real loop, workers that only choose.

What an answer must be is judged by Python's own JSON reader, not by the grammar library.
"""

from __future__ import annotations

import asyncio
import errno
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from llguidance import LLParserLimits

from corellm.comms.messages import Sampling
from corellm.engine import constraints as constraints_module
from corellm.engine import grammar as grammar_module
from corellm.engine.engine_client import EngineClient
from corellm.engine.token_stream import TokenStream
from corellm.errors import CoreLLMError, InvalidRequestError, OverloadedError
from corellm.sampling_params import JsonConstraint
from tests.support.fake_engine import END, EngineThread, fake_engine

CITY = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Rome", "Oslo"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 9_999_999},
        "coast": {"type": "boolean"},
    },
    "required": ["name", "people", "coast"],
    "additionalProperties": False,
}
# Minutes and gigabytes if nothing stopped it.
HOSTILE = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}


def constraint(schema: object, **fields: Any) -> JsonConstraint:
    return JsonConstraint(json.dumps(schema), **fields)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineThread]:
    with fake_engine(tmp_path) as thread:
        yield thread


async def answer(stream: TokenStream) -> tuple[bytes, str]:
    """The bytes of an answer without the token that ends it, and why it ended."""
    out: list[int] = []
    async with asyncio.timeout(20):
        async for batch in stream:
            out += batch.tokens
            if batch.finish is not None:
                reason = batch.finish.reason
    return bytes(token for token in out if token != END), reason


def ask(client: EngineClient, limit: JsonConstraint, number: int = 0, max_tokens: int = 240) -> TokenStream:
    prompt = [1] * (1 + number)  # its length decides what the workers choose
    return client.submit(prompt, Sampling(max_tokens=max_tokens, stop_ids=(END,)), constraint=limit)


def run(engine: EngineThread, work: Any) -> Any:
    async def connected() -> Any:
        client = await EngineClient.connect(engine.folder, lambda _: None)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(connected())


def test_answers_are_json_of_the_schema_and_end_where_it_is_complete(engine: EngineThread) -> None:
    async def work(client: EngineClient) -> list[tuple[bytes, str]]:
        return await asyncio.gather(*(answer(ask(client, constraint(CITY), number)) for number in range(12)))

    seen = set()
    for text, reason in run(engine, work):
        value = json.loads(text)
        assert list(value) == ["name", "people", "coast"]
        assert value["name"] in ("Rome", "Oslo")
        assert 0 <= value["people"] <= 9_999_999
        assert isinstance(value["coast"], bool)
        assert reason == "stop"
        assert text.endswith(b"}")
        seen.add(text)
    assert len(seen) > 3


def test_constrained_and_free_requests_share_steps_and_preemption_loses_nothing(tmp_path: Path) -> None:
    async def work(client: EngineClient) -> tuple[list[tuple[bytes, str]], list[list[int]]]:
        free = [client.submit([2] * n, Sampling(max_tokens=30)) for n in range(1, 9)]
        held = [asyncio.create_task(answer(ask(client, constraint(CITY), number, 60))) for number in range(8)]

        async def tokens(stream: TokenStream) -> list[int]:
            return [token async for batch in stream for token in batch.tokens]

        return await asyncio.gather(*held), await asyncio.gather(*map(tokens, free))

    with fake_engine(tmp_path, blocks=24, max_seqs=5) as engine:
        held, free = run(engine, work)
        assert engine.scheduler.counters.preemptions > 0
    assert free == [list(range(n, n + 30)) for n in range(1, 9)]
    for text, reason in held:
        assert (reason == "stop") == _is_json(text)  # the others ran out of max_tokens, or of whitespace to spend them


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_running_out_of_tokens_within_the_json_is_length(engine: EngineThread) -> None:
    text, reason = run(engine, lambda client: answer(ask(client, constraint(CITY), max_tokens=4)))
    assert reason == "length"
    assert len(text) == 4
    assert text.startswith(b"{")


def test_an_answer_may_end_early_only_where_the_grammar_accepts(engine: EngineThread) -> None:
    async def work(client: EngineClient) -> list[tuple[bytes, str]]:
        return await asyncio.gather(*(answer(ask(client, constraint({"type": "integer"}), n, 12)) for n in range(40)))

    ended = [text for text, reason in run(engine, work) if reason == "stop"]
    assert ended  # by the end token: more digits could always follow
    for text in ended:
        int(text)


def test_an_answer_that_cannot_go_on_costs_no_end_token(engine: EngineThread) -> None:
    async def work(client: EngineClient) -> list[int]:
        return [token async for batch in ask(client, constraint({"enum": [10, 20]})) for token in batch.tokens]

    assert bytes(run(engine, work)) in (b"10", b"20")


def test_several_values_are_parted_by_the_separator(engine: EngineThread) -> None:
    two = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

    async def work(client: EngineClient) -> list[tuple[bytes, str]]:
        limit = constraint(two, separator="; ")
        return await asyncio.gather(*(answer(ask(client, limit, number)) for number in range(16)))

    counts = set()
    for text, reason in run(engine, work):
        values = text.decode().split("; ")
        counts.add(len(values))
        if reason == "stop":
            assert all(json.loads(value)["a"] in (1, 2) for value in values)
    assert len(counts) > 1


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ('{"type": "objekt"}', "Invalid type: objekt"),
        ('{"type": "string", "pattern": "(a"}', "regex parse error"),
        ('{"$ref": "http://example.com/schema.json"}', "not present"),
        ('{"$ref": "#"}', "no JSON value satisfies it"),
        ('{"uniqueItems": true}', "uniqueItems"),
        ('{"type": "object", "properties": {"a": false}, "required": ["a"]}', "nsatisfiable"),
        ("[1]", "must be a JSON object"),
        ("{", "not JSON"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
        (json.dumps(HOSTILE), "make it simpler"),
    ],
    ids=lambda text: text[:30],
)
def test_a_schema_that_cannot_be_used_is_refused_in_one_line(engine: EngineThread, schema: str, says: str) -> None:
    async def work(client: EngineClient) -> CoreLLMError:
        with pytest.raises(InvalidRequestError) as caught:
            await answer(ask(client, JsonConstraint(schema, param="tools")))
        return caught.value

    began = time.monotonic()
    error = run(engine, work)
    assert time.monotonic() - began < 8
    assert isinstance(error, InvalidRequestError)
    assert error.param == "tools"
    assert says in error.message
    assert error.message.startswith("the JSON schema of tools cannot be used: ")
    assert "\n" not in error.message
    assert "x-guidance" not in error.message
    assert len(error.message) < 300


def test_a_lenient_constraint_ignores_what_it_cannot_hold_to(engine: EngineThread) -> None:
    limit = constraint({"enum": [1], "uniqueItems": True}, lenient=True)
    assert run(engine, lambda client: answer(ask(client, limit))) == (b"1", "stop")


def test_options_within_a_schema_are_ignored(engine: EngineThread) -> None:
    limit = constraint({"enum": [1], "uniqueItems": True, "x-guidance": {"lenient": True}})

    async def work(client: EngineClient) -> None:
        with pytest.raises(InvalidRequestError, match="uniqueItems"):
            await answer(ask(client, limit))

    run(engine, work)


def test_other_requests_run_on_while_a_hostile_schema_is_tried(engine: EngineThread) -> None:
    async def work(client: EngineClient) -> int:
        hostile = asyncio.create_task(answer(ask(client, constraint(HOSTILE))))
        served = 0
        while not hostile.done():
            stream = client.submit([1] * 5, Sampling(max_tokens=5))
            assert [token async for batch in stream for token in batch.tokens] == [5, 6, 7, 8, 9]
            served += 1
        with pytest.raises(InvalidRequestError):
            await hostile
        return served

    assert run(engine, work) > 10  # in more than a second; one or two, if they had to wait for it


def test_a_vocabulary_that_cannot_be_used_keeps_no_one_else_from_running(tmp_path: Path) -> None:
    def load() -> NoReturn:
        raise ValueError("an odd token")

    async def work(client: EngineClient) -> int:
        with pytest.raises(InvalidRequestError, match="vocabulary cannot be used: an odd token") as caught:
            await answer(ask(client, constraint(CITY)))
        assert caught.value.param == "response_format"
        return len([token async for batch in client.submit([1], Sampling(max_tokens=5)) for token in batch.tokens])

    with fake_engine(tmp_path, load=load) as engine:
        assert run(engine, work) == 5


def test_a_known_schema_is_not_tried_again(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(constraints_module, "check_schema", tried.append)

    async def work(client: EngineClient) -> None:
        limit = constraint({"enum": [1]})
        for _ in range(3):
            together = await asyncio.gather(*(answer(ask(client, limit)) for _ in range(4)))
            assert together == [(b"1", "stop")] * 4
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                await answer(ask(client, constraint({"type": "objekt"})))

    run(engine, work)
    assert len(tried) == 2


def test_a_request_that_waits_too_long_for_its_schema_is_refused(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints_module, "COMPILE_S", 0.0)

    async def work(client: EngineClient) -> None:
        with pytest.raises(OverloadedError, match="not compiled in time"):
            await answer(ask(client, constraint({"enum": [1]})))

    run(engine, work)


def test_a_batch_of_many_schemas_waits_its_turn_and_lets_others_pass(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints_module, "COMPILE_S", 0.3)
    monkeypatch.setattr(constraints_module, "check_schema", lambda constraint: time.sleep(0.05))
    ended: list[int] = []

    async def one(client: EngineClient, number: int, priority: int) -> None:
        sampling = Sampling(max_tokens=20, stop_ids=(END,))
        limit = constraint({"enum": [number]})
        stream = client.submit([1], sampling, priority=priority, constraint=limit)
        assert (await answer(stream))[0] == str(number).encode()
        ended.append(number)

    async def work(client: EngineClient) -> None:
        rows = [one(client, 100 + number, 1) for number in range(30)]
        await asyncio.gather(*rows, one(client, 7, 0))

    run(engine, work)
    assert len(ended) == 31
    assert ended.index(7) < 15


def _takes_too_long(command: list[str], **options: Any) -> NoReturn:
    raise subprocess.TimeoutExpired(command, 0)


def _cannot_start(command: list[str], **options: Any) -> NoReturn:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize("fails", [_takes_too_long, _cannot_start])
def test_a_busy_machine_is_not_held_against_a_schema(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, fails: Any
) -> None:
    async def work(client: EngineClient) -> tuple[bytes, str]:
        limit = constraint({"enum": [1]})
        with monkeypatch.context() as busy:
            busy.setattr(subprocess, "run", fails)
            with pytest.raises(OverloadedError, match="machine is busy"):
                await answer(ask(client, limit))
        return await answer(ask(client, limit))

    assert run(engine, work) == (b"1", "stop")


def test_a_schema_that_becomes_too_complex_is_the_requests_fault(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some alternatives multiply only as the answer is written."""
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(step_max_items=30))
    monkeypatch.setattr(constraints_module, "check_schema", lambda constraint: None)
    names = [f"field_{number}" for number in range(40)]
    limit = constraint({"type": "object", "properties": dict.fromkeys(names, CITY), "required": names[:1]})

    async def work(client: EngineClient) -> CoreLLMError:
        with pytest.raises(InvalidRequestError) as caught:
            await answer(ask(client, limit))
        return caught.value

    assert "too complex to follow" in run(engine, work).message


def test_aborting_while_the_schema_is_tried_leaves_nothing(engine: EngineThread) -> None:
    async def work(client: EngineClient) -> None:
        ask(client, constraint(CITY)).abort()
        text, reason = await answer(ask(client, constraint(CITY)))
        assert reason == "stop"
        json.loads(text)

    run(engine, work)
    assert not engine.scheduler.waiting


def test_a_token_that_the_mask_forbids_fails_its_request_alone(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(client: EngineClient) -> None:
        free = client.submit([1] * 9, Sampling(max_tokens=20))
        with pytest.raises(CoreLLMError, match="does not allow"):
            await answer(ask(client, constraint(CITY)))
        assert len([token async for batch in free for token in batch.tokens]) == 20

    monkeypatch.setattr(engine.workers, "_draw", lambda known, mask: known)
    run(engine, work)
