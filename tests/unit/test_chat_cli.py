"""The options of `corellm chat`: what is refused, before anything starts, and what a run is made of."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from corellm_cli import chat_run
from corellm_cli.chat_run import ChatCommand
from corellm_cli.main import run
from tests.support.chat_server import chat_server


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CORELLM_API_KEY", raising=False)


class Pipe(io.TextIOWrapper):
    """stdin with a text piped in."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--session", "a", "--continue"], "--session and --continue contradict each other"),
        (["--engine", "a", "--new-engine"], "--engine and --new-engine contradict each other"),
        (["--url", "localhost:8000"], "must be http:// or https://, a host and a path"),
        (["--url", "ftp://host/v1"], "must be http:// or https://"),
        (["--url", "http://host:99999/v1"], "--url is not a URL"),
        (["--url", "http://me:secret@host/v1"], "--url has a name or password in it"),
        (["--url", "http://host/v1", "--tp", "2", "--new-engine"], "so --tp, --new-engine can mean nothing"),
        (["--api-key", "sk\nx"], "--api-key has characters that no key has"),
        (["--system", "@/no/such/file"], "--system: /no/such/file: No such file"),
        (["--system", "@~nobody-here/file"], "--system: ~nobody-here/file: No such file"),
        (["--tools", "/no/such/file"], "--tools: /no/such/file: No such file"),
        (["--tools", "~nobody-here/file"], "--tools: ~nobody-here/file: No such file"),
        (["--temperature", "3"], "--temperature is 3; it must be a number from 0 to 2"),
        (["--session", "../x"], "the session name '../x' is not allowed"),
        (["--continue"], "there is no session in"),
        ([], "there is nothing to answer: stdin and --prompt are empty"),
        (["--prompt", "  "], "there is nothing to answer"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Pipe(""))
    assert run(["chat", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in " ".join(captured.err.split())
    assert "secret" not in captured.err
    assert "sk" not in captured.err.replace("task", "")


def test_a_closed_stdin_has_nothing_to_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(["chat"]) == 2
    assert "there is nothing to answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '[{"type": "function"}]', '[{"type": "function", "function": {}}]']
)
def test_tools_that_are_none_are_refused(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Pipe("hi"))
    path = tmp_path / "tools.json"
    path.write_text(content)
    assert run(["chat", "--tools", str(path)]) == 2
    assert f"--tools: {path}" in " ".join(capsys.readouterr().err.split())


def commands(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> ChatCommand:
    """What the arguments come to."""
    seen: list[ChatCommand] = []

    def keep(command: ChatCommand) -> int:
        seen.append(command)
        return 0

    monkeypatch.setattr(chat_run, "run_chat", keep)
    assert run(["chat", *arguments]) == 0
    return seen[0]


def test_options_reach_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be brief.\n")
    monkeypatch.setenv("CORELLM_API_KEY", "sk-x")
    monkeypatch.setenv("CORELLM_TP", "2")  # meant for engines
    command = commands(
        ["--system", f"@{path}", "--temperature", "0.3", "--stop", "END", "--url", "http://host:1/v1/chat/completions"],
        monkeypatch,
    )
    assert command.system == "Be brief."
    assert command.sampling == {"temperature": 0.3, "stop": ["END"]}
    assert command.url == "http://host:1/v1"
    assert command.api_key == "sk-x"


def test_a_seed_is_one_only_if_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands([], monkeypatch).sampling == {}
    assert commands(["--seed", "0"], monkeypatch).sampling == {"seed": 0}


def one_shot(
    arguments: list[str], piped: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str, list[dict[str, Any]]]:
    """Exit code, stdout, stderr, and what the server was sent."""
    monkeypatch.setattr("sys.stdin", Pipe(piped))
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with chat_server(lambda body: ["**raw** ", "\x1b[1m", "\ud800"]) as server:
        code = run(["chat", "--url", server.url, *arguments])
    out.flush()
    err.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode(), server.bodies


def test_a_pipe_gets_the_raw_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err, bodies = one_shot([], "hi\n", monkeypatch)
    assert (code, out, err) == (0, "**raw** \x1b[1m?\n", "")
    assert bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_a_piped_text_goes_before_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, bodies = one_shot(["-p", "Summarize this."], "A long text.\n", monkeypatch)
    assert bodies[0]["messages"][0]["content"] == "A long text.\n\nSummarize this."


def test_one_shot_goes_on_with_a_named_session_and_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_shot([], "not kept", monkeypatch)
    assert not list((tmp_path / "state").rglob("*.json"))
    one_shot(["--session", "work"], "first", monkeypatch)
    _, _, _, bodies = one_shot(["--continue"], "second", monkeypatch)
    assert [m["content"] for m in bodies[0]["messages"]][::2] == ["first", "second"]
    (path,) = (tmp_path / "state").rglob("*.json")
    assert len(json.loads(path.read_bytes())["conversation"]["messages"]) == 4


def test_the_date_is_todays_unless_it_is_given() -> None:
    assert chat_run._date("26 Jul 2024") == "26 Jul 2024"
    assert chat_run._date("none") is None
    today = chat_run._date(None)
    assert today is not None
    assert len(today.split()) == 3


def test_a_second_signal_does_not_cut_short_what_the_first_began() -> None:
    """As when a terminal closes: it sends SIGHUP, and so does its shell."""
    done: list[str] = []

    async def work() -> None:
        with chat_run._ending_on_signals():
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(10)
            finally:
                for number in (signal.SIGHUP, signal.SIGTERM):
                    os.kill(os.getpid(), number)
                    await asyncio.sleep(0.01)
                done.append("the engine has ended")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert done
