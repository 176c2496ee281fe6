"""The commands of a chat: one table, from which parsing, help and completion are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from corellm.chat import actions
from corellm.chat.actions import Outcome
from corellm.chat.chat import Chat
from corellm.chat.settings import RESET, SETTINGS
from corellm.errors import ChatError


@dataclass(frozen=True, slots=True)
class Command:
    """`argument` is how the help writes it: `[X]` may be left out, none means that the command takes none."""

    run: Callable[[Chat, str], Outcome]
    help: str
    argument: str = ""


def _help(chat: Chat, argument: str) -> Outcome:
    width = max(len(usage(name)) for name in COMMANDS)
    listed = [f"{usage(name):<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return Outcome(
        lines=(
            *listed,
            "",
            "Enter sends, Alt-Enter or Ctrl-J begins a new line, Ctrl-G opens $EDITOR, Ctrl-R searches what you wrote.",
            "Ctrl-C stops an answer and keeps what came of it; at the prompt it clears the line. Ctrl-D leaves.",
            "A message that begins with a slash is written with two.",
        )
    )


COMMANDS: Mapping[str, Command] = {
    "help": Command(_help, "show this list"),
    "system": Command(
        actions.set_system, "show the system message, or set it; @FILE reads it, - takes it away", "[TEXT]"
    ),
    "clear": Command(actions.clear, "begin a new conversation; this one stays as a branch"),
    "undo": Command(actions.undo, "go back before the last question"),
    "retry": Command(actions.retry, "have the last question answered again"),
    "edit": Command(actions.edit, "write the last question anew"),
    "branch": Command(actions.branch, "list the branches that /edit, /retry and /clear left, or go to one", "[N]"),
    "drop": Command(actions.drop, "let go of the oldest turns, as few as make room"),
    "set": Command(actions.set_sampling, f"show the sampling settings, or set one; {RESET} resets it", "[NAME VALUE]"),
    "show": Command(actions.show, "show model, session, settings and how full the context is"),
    "raw": Command(actions.raw, "show the exact prompt and its token ids"),
    "tool": Command(actions.tool, "show the tool call that waits, or give its result by hand", "[RESULT]"),
    "save": Command(actions.save, "write the session to a file", "FILE"),
    "load": Command(actions.load, "go on from a file that /save wrote, as a new session", "FILE"),
    "sessions": Command(actions.sessions, "list the saved sessions, or open one", "[NAME]"),
    "exit": Command(actions.leave, "leave; the session is saved"),
}


def usage(name: str) -> str:
    return f"/{name} {COMMANDS[name].argument}".rstrip()


def is_command(line: str) -> bool:
    """A line is a command if it begins with one slash; `//` writes a message that begins with a slash."""
    return line.startswith("/") and not line.startswith("//")


def message_of(line: str) -> str:
    """The message that a line which is no command means."""
    return line[1:] if line.startswith("//") else line


def run_command(chat: Chat, line: str) -> Outcome:
    """Do what a command line says. Raises `ChatError` when it can not be done, and says how it can."""
    name, *rest = re.split(r"\s+", line[1:].rstrip(), maxsplit=1)
    argument = "".join(rest)
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise ChatError(f"there is no command /{name}; {hint}/help lists them, // begins a message with a slash")
    if argument and not command.argument:
        raise ChatError(f"/{name} takes no argument; write it alone")
    if not argument and command.argument and not command.argument.startswith("["):
        raise ChatError(f"/{name} needs one: {usage(name)}")
    return command.run(chat, argument)


def complete(chat: Chat, line: str) -> Iterable[tuple[str, str]]:
    """What could follow at the end of `line`: (the last word completed, its description)."""
    if not is_command(line):
        return
    words = line[1:].split(" ")
    if len(words) == 1:
        yield from ((f"/{name}", command.help) for name, command in COMMANDS.items() if name.startswith(words[0]))
    elif words[0] == "set" and len(words) == 2:
        yield from ((name, text) for name, text in SETTINGS.items() if name.startswith(words[1]))
    elif words[0] == "set" and len(words) == 3 and RESET.startswith(words[2]):
        yield RESET, "the value it has if nothing is set"
    elif words[0] == "sessions" and len(words) == 2 and chat.store is not None:
        yield from ((name, "") for name in chat.store.names() if name.startswith(words[1]))
