"""The prompt of a chat: line editing, history, completion of commands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

from corellm.errors import ChatError
from corellm.text.terminal import terminal_safe

from .chat_editor import edit_text

Complete = Callable[[str], Iterable[tuple[str, str]]]  # text before the cursor → (last word completed, description)

_MARK, _MORE = "> ", "  "
_MENU_ROWS = 6


class ChatPrompt:
    """Reads what a user has to say. `output` None: the terminal at stdout."""

    def __init__(self, history: Path, complete: Complete, output: Output | None = None) -> None:
        self._interruption: Exception | None = None
        self._leaving = False  # the last key was Ctrl-C: another one leaves
        self._session: PromptSession[str] = PromptSession(
            _MARK,
            multiline=True,
            prompt_continuation=_MORE,
            history=_history(history),
            completer=_Commands(complete),
            key_bindings=self._bindings(),
            enable_suspend=True,  # by Ctrl-Z
            enable_open_in_editor=False,  # it is bound to other keys than Ctrl-G
            reserve_space_for_menu=_MENU_ROWS,
            output=output,
        )
        self._session.default_buffer.on_text_changed += self._stay

    async def read(self, draft: str = "") -> str:
        """One message or command line. Raises `EOFError` when the user leaves, and what `interrupt` was given."""
        self._leaving = False
        if self._interruption is not None:
            raise self._interruption
        return await self._session.prompt_async(default=draft)

    def interrupt(self, error: Exception) -> None:
        """Make `read` raise `error`, now or when it is called. What was being written is kept in the history."""
        self._interruption = error
        self._session.default_buffer.append_to_history()
        if self._session.app.is_running and self._session.app.future is not None:
            self._session.app.exit(exception=error)

    def _stay(self, buffer: Buffer) -> None:
        if buffer.text:
            self._leaving = False

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()
        writing = has_focus(DEFAULT_BUFFER)  # and not searching in the history

        @keys.add("enter", filter=writing)
        def _send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=writing)
        @keys.add("c-j", filter=writing)
        def _new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-g", filter=writing)
        async def _editor(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            try:
                text = await run_in_terminal(lambda: edit_text(buffer.text), in_executor=True)
            except ChatError as error:  # what was written stays
                line = terminal_safe(error.message)
                run_in_terminal(lambda: event.app.output.write(f"error: {line}\n"))
                return
            buffer.document = Document(text)

        @keys.add("c-c", filter=writing)
        @keys.add("<sigint>")
        def _clear_or_leave(event: KeyPressEvent) -> None:
            if self._leaving:
                event.app.exit(exception=EOFError)
                return
            had_text = bool(event.current_buffer.text)
            event.current_buffer.reset()
            self._leaving = True
            if not had_text:
                run_in_terminal(lambda: event.app.output.write("Ctrl-C again or Ctrl-D leaves\n"))

        return keys


def _history(path: Path) -> History:
    """Kept in a file that only its user reads, or in memory where there can be none."""
    try:
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return _FileHistory(str(path))


class _FileHistory(FileHistory):
    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):  # a full disk does not end a chat
            super().store_string(string.encode("utf-8", "replace").decode())


class _Commands(Completer):
    def __init__(self, complete: Complete) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor
        start = -len(line.rpartition(" ")[2])
        for word, description in self._complete(line):
            yield Completion(word, start_position=start, display_meta=terminal_safe(description))
