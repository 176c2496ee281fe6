"""A chat on this process's terminal: which file gets what."""

from __future__ import annotations

import sys
from pathlib import Path

from prompt_toolkit.output.defaults import create_output
from rich.console import Console

from corellm.chat.chat import Chat
from corellm.chat.commands import complete

from .chat_answer import AnswerView, MarkdownAnswer, PlainAnswer
from .chat_markdown import THEME
from .chat_prompt import ChatPrompt
from .chat_repl import ChatRepl


def chat_screen(chat: Chat, history: Path, *, plain: bool) -> ChatRepl:
    """Answers go to stdout; where that is no terminal they go there raw, and all else to stderr."""
    stdout_is_terminal = sys.stdout.isatty()
    screen = sys.stdout if stdout_is_terminal else sys.stderr
    console = Console(file=screen, highlight=False, theme=THEME)
    markdown = stdout_is_terminal and not plain and not console.is_dumb_terminal

    def new_view() -> AnswerView:
        return MarkdownAnswer(console) if markdown else PlainAnswer(sys.stdout, terminal=stdout_is_terminal)

    prompt = ChatPrompt(history, lambda line: complete(chat, line), create_output(stdout=screen))
    return ChatRepl(chat, prompt, console, new_view)
