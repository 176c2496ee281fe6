"""The life of `corellm serve` on a tiny model: draining, death, several API workers, what it refuses to start with."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.processes import engine_processes, pid_of, wait_until_gone
from tests.support.serve_process import CORELLM, ServeProcess, serving

LONG = {"prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def shared(long_tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """A server with three API workers and three keys, for tests that let it live."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "keys").write_text("from-file\nsecond\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORELLM_API_KEY", "from-environment")
        server = ServeProcess(folder, long_tiny, "--api-key-file", str(folder / "keys"), "--api-workers", "3")
    server.headers = {"Authorization": "Bearer second"}
    try:
        server.start()
        _wait_for_workers(server, 3)
        yield server
    finally:
        server.stop()


class Stream:
    """A streamed completion, read as it comes."""

    def __init__(self, server: ServeProcess, body: dict[str, Any]) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        self.response = self.connection.getresponse()
        assert self.response.status == 200

    def event(self) -> str:
        """The next event's data; empty at the end."""
        while (line := self.response.readline()) == b"\n":
            pass
        return line.decode().removeprefix("data: ").strip()

    def rest(self) -> list[str]:
        events = []
        while event := self.event():
            events.append(event)
        self.connection.close()
        return events


def post(server: ServeProcess, body: dict[str, Any]) -> int:
    headers = {"Content-Type": "application/json", **server.headers}
    return _status(urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers))


def _status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_sigterm_answers_what_is_open_and_takes_nothing_new(long_tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, long_tiny, "--api-workers", "2") as server:
        _wait_for_workers(server, 2)
        streams = [Stream(server, {**LONG, "max_tokens": 400}) for _ in range(4)]
        assert all(stream.event() for stream in streams)
        os.kill(server.pid, signal.SIGTERM)
        time.sleep(0.2)
        assert [post(server, {"prompt": [1]}) for _ in range(4)] == [503] * 4
        for stream in streams:
            events = stream.rest()
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait(10) == 0
        wait_until_gone(server.run_root, 2)


def test_a_signal_to_every_process_drains_too(long_tiny: str, tmp_path: Path) -> None:
    """As a service manager stops a unit."""
    with serving(tmp_path, long_tiny, "--api-workers", "2") as server:
        _wait_for_workers(server, 2)
        streams = [Stream(server, {**LONG, "max_tokens": 300}) for _ in range(4)]
        assert all(stream.event() for stream in streams)
        processes = engine_processes(server.run_root)
        for pid in [server.pid, *(pid for pid, name in processes.items() if name != "corellm.worker")]:
            os.kill(pid, signal.SIGTERM)
        assert [stream.rest()[-1] for stream in streams] == ["[DONE]"] * 4
        assert server.wait(10) == 0
        wait_until_gone(server.run_root, 2)


@pytest.mark.parametrize(
    ("grace", "workers", "signals", "code"),
    [("0.3", "1", [signal.SIGINT], 130), ("60", "2", [signal.SIGTERM] * 2, 0)],
    ids=["one and the grace", "two"],
)
def test_the_grace_and_a_second_signal_end_it(
    long_tiny: str, tmp_path: Path, grace: str, workers: str, signals: list[signal.Signals], code: int
) -> None:
    """Ctrl-C as well as SIGTERM, which the exit code tells apart."""
    with serving(tmp_path, long_tiny, "--shutdown-grace", grace, "--api-workers", workers) as server:
        stream = Stream(server, {**LONG, "n": 8})
        assert stream.event()
        began = time.monotonic()
        for number in signals:
            os.kill(server.pid, number)
            until_draining(server)
        last = stream.rest()[-1]
        assert f"draining: 8 answers are open, for at most {grace} s more; Ctrl-C" in server.stderr
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert server.wait(10) == code
        assert time.monotonic() - began < 5
        wait_until_gone(server.run_root, 2)


def until_draining(server: ServeProcess) -> None:
    """Until it says that it drains, and for what."""
    deadline = time.monotonic() + 10
    while "draining" not in server.stderr:
        assert time.monotonic() < deadline, server.stderr
        time.sleep(0.02)


def join(server: ServeProcess, tokens: int) -> subprocess.Popen[bytes]:
    """A batch of one row that has joined the server's engine, and is at work on it."""
    rows = server.folder / "in.jsonl"
    rows.write_text(json.dumps({"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True}))
    model = server.words[server.words.index("--model") + 1]
    words = [CORELLM, "batch", str(rows), "--model", model, "--device", "cpu"]
    joined = subprocess.Popen(words, env=server.environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while re.search(r"num_requests_running\{.*\} 1\.0", server.get("/metrics")) is None:
        assert time.monotonic() < deadline, server.stderr
        time.sleep(0.02)
    return joined


@pytest.mark.parametrize("workers", ["1", "2"])
def test_front_ends_that_have_joined_are_waited_for_too(long_tiny: str, tmp_path: Path, workers: str) -> None:
    with serving(tmp_path, long_tiny, "--api-workers", workers) as server, join(server, 1500) as joined:
        os.kill(server.pid, signal.SIGTERM)
        until_draining(server)
        deadline = time.monotonic() + 5
        while (
            post(server, {"prompt": [1], "max_tokens": 1}) != 503
        ):  # another API worker may learn of it a little later
            assert time.monotonic() < deadline, "5 s after it began to drain it still takes new requests"
        assert joined.wait(30) == 0
        assert '"completion_tokens":1500' in (tmp_path / "in.out.jsonl").read_text().replace(" ", "")
        assert server.wait(10) == 0
        assert "draining: 1 answer is open, for at most 30 s more" in server.stderr
        wait_until_gone(server.run_root, 2)


def test_front_ends_that_have_joined_are_waited_for_no_longer_than_the_grace(long_tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, long_tiny, "--shutdown-grace", "0.5") as server, join(server, 4000) as joined:
        began = time.monotonic()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(10) == 0
        assert time.monotonic() - began < 5
        assert joined.wait(10) == 1


def test_an_engine_that_dies_while_others_are_waited_for_is_told_by_the_exit_code(
    long_tiny: str, tmp_path: Path
) -> None:
    with serving(tmp_path, long_tiny) as server, join(server, 4000) as joined:
        os.kill(server.pid, signal.SIGTERM)
        until_draining(server)
        os.kill(pid_of(server.run_root, "corellm.engine"), signal.SIGKILL)
        assert server.wait(20) == 1
        assert joined.wait(20) == 1


def test_a_server_with_nothing_open_leaves_at_once_and_says_nothing(long_tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, long_tiny) as server:
        assert post(server, {"prompt": [1], "max_tokens": 2}) == 200
        began = time.monotonic()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(20) == 130
        assert time.monotonic() - began < 15  # not the grace of 30
        assert "draining" not in server.stderr


def test_while_it_starts_health_tells_the_stage_and_a_signal_ends_it(long_tiny: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ServeProcess(tmp_path, long_tiny, "--port", str(port))
    server.launch()
    try:
        deadline = time.monotonic() + 30
        while "corellm.worker" not in engine_processes(server.run_root).values():
            assert time.monotonic() < deadline, server.stderr
            time.sleep(0.01)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        response = connection.getresponse()
        body = json.loads(response.read())
        connection.close()
        assert (response.status, body["status"]) == (503, "starting")
        assert body["stage"]
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(20) == 0
        wait_until_gone(server.run_root, 2)
    finally:
        server.stop()


@pytest.mark.parametrize(("victim", "workers"), [("corellm.engine", "2"), ("corellm.worker", "1")])
def test_death_is_told_to_every_stream_and_by_the_exit_code(
    long_tiny: str, tmp_path: Path, victim: str, workers: str
) -> None:
    with serving(tmp_path, long_tiny, "--api-workers", workers) as server:
        _wait_for_workers(server, int(workers))
        streams = [Stream(server, LONG) for _ in range(6)]
        assert all(stream.event() for stream in streams)
        os.kill(pid_of(server.run_root, victim), signal.SIGKILL)
        died = time.monotonic()
        while server.is_healthy():
            assert time.monotonic() - died < 1
        for stream in streams:
            events = stream.rest()
            assert json.loads(events[-1])["error"]["type"] == "service_unavailable_error"
            assert "[DONE]" not in events
        assert server.wait(10) == 1
        assert "error:" in server.stderr
        assert "Traceback" not in server.stderr
        wait_until_gone(server.run_root, 3)


def test_api_workers_share_port_engine_and_metrics(shared: ServeProcess) -> None:
    for _ in range(40):
        assert post(shared, {"prompt": [1, 2], "max_tokens": 2}) == 200
    assert shared.metric("request_success_total") == 40
    assert shared.metric("time_to_first_token_seconds_count") == 40
    names = list(engine_processes(shared.run_root).values())
    assert (names.count("corellm.engine"), names.count("corellm.openai_server")) == (1, 2)


def test_the_death_of_an_api_worker_ends_the_server(long_tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, long_tiny, "--api-workers", "2") as server:
        os.kill(pid_of(server.run_root, "corellm.openai_server"), signal.SIGKILL)
        assert server.wait(10) == 1
        assert "API worker 2 was killed by SIGKILL" in server.stderr
        wait_until_gone(server.run_root, 3)


def test_the_death_of_the_main_process_takes_everything_along(long_tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, long_tiny, "--api-workers", "2") as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_until_gone(server.run_root, 3)


def _wait_for_workers(server: ServeProcess, count: int) -> None:
    """Until every API worker listens: each has a socket on the port."""
    port = urlsplit(server.url).port
    deadline = time.monotonic() + 30
    while Path("/proc/net/tcp").read_text().count(f":{port:04X} 00000000:0000 0A") < count:
        assert time.monotonic() < deadline, server.stderr
        time.sleep(0.05)


def refused(*options: str, code: int) -> str:
    done = subprocess.run([CORELLM, "serve", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_port_that_is_taken_is_said_before_the_model_is_looked_for(shared: ServeProcess) -> None:
    port = str(urlsplit(shared.url).port)
    for workers in ("1", "2"):
        said = refused("--model", "/nowhere", "--port", port, "--api-workers", workers, code=1)
        assert "Address already in use" in said


def test_what_others_could_reach_needs_a_key() -> None:
    assert "--insecure" in refused("--model", "demo", "--host", "0.0.0.0", code=2)


def test_keys_from_a_file_and_the_environment(shared: ServeProcess) -> None:
    for key, status in (("from-file", 200), ("second", 200), ("from-environment", 200), ("other", 401)):
        request = urllib.request.Request(f"{shared.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert [_status(request) for _ in range(4)] == [status] * 4  # each API worker has its turn, most likely
    assert "from-file" not in shared.stderr
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in engine_processes(shared.run_root)]
    assert not any(b"from-" in words for words in arguments)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(long_tiny: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*words.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    with serving(tmp_path, long_tiny, "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{server.url}/health", context=context, timeout=10) as response:
            assert json.load(response) == {"status": "ok"}
    assert "cannot be used" in refused(
        "--model", long_tiny, "--port", "0", "--tls-cert", str(key), "--tls-key", str(key), code=2
    )
