"""Sessions on disk: whole at every moment, private, and never overwritten by another chat."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from corellm.chat.conversation import Call, Conversation, Message
from corellm.chat.files import read_bounded
from corellm.chat.session import Session, from_json, to_json
from corellm.chat.store import SessionStore, make_private, read_session, state_folder, write_session
from corellm.errors import ChatError


@pytest.fixture
def store(tmp_path: Path) -> SessionStore:
    return SessionStore(tmp_path / "sessions")


def session_with(text: str, name: str = "one") -> Session:
    session = Session(name=name, system="be brief", sampling={"temperature": 0.5, "stop": ["END"]})
    session.conversation.ask(text)
    call = Call(id="c1", name="look_up", arguments='{"x": 1}')
    session.conversation.add(Message(role="assistant", content="A", finish="tool_calls", tool_calls=[call]))
    session.conversation.add(Message(role="tool", content="42", tool_call_id="c1"))
    return session


def test_a_session_survives_the_round_trip(store: SessionStore) -> None:
    session = session_with("héllo 👩‍👩‍👧 \x1b[31m \x00")
    assert store.save(session) is None
    assert store.open("one") == session


def test_half_a_surrogate_pair_does_not_keep_a_session_from_being_saved(store: SessionStore) -> None:
    store.save(session_with("broken \ud800 paste"))
    assert store.open("one").conversation.messages[0].content == "broken ? paste"


def test_the_file_and_its_folder_are_private(store: SessionStore, tmp_path: Path) -> None:
    store.save(session_with("x"))
    assert (tmp_path / "sessions").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "sessions/one.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    store: SessionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    session = session_with("first")
    store.save(session)
    before = (tmp_path / "sessions/one.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    session.conversation.ask("second")
    with pytest.raises(ChatError, match="No space left on device; free space"):
        store.save(session)
    assert (tmp_path / "sessions/one.json").read_bytes() == before
    assert os.listdir(tmp_path / "sessions") == ["one.json"]


def test_another_chat_in_the_same_session_is_not_overwritten(tmp_path: Path) -> None:
    ours, theirs = SessionStore(tmp_path), SessionStore(tmp_path)
    ours.save(session_with("start"))
    mine, other = ours.open("one"), theirs.open("one")
    other.conversation.ask("theirs")
    assert theirs.save(other) is None
    mine.conversation.ask("mine")
    assert ours.save(mine) == "one-2"
    assert ours.save(mine) is None
    assert ours.peek("one").conversation.path()[-1].content == "theirs"
    assert ours.peek("one-2").conversation.path()[-1].content == "mine"


def test_a_new_session_never_takes_a_file_that_is_there(store: SessionStore) -> None:
    first = store.new()
    store.save(first)
    second = store.new()
    assert second.name != first.name
    assert second.name.startswith(first.name[:10])


def test_the_last_written_session_is_the_latest(store: SessionStore, tmp_path: Path) -> None:
    with pytest.raises(ChatError, match="there is no session"):
        store.latest()
    for number, name in enumerate(["b", "c", "a"]):
        store.save(Session(name=name))
        os.utime(tmp_path / f"sessions/{name}.json", ns=(0, number))
    assert store.names() == ["a", "c", "b"]
    assert store.latest().name == "a"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-x", ".hidden", "a" * 101, "a\nb", "ü"])
def test_names_that_are_no_file_names_are_refused(store: SessionStore, name: str) -> None:
    with pytest.raises(ChatError, match="the session name"):
        store.open(name)


def damaged(**changes: Any) -> bytes:
    content = json.loads(to_json(session_with("x")))
    content.update(changes)
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "is not a chat session"),
        (b"{}", "version"),
        (to_json(session_with("x"))[:-40], "is not a chat session"),
        (damaged(version=2), "session: version is 2; this CoreLLM reads version 1"),
        (b'{"version": 1, "name": "x", "tools": ' + b"[" * 100_000, "recursion depth"),
        (damaged(system=3), r"\$.system"),
        (damaged(sampling={"temperature": 9}), "temperature is 9"),
        (damaged(sampling={"temprature": 1}), "no setting 'temprature'"),
        (damaged(tools=[{"type": "function"}]), r"tools\[0\].function"),
        (damaged(conversation={"messages": [], "head": 4}), "head is 4"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else ""
    ),  # the bytes hold the time, and two processes collect this
)
def test_what_is_no_session_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(ChatError, match=named) as found:
        from_json(data, "some/file")
    assert found.value.message.startswith("some/file ")


def test_files_that_can_not_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"missing\.json: No such file or directory; check the path"):
        read_session(tmp_path / "missing.json")
    with pytest.raises(ChatError, match=r"nowhere/x\.json: No such file or directory; make its folder first"):
        write_session(tmp_path / "nowhere/x.json", Session(name="x"))
    with pytest.raises(ChatError, match="File name too long; choose a shorter name"):
        write_session(tmp_path / ("x" * 300), Session(name="x"))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space or choose another place"),
        (errno.EACCES, "choose a place that you may write to"),
        (errno.EROFS, "choose a place that you may write to"),
        (errno.EIO, "choose another place"),
    ],
)
def test_what_helps_against_a_failed_write_fits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ChatError) as found:
        write_session(tmp_path / "x.json", Session(name="x"))
    assert found.value.message == f"{tmp_path}/x.json: {os.strerror(number)}; {remedy}"


def test_what_is_no_file_or_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ChatError, match="is no regular file; name one that is"):
            read_session(path)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ChatError, match=r"huge has more than 268,435,456 bytes; give less"):
        read_session(tmp_path / "huge")


def test_a_file_may_have_as_many_bytes_as_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ChatError, match="more than 4 bytes"):
        read_bounded(tmp_path / "file", 4)


def test_a_long_session_is_read(store: SessionStore) -> None:
    """A hundred contexts of 131,072 tokens, of four characters each."""
    session = session_with("word" * 131_072 * 100)
    store.save(session)
    assert store.open("one") == session


def test_the_state_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert state_folder() == tmp_path / "state/corellm"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local/state/corellm"
    monkeypatch.setenv("XDG_STATE_HOME", "~nobody-here/state")
    with pytest.raises(ChatError, match="no home folder to keep sessions in; set XDG_STATE_HOME"):
        state_folder()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    make_private(tmp_path / "a/b")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ChatError, match="set XDG_STATE_HOME"):
        make_private(tmp_path / "file/b")


def test_an_empty_conversation_is_one() -> None:
    assert from_json(to_json(Session(name="x")), "x").conversation == Conversation()
