"""`corellm chat` with the demo model on an engine of its own: answers, cache, overflow, death."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.processes import pid_of, wait_until_gone
from tests.support.terminal import Terminal, terminal

CORELLM = str(Path(sys.executable).with_name("corellm"))
OPTIONS = ("--model", "demo", "--device", "cpu", "--temperature", "0", "--new-engine", "--date", "none")
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
FIGURES = re.compile(r"in ([\d,]+) \(([\d,]+) cached\) · out ([\d,]+) · context ([\d,]+) of ([\d,]+)")

Start = Callable[..., AbstractContextManager[Terminal]]


@pytest.fixture
def env(tmp_path: Path, demo_model: Path) -> dict[str, str]:
    (tmp_path / "run").mkdir(mode=0o700)
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    changed = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path / "run"), "TERM": "xterm"}
    return kept | changed


@pytest.fixture
def start(env: dict[str, str]) -> Start:
    return lambda *arguments: terminal([CORELLM, "chat", *OPTIONS, *arguments], env, columns=120)


def figures(screen: Terminal) -> list[tuple[int, ...]]:
    """(in, cached, out, context, maximum) of every footer."""
    return [tuple(int(number.replace(",", "")) for number in found) for found in FIGURES.findall(screen.text())]


def test_turns_reuse_the_cache_and_a_killed_engine_leaves_a_whole_session(
    start: Start, env: dict[str, str], tmp_path: Path
) -> None:
    with start("--page-size", "4") as screen:
        screen.wait_until(lambda: "\n>" in screen.text(), "prompt")
        screen.send(f"{QUESTION}\r")
        screen.wait_until(lambda: len(figures(screen)) == 1, "footer")
        assert ANSWER in screen.text()
        screen.settle()
        screen.send("And of Germany?\r")
        screen.wait_until(lambda: len(figures(screen)) == 2, "second footer")
        (first_in, _, first_out, first_context, most), (_, cached, *_) = figures(screen)
        assert first_context == first_in + first_out
        assert most == 8192
        # All of the first turn but at most one page is reused: turn 2 computes what is new.
        assert first_context - 4 <= cached < first_context
        assert cached % 4 == 0

        screen.send("Tell me a very long story about a river.\r")
        screen.wait_until(lambda: len(screen.text().partition("about a river.")[2]) > 40, "beginning of the story")
        os.kill(pid_of(tmp_path / "run", "corellm.engine"), signal.SIGKILL)
        assert screen.wait() == 1
        assert "error: the engine was killed by SIGKILL" in screen.text()
        assert "the conversation is kept: corellm chat --session" in screen.text()
    wait_until_gone(tmp_path / "run", 10)
    (path,) = (tmp_path / "state/corellm/sessions").glob("*.json")
    messages = json.loads(path.read_bytes())["conversation"]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 3
    assert [message.get("finish") for message in messages[1::2]] == ["stop", "stop", "failed"]
    assert messages[1]["content"] == ANSWER
    assert messages[5]["content"]


def test_an_engine_that_dies_while_the_user_writes(start: Start, tmp_path: Path) -> None:
    with start() as screen:
        screen.wait_for("resolve model")
        screen.send("/show\rhalf a que")  # while the engine starts: nothing of it shows until there is a prompt
        screen.wait_for("model     demo")
        screen.wait_for("> half a que")
        assert screen.text().count("half a que") == 1
        os.kill(pid_of(tmp_path / "run", "corellm.engine"), signal.SIGKILL)
        assert screen.wait() == 1
        assert "error: the engine was killed by SIGKILL" in screen.text()


def test_a_full_context_is_told_and_mended(start: Start) -> None:
    with start("--max-model-len", "150", "--max-tokens", "30", "--system", "Be brief.") as screen:
        screen.wait_until(lambda: "\n>" in screen.text(), "prompt")
        screen.send("/raw\r")
        screen.wait_until(lambda: re.search(r"ids: [\d ]+", screen.text()) is not None, "ids")
        assert "<|im_start|>system\nBe brief.<|im_end|>" in screen.text()
        for turn in range(1, 3):
            screen.send("Name three colours, please, and nothing else at all.\r")
            screen.wait_until(lambda turn=turn: len(figures(screen)) == turn, "footer")
        screen.send("word " * 40 + "\r")
        offer = "prompt and answer may have 150 together. /drop lets go of the oldest turns"
        screen.wait_until(lambda: offer in screen.words(), offer)
        screen.send("/drop\r")
        screen.wait_for("/branch leads back")
        screen.wait_until(lambda: len(figures(screen)) == 3, "footer after the drop")
        screen.send("word " * 200 + "\r")
        screen.wait_until(lambda: screen.words().count("150 together") == 2, "second offer")
        screen.send("/clear\r")
        screen.wait_for("a new conversation")
        screen.send(f"{QUESTION}\r")
        screen.wait_until(lambda: len(figures(screen)) == 4, "footer after the clear")


@pytest.mark.parametrize(("arguments", "piped"), [((), QUESTION), (("--prompt", QUESTION), None)])
def test_pipes_get_the_answer_and_nothing_else(
    env: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], piped: str | None
) -> None:
    done = subprocess.run(
        [CORELLM, "chat", *OPTIONS, *arguments],
        input=piped or "",
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ANSWER
    assert done.stdout.endswith("\n")
    assert "demo ready" in done.stderr
    assert not list((tmp_path / "state/corellm").rglob("*.json"))
    wait_until_gone(tmp_path / "run", 10)
