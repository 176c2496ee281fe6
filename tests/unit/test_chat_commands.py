"""Commands of a chat, and what a chat keeps when an answer ends early: no terminal and no engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

import pytest

from corellm.chat.actions import Outcome
from corellm.chat.chat import Chat
from corellm.chat.commands import COMMANDS, complete, is_command, message_of, run_command, usage
from corellm.chat.conversation import Call
from corellm.chat.session import Session
from corellm.chat.settings import DEFAULTS, SETTINGS, sampling_params
from corellm.chat.store import SessionStore
from corellm.errors import ChatError, EngineDeadError
from corellm.sampling_params import SamplingParams
from tests.support.fake_backend import FakeBackend


class Table:
    """A chat, and what it was heard to say."""

    def __init__(self, folder: Path, backend: FakeBackend | None = None) -> None:
        self.backend = backend or FakeBackend(lambda messages: [f"answer to {messages[-1]['content']}"])
        self.heard: list[str] = []
        self.store = SessionStore(folder)
        self.chat = Chat(self.backend, self.store.new(), self.store)

    def ask(self, text: str) -> None:
        self.chat.ask(text)
        self.answer()

    def answer(self) -> None:
        asyncio.run(self.chat.answer(self.heard.append))

    def run(self, line: str) -> Outcome:
        outcome = run_command(self.chat, line)
        if outcome.answer:
            self.answer()
        return outcome

    def path(self) -> list[str]:
        return [message.content for message in self.chat.conversation.path()]

    def saved(self) -> Session:
        return self.store.peek(self.chat.session.name)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(tmp_path)


def test_a_turn_is_streamed_and_saved(table: Table) -> None:
    table.ask("one")
    assert table.heard == ["answer to one", ""]
    assert table.saved() == table.chat.session
    assert table.saved().model == "fake-model"
    assert [m.content for m in table.saved().conversation.path()] == ["one", "answer to one"]


def test_a_question_is_saved_before_it_is_answered(table: Table) -> None:
    table.chat.ask("one")
    assert [m.content for m in table.saved().conversation.path()] == ["one"]


def test_every_turn_has_the_earlier_ones_and_the_system_message(table: Table) -> None:
    table.run("/system be brief")
    table.ask("one")
    table.ask("two")
    assert [(m["role"], m["content"]) for m in table.backend.asked[-1]] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "answer to one"),
        ("user", "two"),
    ]
    table.run("/system -")
    table.ask("three")
    assert table.backend.asked[-1][0]["role"] == "user"


def test_the_system_message_may_stand_in_a_file(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brief.txt").write_text("Be brief.\nVery.\n")
    assert table.run(f"/system @{tmp_path}/brief.txt").lines == ("system: Be brief.\nVery.",)
    monkeypatch.setenv("HOME", str(tmp_path))
    table.run("/system -")
    table.run("/system @~/brief.txt")
    assert table.saved().system == "Be brief.\nVery."


def test_a_file_that_gives_no_system_message_leaves_the_old_one(table: Table, tmp_path: Path) -> None:
    table.run("/system be brief")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    os.mkfifo(tmp_path / "fifo")
    for name, message in (
        ("missing.txt", "missing.txt: No such file or directory; check the path"),
        ("latin1.txt", "latin1.txt is not UTF-8 text: the byte at offset 3 is 0xe9"),
        ("fifo", "fifo is no regular file"),
    ):
        with pytest.raises(ChatError) as found:
            table.run(f"/system @{tmp_path}/{name}")
        assert message in found.value.message
        assert table.saved().system == table.chat.session.system == "be brief"


def test_cancelling_keeps_what_came(tmp_path: Path) -> None:
    table = Table(tmp_path, FakeBackend(lambda messages: ["half ", "an answer"], block=True))
    table.chat.ask("one")

    async def interrupt() -> None:
        heard = asyncio.Event()
        answering = asyncio.create_task(table.chat.answer(lambda text: heard.set() if "answer" in text else None))
        await heard.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering

    asyncio.run(interrupt())
    last = table.saved().conversation.last()
    assert last is not None
    assert (last.content, last.finish) == ("half an answer", "interrupted")


def test_a_dead_engine_leaves_a_whole_session(tmp_path: Path) -> None:
    table = Table(tmp_path, FakeBackend(lambda messages: ["half"], failure=EngineDeadError("the engine was killed")))
    table.chat.ask("one")
    with pytest.raises(EngineDeadError):
        table.answer()
    assert [(m.content, m.finish) for m in table.saved().conversation.path()] == [("one", ""), ("half", "failed")]


def test_an_answer_of_nothing_leaves_the_question_open(tmp_path: Path) -> None:
    table = Table(tmp_path, FakeBackend(lambda messages: [], failure=EngineDeadError("gone")))
    table.chat.ask("one")
    with pytest.raises(EngineDeadError):
        table.answer()
    table.backend.failure = None
    table.run("/retry")
    assert [m.role for m in table.saved().conversation.path()] == ["user", "assistant"]


def test_a_chat_goes_on_when_its_session_cannot_be_saved_and_says_so_once_a_turn(tmp_path: Path) -> None:
    blocked = tmp_path / "sessions"
    blocked.touch()
    table = Table(blocked)
    for turn in range(1, 3):
        table.ask("one")
        assert len(table.path()) == 2 * turn
        (notice,) = table.chat.take_notices()
        assert notice.startswith(f"the session is not saved: {blocked}")
        assert table.chat.take_notices() == []
        assert not table.chat.is_saved


def test_what_is_saved_after_all_is_not_complained_about(tmp_path: Path) -> None:
    blocked = tmp_path / "sessions"
    blocked.touch()
    table = Table(blocked)
    table.chat.ask("one")
    blocked.unlink()
    table.answer()
    assert table.chat.take_notices() == []
    assert table.chat.is_saved
    assert table.saved() == table.chat.session


def test_a_session_that_another_chat_has_taken_is_told_once(table: Table) -> None:
    table.ask("one")
    name = table.chat.session.name
    SessionStore.save(SessionStore(table.store._folder), Session(name="other"))
    (table.store._folder / "other.json").replace(table.store._folder / f"{name}.json")
    table.ask("two")
    assert table.chat.take_notices() == [
        f"another chat has written this session since; this one goes on as {table.chat.session.name}"
    ]


def test_retry_makes_a_branch(table: Table) -> None:
    table.ask("one")
    table.run("/retry")
    assert len(table.backend.asked) == 2
    assert table.backend.asked[0] == table.backend.asked[1]
    assert len(table.chat.conversation.ends()) == 2


def test_edit_offers_the_question_and_what_is_sent_becomes_a_branch(table: Table) -> None:
    table.ask("one")
    table.ask("two")
    outcome = table.run("/edit")
    assert (outcome.draft, outcome.lines) == ("two", ("taken back, to be written anew; /branch leads back",))
    table.ask("two, but better")
    assert table.path() == ["one", "answer to one", "two, but better", "answer to two, but better"]
    lines = table.run("/branch").lines
    assert lines[0].startswith("  1  two")
    assert lines[1].startswith("* 2  two, but better")
    table.run("/branch 1")
    assert table.path()[-2:] == ["two", "answer to two"]


def test_the_draft_of_a_message_with_a_slash_is_a_message_again(table: Table) -> None:
    table.ask("/etc/passwd is what?")
    draft = table.run("/edit").draft
    assert not is_command(draft)
    assert message_of(draft) == "/etc/passwd is what?"


def test_undo_and_clear(table: Table) -> None:
    table.ask("one")
    table.ask("two")
    assert table.run("/undo").lines == ("taken back: two",)
    assert table.path() == ["one", "answer to one"]
    table.run("/clear")
    assert table.path() == []
    assert table.saved().conversation.head == -1
    with pytest.raises(ChatError, match="no question"):
        table.run("/undo")


def test_set_shows_checks_and_resets(table: Table) -> None:
    assert table.run("/set temperature 0.2").lines == ("temperature 0.2",)
    table.run("/set stop END")
    table.run('/set  stop  ["a", "b"]')
    table.ask("x")
    assert table.backend.sampling == [{"temperature": 0.2, "stop": ["a", "b"]}]
    table.run("/set temperature default")
    assert table.saved().sampling == {"stop": ["a", "b"]}
    assert any(line.startswith("temperature 0.6") for line in table.run("/set").lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature 3", "temperature is 3; it must be a number from 0 to 2"),
        ("/set temperature warm", "temperature is 'warm'; it must be a number"),
        ("/set temperature", "/set temperature needs a value"),
        ("/set warmth 1", "there is no setting 'warmth'; choose one of temperature"),
        ("/set warmth", "there is no setting 'warmth'"),
        ("/set top_k 1.5", "top_k is 1.5; it must be an integer"),
        ("/branch 7", "there is no branch"),
        ("/branch x", "there is no branch"),
        ("/undo now", "/undo takes no argument"),
        ("/save", "/save needs one: /save FILE"),
        ("/load /no/such/file", "No such file"),
        ("/load ~nobody-here/file", "No such file"),
        ("/load a\0b", "null byte"),
        ("/save ~nobody-here/file", "No such file"),
        ("/save /nodir/x", "/nodir/x: No such file or directory; make its folder first, or choose another place"),
        (f"/save {'a' * 300}", "File name too long; choose a shorter name"),
        ("/save a\0b", "null byte"),
        ("/save a\ud800b", "surrogates not allowed"),
        ("/sessions other", "there is no session 'other'"),
        ("/drop", "no older turn"),
        ("/retry", "no question"),
        ("/raw", "no prompt yet"),
        ("/tool 42", "no tool has been called"),
        ("/hlep", "there is no command /hlep; did you mean /help?"),
        ("/", "there is no command /;"),
        ("/ help", "there is no command /;"),
    ],
)
def test_what_cannot_be_done_says_why(table: Table, line: str, message: str) -> None:
    with pytest.raises(ChatError) as found:
        table.run(line)
    assert message in found.value.message
    assert table.chat.session.sampling == {}


def test_contradictory_settings_are_refused_together(table: Table) -> None:
    table.run("/set max_tokens 10")
    with pytest.raises(ChatError, match="min_tokens is 20, above max_tokens 10"):
        table.run("/set min_tokens 20")
    assert table.chat.session.sampling == {"max_tokens": 10}


def test_save_and_load_are_a_round_trip(table: Table, tmp_path: Path) -> None:
    table.run("/system be brief")
    table.run("/set top_p 0.5")
    table.ask("one")
    path = tmp_path / "a file.json"
    table.run(f"/save {path}")
    before = table.chat.session
    table.run("/clear")
    table.ask("other")
    table.run(f"/load {path}")
    after = table.chat.session
    assert after.name not in (before.name, "")
    assert (after.conversation, after.system, after.sampling) != (before.conversation, "", {})
    assert table.path() == ["one", "answer to one"]
    assert (after.system, after.sampling) == ("be brief", {"top_p": 0.5})
    assert table.saved() == after


def test_save_spares_files_that_are_no_sessions(table: Table, tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(ChatError, match="exists and is no chat session"):
        table.run(f"/save {path}")
    assert path.read_text() == "years of work"


def test_sessions_are_listed_and_opened(table: Table) -> None:
    table.ask("one")
    first = table.chat.session.name
    table.chat.session = table.store.new()
    table.ask("two")
    lines = table.run("/sessions").lines
    assert len(lines) == 2
    assert lines[0].startswith("* ")
    assert "two" in lines[0]
    table.run(f"/sessions {first}")
    assert table.path() == ["one", "answer to one"]


def test_a_damaged_session_does_not_hide_the_others(table: Table, tmp_path: Path) -> None:
    table.ask("one")
    (tmp_path / "broken.json").write_text("{")
    lines = table.run("/sessions").lines
    assert len(lines) == 2
    assert any("broken  (not readable)" in line for line in lines)


def test_raw_and_show(table: Table) -> None:
    table.ask("one two three")
    text, ids = table.run("/raw").verbatim.split("\n\n")
    assert json.loads(text) == table.backend.asked[-1]
    assert ids == "3 ids: 0 1 2"
    shown = "\n".join(table.run("/show").lines)
    for part in ("fake-model", table.chat.session.name, "8 tokens of 100", "temperature 0.6"):
        assert part in shown


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_tool_results_are_given_by_hand_one_after_the_other(tmp_path: Path) -> None:
    calls = [Call(id="a", name="weather", arguments='{"city": "Paris"}'), Call(id="b", name="clock", arguments="{}")]
    table = Table(tmp_path, FakeBackend(lambda messages: [] if len(messages) == 1 else ["sunny"], calls=calls))
    table.ask("how is it?")
    table.backend.calls = []
    assert table.run("/tool").lines[0] == 'call of weather: {"city": "Paris"}'
    assert not table.run("/tool 21 degrees").answer
    assert table.run("/tool noon").answer
    sent = table.backend.asked[-1]
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in sent[2:]] == [("a", "21 degrees"), ("b", "noon")]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert table.path()[-1] == "sunny"
    assert table.run("/tool").lines == ("no tool call waits for a result",)


# ---- the line --------------------------------------------------------------------------------------------------------


def test_help_has_every_command(table: Table) -> None:
    text = "\n".join(table.run("/help").lines)
    assert all(usage(name) in text for name in COMMANDS)


def test_the_manual_has_every_command() -> None:
    manual = (Path(__file__).parents[2] / "docs/chat.md").read_text()
    rows = re.findall(r"^\| `(/.*?)` \| (.*) \|$", manual, flags=re.MULTILINE)
    assert rows == [(usage(name), command.help) for name, command in COMMANDS.items()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/s", ["/system", "/set", "/show", "/save", "/sessions"]),
        ("/set te", ["temperature"]),
        ("/set temperature d", ["default"]),
        ("/set stop x y", []),
        ("//s", []),
        ("hello /s", []),
        ("", []),
    ],
)
def test_completion(table: Table, line: str, words: list[str]) -> None:
    assert [word for word, _ in complete(table.chat, line)] == words


def test_sessions_are_completed(table: Table) -> None:
    table.ask("x")
    assert [word for word, _ in complete(table.chat, "/sessions ")] == [table.chat.session.name]


def test_commands_begin_with_one_slash_and_may_go_over_lines(table: Table) -> None:
    assert is_command("/help")
    assert not is_command("//help")
    assert not is_command(" /help")
    assert message_of("//help") == "/help"
    table.run("/system\nfirst line\n  second line")
    assert table.chat.session.system == "first line\n  second line"


def test_settings_are_sampling_parameters() -> None:
    fields = set(SamplingParams.__dataclass_fields__)
    assert set(SETTINGS) <= fields
    assert sampling_params({}) == SamplingParams(**DEFAULTS)
    assert sampling_params({"temperature": 0, "stop": ["x"]}) == SamplingParams(temperature=0, top_p=0.9, stop=("x",))
