"""`corellm chat` on a real pseudo-terminal, against a server whose answers are scripted."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.support.chat_server import ChatServer, chat_server
from tests.support.terminal import Terminal, terminal

CORELLM = str(Path(sys.executable).with_name("corellm"))
ANSWER = "# Heading\n\nSome **bold** text.\n\n- one\n- two\n\n```python\nprint('hi')\n```\n\nThe end."

Start = Callable[..., AbstractContextManager[Terminal]]


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def echo(body: dict[str, object]) -> Sequence[str]:
    """The question again, and how many messages there were."""
    messages = body["messages"]
    assert isinstance(messages, list)
    return pieces(f"echo {len(messages)}: {messages[-1]['content']}")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "corellm"


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(
        server: ChatServer, *arguments: str, columns: int = 80, rows: int = 24, shell: str = "", **changes: str
    ) -> AbstractContextManager[Terminal]:
        """`shell` is what stands behind the command on its line, `changes` are variables of its environment."""
        env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        env |= {"TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path / "state"), "EDITOR": "true"} | changes
        command = [CORELLM, "chat", "--url", server.url, *arguments]
        if shell:
            command = ["sh", "-c", f"exec {shlex.join(command)} {shell}"]
        return terminal(command, env, columns=columns, rows=rows)

    return start


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server(lambda body: pieces(ANSWER), pause_s=0.005) as started:
        yield started


def session_file(state: Path) -> dict[str, object]:
    (path,) = (state / "sessions").glob("*.json")
    content: dict[str, object] = json.loads(path.read_bytes())
    return content


def said(state: Path) -> list[tuple[str, str, str]]:
    """(role, content, finish) of every message in the one session file."""
    conversation = session_file(state)["conversation"]
    assert isinstance(conversation, dict)
    return [(m["role"], m["content"], m.get("finish", "")) for m in conversation["messages"]]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_an_answer_is_markdown_with_a_footer(start: Start, server: ChatServer, state: Path, columns: int) -> None:
    with start(server, columns=columns) as screen:
        screen.wait_for(">")
        screen.send("hello\r")
        screen.wait_for("context")
        screen.settle()
        lines = screen.lines()
        begin = lines.index("Heading")
        assert lines[begin : begin + 10] == [
            "Heading", "", "Some bold text.", "", " • one", " • two", "", "  print('hi')", "", "The end.",
        ]  # fmt: skip
        figures = r"TTFT \d+ ms · [\d.,]+ tok/s · in 10 \(7 cached\) · out 16 · context 26 of 4,096"
        assert re.search(figures, screen.words())
        screen.send("\x04")
        assert screen.wait() == 0
    assert said(state) == [("user", "hello", ""), ("assistant", ANSWER, "stop")]


def test_interrupt_keeps_the_partial_answer_and_the_next_turn_works(start: Start, state: Path) -> None:
    long = pieces("word " * 2000)
    with (
        chat_server(lambda body: long if len(body["messages"]) == 1 else ["fine"], pause_s=0.01) as server,
        start(server) as screen,
    ):
        screen.wait_for(">")
        screen.send("talk\r")
        screen.wait_for("word word")
        screen.send("typed ahead")
        screen.send("\x03")
        screen.wait_for("interrupted")
        screen.wait_for("> typed ahead")
        screen.send("\r")
        screen.wait_for("fine")
        screen.wait_for("out 1")
    (_, partial, finish), *rest = said(state)[1:]
    assert finish == "interrupted"
    assert "".join(long).startswith(partial)
    assert partial
    assert rest == [("user", "typed ahead", ""), ("assistant", "fine", "stop")]
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["talk", partial, "typed ahead"]


def test_interrupt_at_the_prompt_clears_the_line_and_twice_leaves(start: Start, server: ChatServer) -> None:
    with start(server) as screen:
        screen.wait_for(">")
        screen.send("never sent")
        screen.wait_for("never sent")
        screen.send("\x03")
        screen.settle()
        assert "never sent" not in screen.text()
        screen.send("x\x7f\x03")
        screen.settle()
        assert screen.process.poll() is None
        screen.send("\x03")
        assert screen.wait() == 0
    assert server.bodies == []


def test_a_paste_of_200_lines_is_one_message(start: Start) -> None:
    text = "\n".join(f"line {number} of the paste" for number in range(200))
    with chat_server(lambda body: ["got it"]) as server, start(server) as screen:
        screen.wait_for(">")
        screen.paste(text)
        screen.settle()
        assert server.bodies == []
        screen.send("\r")
        screen.wait_for("got it")
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": text}]]


def test_several_lines_by_keys(start: Start) -> None:
    with chat_server(echo) as server, start(server) as screen:
        screen.wait_for(">")
        screen.send("one\x1b\rtwo\nthree\r")
        screen.wait_for("context")
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo\nthree"


def test_history_and_session_outlive_the_program(start: Start, state: Path) -> None:
    with chat_server(echo) as server:
        with start(server) as screen:
            screen.wait_for(">")
            screen.send("remember me\r")
            screen.wait_for("context")
            screen.send("/exit\r")
            assert screen.wait() == 0
        with start(server, "--continue") as screen:
            screen.wait_for(">")
            screen.send("\x12remem")
            screen.wait_for("remember me")
            screen.send("\r\r")
            screen.wait_for("echo 3")
    assert (state / "history").stat().st_mode & 0o777 == 0o600
    assert [role for role, _, _ in said(state)] == ["user", "assistant", "user", "assistant"]


def test_save_and_load_round_trip(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    with chat_server(echo) as server:
        with start(server) as screen:
            screen.wait_for(">")
            screen.send("/system be brief\r")
            screen.send("/set temperature 0.2\r")
            screen.send("first\r")
            screen.wait_for("context")
            screen.send(f"/save {path}\r")
            screen.wait_for("saved to")
            screen.send("\x04")
            screen.wait()
        with start(server) as screen:
            screen.wait_for(">")
            screen.send(f"/load {path}\r")
            screen.wait_for("loaded 1 turn")
            screen.send("second\r")
            screen.wait_for("context")
    last = server.bodies[-1]
    assert [m["content"] for m in last["messages"]] == ["be brief", "first", "echo 2: first", "second"]
    assert last["temperature"] == 0.2


def test_an_unknown_command_says_so(start: Start, server: ChatServer) -> None:
    with start(server) as screen:
        screen.wait_for(">")
        screen.send("/retyr\r")
        screen.wait_for("there is no command /retyr; did you mean /retry?")
    assert server.bodies == []


def test_commands_are_completed(start: Start, server: ChatServer) -> None:
    with start(server) as screen:
        screen.wait_for(">")
        screen.send("/sho")
        screen.wait_for("show model, session")
        screen.send("\t")
        screen.wait_for("> /show")
        screen.send("\r")
        screen.wait_for("model     test-model")


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt &#x202E; `\x1b[31m` \x1b[8m\n\n```\n\x1bc\x1b[?1049h\n```\n\ndone"
OURS = re.compile(
    rb"\x1b\[[0-9;]*m|\x1b\[\d*[ABCDJK]|\x1b\[\?(?:2026|25|2004|12|7|1)[hl]|\x1b\[[0-9;]*H|\x1b\[6n|[\r\n]"
)


def test_no_escape_of_the_model_reaches_the_terminal(start: Start) -> None:
    for size in (1, 3, 1000):
        with chat_server(lambda body, size=size: pieces(HOSTILE, size)) as server, start(server) as screen:
            screen.wait_for(">")
            screen.settle()
            before = len(screen.output)
            screen.send("attack\r")
            screen.wait_for("context")
            screen.settle()
            answer = screen.output[before:].partition(b"attack")[2].partition(b"TTFT")[0]
            assert b"done" in answer
            rest = OURS.sub(b"", answer).decode()
            assert re.findall("[\x00-\x1f\x7f-\x9f\u202e]", rest) == []
            assert rest.count("␛") >= 6


def test_a_resize_during_an_answer_loses_nothing(start: Start) -> None:
    words = [f"word{number} " for number in range(150)]
    with chat_server(lambda body: words, pause_s=0.01) as server, start(server, columns=60) as screen:
        screen.wait_for(">")
        screen.send("go\r")
        screen.wait_for("word40 ")
        screen.resize(100, 30)
        screen.wait_for("context")
        screen.settle()
        shown = screen.words()
    assert "".join(words).strip() in shown


def test_an_answer_longer_than_the_screen_stays_whole(start: Start) -> None:
    code = "\n".join(f"line_{number} = {number}" for number in range(120))
    text = f"Look:\n\n```python\n{code}\n```\n\nThat was it."
    with chat_server(lambda body: pieces(text, 40), pause_s=0.005) as server, start(server, rows=10) as screen:
        screen.wait_for(">")
        screen.send("go\r")
        screen.wait_for("context")
        screen.settle()
        shown = [line.strip() for line in screen.lines() if line.strip().startswith("line_")]
    assert shown == code.splitlines()


def test_a_server_that_breaks_off_leaves_the_chat_alive(start: Start, state: Path) -> None:
    with chat_server(lambda body: ["half an ", "answer"], break_off=True) as server, start(server) as screen:
        screen.wait_for(">")
        screen.send("go\r")
        screen.wait_for("error: ")
        screen.settle()
        assert "broke the answer off before its end; /retry asks again" in screen.words()
        server.break_off = False
        screen.send("/retry\r")
        screen.wait_for("context")
    assert [(content, finish) for _, content, finish in said(state)[1:]] == [
        ("half an answer", "failed"),
        ("half an answer", "stop"),
    ]


def test_the_key_is_sent_and_never_shown(start: Start, server: ChatServer, state: Path) -> None:
    with start(server, "--api-key", "sk-secret", "--log-level", "debug") as screen:
        screen.wait_for(">")
        screen.send("hello\r")
        screen.wait_for("context")
        screen.send("/raw\r/show\r")
        screen.wait_for("sampling")
        screen.send("\x04")
        screen.wait()
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-secret"}
    assert b"sk-secret" not in screen.output
    assert all(b"sk-secret" not in path.read_bytes() for path in state.rglob("*") if path.is_file())


def test_a_terminal_that_can_do_little_gets_plain_text(start: Start, server: ChatServer) -> None:
    with start(server, "--plain") as screen:
        screen.wait_for(">")
        screen.send("hello\r")
        screen.wait_for("context")
        assert "Some **bold** text." in screen.lines()


def test_a_terminal_without_a_cursor_gets_plain_text(start: Start, server: ChatServer) -> None:
    with start(server, TERM="dumb") as screen:
        screen.wait_for(">")
        screen.send("hello\r")
        screen.wait_for("context")
        assert "Some **bold** text." in screen.lines()


def test_answers_go_raw_to_a_file_and_all_else_to_the_terminal(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "answers.txt"
    with chat_server(lambda body: ["**raw** ", "\x1b[1m"]) as server, start(server, shell=f"> {path}") as screen:
        screen.wait_for(">")
        screen.send("\x03")
        screen.wait_for("leaves")
        screen.send("hello\r")
        screen.wait_for("context")
        screen.send("\x04")
        assert screen.wait() == 0
    assert path.read_text() == "**raw** \x1b[1m\n"


def an_editor(folder: Path, line: str) -> str:
    """The path of an editor that runs a line of shell on its file, $1."""
    editor = folder / "editor"
    editor.write_text(f"#!/bin/sh\n{line}\n")
    editor.chmod(0o700)
    return str(editor)


def test_the_editor_opens_and_edit_offers_the_question_again(start: Start, tmp_path: Path) -> None:
    editor = an_editor(tmp_path, 'printf "%s, edited" "$(cat "$1")" > "$1"')
    with chat_server(echo) as server, start(server, EDITOR=editor, VISUAL="") as screen:
        screen.wait_for(">")
        screen.send("draft")
        screen.wait_for("> draft")
        screen.send("\x07")
        screen.wait_for("> draft, edited")
        screen.send("\r")
        screen.wait_for("echo 1: draft, edited")
        screen.wait_for("context")
        screen.send("/edit\r")
        screen.wait_until(lambda: screen.text().count("> draft, edited") == 2, "draft")
        screen.send(" twice\r")
        screen.wait_for("echo 1: draft, edited twice")
        screen.wait_until(lambda: screen.text().count("context") == 2, "second footer")


def test_ctrl_z_suspends_at_the_prompt_and_fg_comes_back_to_what_was_written(tmp_path: Path) -> None:
    env = os.environ | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path / "state"), "PS1": "$ "}
    with (
        chat_server(echo) as server,
        terminal(["bash", "--norc", "--noprofile", "-i"], env) as screen,  # only a shell can stop and go on with a job
    ):
        screen.send(f"{CORELLM} chat --url {server.url}\r")
        screen.wait_for("/help lists")
        screen.send("half a que")
        screen.wait_for("> half a que")
        screen.send("\x1a")
        screen.wait_for("Stopped")
        screen.send("fg\r")
        screen.settle()
        screen.send("stion\r")
        screen.wait_for("echo 1: half a question")
        screen.wait_for("context")
        screen.send("\x04")
        screen.settle()
        screen.send("exit\r")
        screen.wait()


def test_after_ctrl_z_and_fg_during_an_answer_keys_do_not_show(tmp_path: Path) -> None:
    env = os.environ | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(tmp_path / "state"), "PS1": "$ "}
    with (
        chat_server(lambda body: [f"word{number} " for number in range(4000)], pause_s=0.01) as server,
        terminal(["bash", "--norc", "--noprofile", "-i"], env) as screen,
    ):
        screen.send(f"{CORELLM} chat --url {server.url}\r")
        screen.wait_for("/help lists")
        screen.send("go\r")
        screen.wait_for("word9 ")
        screen.send("\x1a")
        screen.wait_for("Stopped")
        screen.send("fg\r")
        drawn = len(screen.output)
        screen.wait_until(lambda: screen.output.count(b"word", drawn) > 20, "more of the answer")
        before = len(screen.output)
        screen.send("ahead")
        screen.wait_until(lambda: screen.output.count(b"word", before) > 40, "still more of the answer")
        assert b"ahead" not in screen.output[before:]
        screen.send("\x03")
        screen.wait_for("interrupted; /retry asks again")
        screen.wait_for("> ahead")
        assert b"^C" not in screen.output[before:]
        screen.send("\x03\x04")
        screen.settle()
        screen.send("exit\r")
        screen.wait()


def test_what_an_editor_saves_in_other_bytes_is_refused_and_the_text_stays(start: Start, tmp_path: Path) -> None:
    editor = an_editor(tmp_path, "printf '\\377' >> \"$1\"")
    with chat_server(echo) as server, start(server, EDITOR=editor, VISUAL="") as screen:
        screen.wait_for(">")
        screen.send("draft")
        screen.wait_for("> draft")
        screen.send("\x07")
        screen.wait_for("error: what the editor saved is not UTF-8 text: the byte at offset 5 is 0xff")
        screen.send(" goes on\r")
        screen.wait_for("echo 1: draft goes on")
        assert "Unhandled" not in screen.text()
        assert "Traceback" not in screen.text()


def test_a_session_that_cannot_be_saved_is_told_once_a_turn_after_the_answer(
    start: Start, server: ChatServer, state: Path
) -> None:
    state.mkdir(parents=True)
    (state / "sessions").touch()
    with start(server, columns=200) as screen:
        for turn in range(1, 3):
            screen.wait_until(lambda: screen.lines()[-1].startswith(">") or "\n>" in screen.text(), "prompt")
            screen.send("hello\r")
            screen.wait_until(lambda turn=turn: screen.text().count("not saved") >= turn, "notice")
            screen.settle()
        lines = [line for line in screen.lines() if line]
    turns = [number for number, line in enumerate(lines) if line == "> hello"]
    assert len(turns) == 2
    for begin in turns:
        answer = ["Heading", "Some bold text.", " • one", " • two", "  print('hi')", "The end."]
        assert lines[begin + 1 : begin + 7] == answer
        assert lines[begin + 7].startswith("TTFT")
        assert lines[begin + 8].startswith(f"the session is not saved: {state / 'sessions'}")
    assert sum("not saved" in line for line in lines) == 2


def test_a_file_without_an_end_does_not_hold_the_chat(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with chat_server(echo) as server, start(server, columns=200) as screen:
        screen.wait_for(">")
        for command in (f"/load {tmp_path}/fifo", "/load /dev/zero", f"/system @{tmp_path}/fifo", "/system @/dev/zero"):
            screen.send(f"{command}\r")
            screen.wait_for(f"error: {command.split()[1].removeprefix('@')} is no regular file; name one that is")
            screen.settle()
            screen.send("/clear\r")
        screen.send("hello\r")
        screen.wait_for("echo 1: hello")


@pytest.mark.parametrize("during", ["prompt", "answer"])
def test_a_terminated_chat_leaves_the_terminal_as_it_was(start: Start, during: str) -> None:
    with chat_server(lambda body: ["word "] * 1000, pause_s=0.02) as server, start(server) as screen:
        screen.wait_for(">")
        assert not screen.is_as_before()
        if during == "answer":
            screen.send("go\r")
            screen.wait_for("word word")
        screen.process.send_signal(signal.SIGTERM)
        assert screen.wait() == 130
        assert screen.is_as_before()
