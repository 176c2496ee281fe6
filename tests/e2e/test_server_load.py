"""`corellm serve` under load: many streams, clients that hang up, sockets that stall, requests that mean harm.

The promises are larger than a build has time for; these make the tests as long as they are:
`CORELLM_STREAMS=1000 CORELLM_HANGUPS=10000 CORELLM_STALLED=2000 CORELLM_FUZZ=50000`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from corellm.openai_server.options import Deadlines
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.request_fuzz import hostile_request
from tests.support.serve_process import ServeProcess, serving
from tests.support.tiny_llama import make_tiny_llama

STREAMS = int(os.environ.get("CORELLM_STREAMS", "60"))
HANGUPS = int(os.environ.get("CORELLM_HANGUPS", "200"))
STALLED = int(os.environ.get("CORELLM_STALLED", "20"))
FUZZED = int(os.environ.get("CORELLM_FUZZ", "1500"))
EXAMPLES = max(FUZZED // 100, 5)  # of schemathesis, for each operation
AT_ONCE = 64  # requests that the client has open
PROMPTS = 20  # different ones among the streams

DEADLINES = Deadlines(header_s=3, body_s=4, write_s=3)  # a fraction of the usual ones

COMPLETIONS = "/v1/completions"
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(folder, max_positions=1024)
    write_byte_tokenizer(folder)
    with serving(tmp_path_factory.mktemp("serve"), str(folder), deadlines=DEADLINES) as process:
        yield process


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server whose answers are short, whatever is asked of it."""
    folder = tmp_path_factory.mktemp("target")
    make_tiny_llama(folder, max_positions=512)
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }};{% endfor %}")
    with serving(tmp_path_factory.mktemp("serve"), str(folder), "--max-model-len", "96") as process:
        yield process


@contextlib.asynccontextmanager
async def session(server: ServeProcess, limit: int = AT_ONCE) -> Any:
    connector = aiohttp.TCPConnector(limit=limit)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as made:
        yield made


async def streamed(http: aiohttp.ClientSession, body: dict[str, Any]) -> str:
    """The text of a streamed completion, which must have its end mark."""
    async with http.post(COMPLETIONS, json={**body, "stream": True}) as response:
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-2])


def wait_for_free_blocks(server: ServeProcess) -> None:
    deadline = time.monotonic() + 2
    while used := server.metric("kv_cache_blocks_in_use"):
        assert time.monotonic() < deadline, f"{used} blocks are in use 2 s after the last client left"
        time.sleep(0.05)


def resident(server: ServeProcess) -> int:
    """Bytes of memory that the HTTP process holds."""
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(server: ServeProcess) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def test_concurrent_streams_equal_the_sequential_text(demo_server: ServeProcess) -> None:
    bodies = [
        {"prompt": f"Question {number % PROMPTS}: name a colour. Answer:", "max_tokens": 4, "temperature": 0}
        for number in range(STREAMS)
    ]

    async def work() -> None:
        async with session(demo_server, limit=0) as http:
            expected = [await streamed(http, body) for body in bodies[:PROMPTS]]
            texts = await asyncio.gather(*(streamed(http, body) for body in bodies))
        assert texts == [expected[number % PROMPTS] for number in range(STREAMS)]
        assert len(set(expected)) > 1

    asyncio.run(work())
    wait_for_free_blocks(demo_server)


def test_clients_that_hang_up_leave_nothing_behind(tiny: ServeProcess) -> None:
    """Half of the clients leave at a random moment; then memory and open files are what they were."""
    rng = random.Random(1)

    async def one(http: aiohttp.ClientSession, gate: asyncio.Semaphore) -> None:
        leaves, stream = rng.random() < 0.5, rng.random() < 0.5
        body = {"prompt": [rng.randrange(256) for _ in range(rng.randrange(1, 100))], "temperature": 0}
        body |= {"max_tokens": 900, "ignore_eos": True} if leaves else {"max_tokens": 5}
        async with gate:
            try:
                async with asyncio.timeout(rng.uniform(0, 0.3) if leaves else None):
                    async with http.post(COMPLETIONS, json={**body, "stream": stream}) as response:
                        text = await response.text()
                        assert response.status == 200
                        assert not stream or text.endswith("data: [DONE]\n\n")
            except TimeoutError:
                assert leaves

    async def work(count: int) -> None:
        async with session(tiny) as http:
            gate = asyncio.Semaphore(AT_ONCE)
            await asyncio.gather(*(one(http, gate) for _ in range(count)))

    asyncio.run(work(min(HANGUPS // 4, 500)))
    wait_for_free_blocks(tiny)
    files, memory = open_files(tiny), resident(tiny)
    asyncio.run(work(HANGUPS))
    wait_for_free_blocks(tiny)
    assert open_files(tiny) <= files + 2
    assert resident(tiny) < memory + 16 * MEBIBYTE


HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
# Twenty log-probabilities a token soon fill the buffers between server and client.
TALKATIVE = json.dumps({"prompt": [1], "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 20})
STALLS = {
    "silent": "",
    "head": HEAD,
    "body": f"{HEAD}1000\r\n\r\n{{",
    "reader": f"{HEAD}{len(TALKATIVE)}\r\n\r\n{TALKATIVE}",
}
SLACK_S = 15  # for a loaded machine, and for readers the time until their buffers are full


def test_stalled_sockets_are_closed_on_time_while_others_are_served(tiny: ServeProcess) -> None:
    files = open_files(tiny)
    address = (urlsplit(tiny.url).hostname, urlsplit(tiny.url).port)
    with contextlib.ExitStack() as clients:
        for sent in [sent for sent in STALLS.values() for _ in range(STALLED)]:
            client = clients.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(address)
            client.sendall(sent.encode())
        began = time.monotonic()
        while open_files(tiny) < files + len(STALLS):
            assert time.monotonic() < began + DEADLINES.header_s
        limit = began + DEADLINES.body_s + SLACK_S + STALLED / 10
        while open_files(tiny) > files + 1:
            assert tiny.is_healthy()
            assert asyncio.run(_answer(tiny)) == 200
            assert time.monotonic() < limit, f"{open_files(tiny) - files} stalled sockets are open still"
            time.sleep(0.2)
    wait_for_free_blocks(tiny)


async def _answer(server: ServeProcess) -> int:
    async with session(server) as http, http.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 2}) as response:
        status: int = response.status
    return status


def test_hostile_requests_never_harm(target: ServeProcess) -> None:
    """Requests made from the API's own description, bent in every way: each gets an answer that is no 5xx."""
    rng = random.Random(int(os.environ.get("CORELLM_FUZZ_SEED", "1")))
    document = json.loads(target.get("/openapi.json"))
    statuses: dict[int, int] = {}

    async def one(http: aiohttp.ClientSession, gate: asyncio.Semaphore) -> None:
        request = hostile_request(document, rng)
        async with gate:
            try:
                async with http.request(
                    request.method, request.path, data=request.body, headers=request.headers
                ) as response:
                    answer = await response.read()
            except aiohttp.ClientError as error:
                pytest.fail(f"{error!r} for {request}")
        statuses[response.status] = statuses.get(response.status, 0) + 1
        assert response.status < 500, f"{request}: {answer[:300]!r}\n{target.stderr[-3000:]}"
        if response.status >= 400 and request.method != "HEAD":
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}, request

    async def work() -> None:
        async with session(target) as http:
            gate = asyncio.Semaphore(AT_ONCE)
            for start in range(0, FUZZED, 5000):
                await asyncio.gather(*(one(http, gate) for _ in range(min(5000, FUZZED - start))))

    pid = target.pid
    asyncio.run(work())
    assert statuses[200] > FUZZED / 50  # some mean well
    assert statuses[400] > FUZZED / 5
    assert target.pid == pid
    assert target.is_healthy()
    assert "Traceback" not in target.stderr
    wait_for_free_blocks(target)


def test_schemathesis_finds_no_server_error(target: ServeProcess) -> None:
    """Requests that another reader of the API's description makes up, within it and beside it."""
    schema = schemathesis.openapi.from_url(f"{target.url}/openapi.json")
    for result in schema.get_all_operations():
        _try_operation(target, result.ok())
    assert target.is_healthy()
    assert "Traceback" not in target.stderr


def _try_operation(target: ServeProcess, operation: Any) -> None:
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def attempt(case: Any) -> None:
        response = case.call(base_url=target.url, timeout=30)
        assert response.status_code < 500, target.stderr[-3000:]
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    attempt()
