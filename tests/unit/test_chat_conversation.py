"""The tree of messages: which path is current after any commands, and that nothing is ever lost."""

from __future__ import annotations

import random

import pytest

from corellm.chat.conversation import ROOT, Conversation, Message
from corellm.errors import ChatError


def talk(*contents: str) -> Conversation:
    """Questions and answers in turn."""
    conversation = Conversation()
    for index, content in enumerate(contents):
        if index % 2 == 0:
            conversation.ask(content)
        else:
            conversation.add(Message(role="assistant", content=content, finish="stop"))
    return conversation


def path(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.path()]


def test_undo_takes_back_question_and_answer() -> None:
    conversation = talk("a", "A", "b", "B")
    assert conversation.undo() == "b"
    assert path(conversation) == ["a", "A"]
    assert conversation.undo() == "a"
    assert path(conversation) == []
    with pytest.raises(ChatError, match="no question"):
        conversation.undo()


def test_reopen_leaves_the_question_to_be_answered_again() -> None:
    conversation = talk("a", "A", "b", "B")
    conversation.reopen()
    conversation.add(Message(role="assistant", content="B2"))
    assert path(conversation) == ["a", "A", "b", "B2"]
    assert [conversation.messages[end].content for end in conversation.ends()] == ["B", "B2"]
    with pytest.raises(ChatError):
        Conversation().reopen()


def test_a_question_without_an_answer_gives_way_to_the_next() -> None:
    conversation = talk("a", "A", "b")
    conversation.ask("c")
    assert path(conversation) == ["a", "A", "c"]


def test_turns_have_their_tool_results() -> None:
    conversation = talk("a", "A")
    conversation.add(Message(role="tool", content="42"))
    conversation.add(Message(role="assistant", content="it is 42"))
    conversation.ask("b")
    assert [[m.content for m in turn] for turn in conversation.turns()] == [["a", "A", "42", "it is 42"], ["b"]]


def test_dropping_the_oldest_turns_keeps_the_rest_and_the_branch_that_had_them() -> None:
    conversation = talk("a", "A", "b", "B", "c", "C", "d")
    conversation.drop_oldest(2)
    assert path(conversation) == ["c", "C", "d"]
    conversation.head = conversation.ends()[0]
    assert path(conversation) == ["a", "A", "b", "B", "c", "C", "d"]


def test_any_commands_keep_a_tree_in_which_everything_said_is_on_a_branch() -> None:
    source = random.Random(5)
    for _ in range(50):
        conversation, expected = Conversation(), []
        for step in range(30):
            current = path(conversation)
            match source.randrange(5):
                case 0 | 1:
                    if len(current) % 2 == 1:
                        current.pop()
                    conversation.ask(f"q{step}")
                    conversation.add(Message(role="assistant", content=f"a{step}"))
                    current += [f"q{step}", f"a{step}"]
                case 2 if current:
                    assert conversation.undo() == current[-2]
                    current = current[:-2]
                case 3 if current:
                    conversation.reopen()
                    conversation.add(Message(role="assistant", content=f"again{step}"))
                    current = [*current[:-1], f"again{step}"]
                case 4:
                    conversation.head = ROOT
                    current = []
            expected.append(current)
            assert path(conversation) == current
            conversation.check()
        branches = []
        for end in conversation.ends():
            conversation.head = end
            branches.append(path(conversation))
        for earlier in expected:
            assert any(branch[: len(earlier)] == earlier for branch in branches)


@pytest.mark.parametrize(
    ("conversation", "named"),
    [
        (Conversation([Message(role="user", content="", parent=0)], 0), r"messages\[0\].parent is 0"),
        (Conversation([Message(role="user", content="", parent=-2)], 0), r"messages\[0\].parent is -2"),
        (Conversation([Message(role="king", content="")], 0), "role is 'king'"),
        (Conversation([], 0), "head is 0"),
        (Conversation([Message(role="user", content="")], -2), "head is -2"),
    ],
)
def test_what_is_no_tree_is_refused(conversation: Conversation, named: str) -> None:
    with pytest.raises(ChatError, match=named):
        conversation.check()
