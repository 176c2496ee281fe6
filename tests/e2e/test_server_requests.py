"""`corellm serve` with the demo model and OpenAI's own client, which is the judge of every shape."""

from __future__ import annotations

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.serve_process import CORELLM, ServeProcess

KEY = "sk-test"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a small village,"


@pytest.fixture(scope="module")
def client(demo_server: ServeProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def joined(stream: Any) -> tuple[str, str | None]:
    """Text and finish reason of a streamed chat."""
    text, reason = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_a_chat_is_answered_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (37, 8, 45)
    stream = client.chat.completions.create(
        model="demo", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert joined(chunks) == (whole.choices[0].message.content, "stop")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32  # whole pages of the same prompt
    assert chunks[-1].usage.total_tokens == 45


def test_text_parts_are_one_text(client: openai.OpenAI) -> None:
    system = {"role": "system", "content": "Answer in one word."}
    parts = [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}]
    answers = []
    for content in ("What is the capital of France?", parts):
        messages: list[Any] = [system, {"role": "user", "content": content}]
        answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_completion_tokens=6)
        assert answer.usage is not None
        assert answer.choices[0].finish_reason == "length"
        answers.append((answer.choices[0].message.content, answer.usage.prompt_tokens))
    assert answers[0] == answers[1]


def test_completions_of_every_kind_of_prompt(client: openai.OpenAI, demo_server: ServeProcess) -> None:
    request = urllib.request.Request(
        f"{demo_server.url}/tokenize", json.dumps({"prompt": STORY}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        ids = json.load(response)["tokens"]
    texts = [
        [
            choice.text
            for choice in client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0).choices
        ]
        for prompt in (STORY, [STORY, STORY], ids, [ids, ids])
    ]
    assert len(texts[0][0]) > 8
    assert texts == [texts[0], texts[0] * 2, texts[0], texts[0] * 2]


def test_n_choices_share_the_prompt_and_differ(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=FRANCE, n=4, seed=3, temperature=1.5, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    again = client.chat.completions.create(
        model="demo", messages=FRANCE, n=4, seed=3, temperature=1.5, max_tokens=12, stream=True
    )
    texts = ["", "", "", ""]
    for chunk in again:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 37


def test_stop_strings_do_not_show_over_any_boundary(client: openai.OpenAI) -> None:
    full = client.completions.create(model="demo", prompt=STORY, max_tokens=16, temperature=0).choices[0].text
    assert len(full) > 30
    for start in range(4, 30, 9):
        stop = full[start : start + 5]
        cut = full[: full.index(stop)]
        whole = client.completions.create(model="demo", prompt=STORY, max_tokens=16, temperature=0, stop=stop)
        stream = client.completions.create(
            model="demo", prompt=STORY, max_tokens=16, temperature=0, stop=[stop, "never"], stream=True
        )
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (cut, "stop")
        assert "".join(chunk.choices[0].text for chunk in stream) == cut


def test_logprobs_of_both_apis(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo", messages=FRANCE, temperature=0, logprobs=True, top_logprobs=2, max_tokens=5
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert "".join(token.token for token in content) == chat.choices[0].message.content
    assert all(token.top_logprobs[0].token == token.token and token.logprob <= 0 for token in content)
    streamed = client.chat.completions.create(
        model="demo", messages=FRANCE, temperature=0, logprobs=True, top_logprobs=2, max_tokens=5, stream=True
    )
    found = [
        token
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or []
    ]
    assert [(token.token, round(token.logprob, 3)) for token in found] == [
        (token.token, round(token.logprob, 3)) for token in content
    ]
    text = client.completions.create(model="demo", prompt=STORY, temperature=0, logprobs=2, max_tokens=5).choices[0]
    assert text.logprobs is not None
    assert "".join(text.logprobs.tokens or []) == text.text
    assert text.logprobs.text_offset == [sum(map(len, (text.logprobs.tokens or [])[:i])) for i in range(5)]


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=FRANCE, temperature=9)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 3000)
    assert long.value.code == "context_length_exceeded"
    assert "2048" in long.value.message
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_the_async_clients_concurrent_streams_equal_the_sequential_text(
    demo_server: ServeProcess, client: openai.OpenAI
) -> None:
    prompts = [f"Question {number}: name a colour. Answer:" for number in range(16)]
    expected = [
        client.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0).choices[0].text
        for prompt in prompts[:6]
    ]

    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{demo_server.url}/v1", api_key=KEY, max_retries=0) as made:

            async def one(prompt: str) -> str:
                stream = await made.completions.create(
                    model="demo", prompt=prompt, max_tokens=4, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(work())[:6] == expected


def test_a_batch_joins_the_engine_and_gives_the_same_text(
    demo_server: ServeProcess, client: openai.OpenAI, tmp_path: Path
) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": FRANCE, "temperature": 0},
        {"prompt": STORY, "max_tokens": 12, "temperature": 0},
        {"prompt": STORY, "max_tokens": 12, "temperature": 0, "stop": " the"},
    ]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    words = [CORELLM, "batch", str(rows), "--model", "demo", "--device", "cpu", "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run(words, env=demo_server.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "using the running engine e2e" in done.stderr
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in map(json.loads, lines)}
    chat = client.chat.completions.create(model="demo", **bodies[0]).choices[0]
    assert answers["row-1"]["message"]["content"] == chat.message.content
    for number, body in ((2, bodies[1]), (3, bodies[2])):
        choice = client.completions.create(model="demo", **body).choices[0]
        assert (answers[f"row-{number}"]["text"], answers[f"row-{number}"]["finish_reason"]) == (
            choice.text, choice.finish_reason,
        )  # fmt: skip
    assert demo_server.is_healthy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "other"], "running are: e2e"),
        (["--engine", "e2e", "--dtype", "bfloat16"], "--dtype"),
        (["--engine", "e2e", "--new-engine"], "contradict"),
    ],
)
def test_an_engine_that_cannot_be_joined_is_said(
    demo_server: ServeProcess, tmp_path: Path, options: list[str], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    words = [CORELLM, "batch", str(tmp_path / "rows.jsonl"), *options]
    done = subprocess.run(words, env=demo_server.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
