"""One run of `corellm chat`: who answers, which session, and what shows it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from corellm.chat.backend import Backend
from corellm.chat.chat import Chat
from corellm.chat.session import Session
from corellm.chat.store import SessionStore, make_private, state_folder
from corellm.config import EngineOptions
from corellm.errors import ChatError, EngineDeadError, OptionError
from corellm.logs import configure_logging
from corellm_tui.foreign import one_line
from corellm_tui.keyboard import silent_keyboard

from .chat_input import read_pipe, tools_option
from .exit_codes import ExitCode
from .standard_streams import prepare_streams

if TYPE_CHECKING:
    from corellm.running_engines import Choice  # a chat over HTTP does without the engine's side

_NO_DATE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCommand:
    """The options of `corellm chat`, checked. `sampling` has the settings that were given."""

    prompt: str | None
    system: str | None
    session: str | None
    continue_last: bool
    tools: str | None
    date: str | None
    plain: bool
    url: str | None
    api_key: str | None
    attach_to: str | None
    new_engine: bool
    sampling: Mapping[str, Any]
    engine: EngineOptions


def run_chat(command: ChatCommand) -> ExitCode:
    """Chat, or answer once. Raises `CoreLLMError` for what ends it."""
    prepare_streams()  # halves of surrogate pairs come from servers
    configure_logging(command.engine.log_level)
    console = Console(stderr=True, highlight=False)
    store = SessionStore(state_folder() / "sessions")
    session, is_new = _session(command, store)
    question = _question(command, lambda line: _tell(console, line))
    run = _Run(command, session, store if question is None or not is_new else None, console)
    try:
        with silent_keyboard() if question is None else contextlib.nullcontext():
            choice = run.choose_engine() if command.url is None else None
            return asyncio.run(run.talk(choice) if question is None else run.once(choice, question))
    except asyncio.CancelledError:  # SIGTERM or SIGHUP
        return ExitCode.INTERRUPTED
    except EngineDeadError:
        if run.has_kept_it:
            _tell(console, f"the conversation is kept: corellm chat --session {session.name}")
        raise


def _session(command: ChatCommand, store: SessionStore) -> tuple[Session, bool]:
    """The session to begin or go on with, under the options given, and whether it is one without a name."""
    is_new = False
    if command.session is not None:
        session = store.open(command.session)
    elif command.continue_last:
        session = store.latest()
    else:
        session, is_new = store.new(), True
    if command.system is not None:
        session.system = command.system
    if command.tools is not None:
        session.tools = tools_option("--tools", command.tools)
    session.sampling = {**session.sampling, **command.sampling}
    return session, is_new


def _question(command: ChatCommand, tell: Callable[[str], object]) -> str | None:
    """What to answer once: a piped text, then --prompt. None: there is a terminal to chat at."""
    piped = read_pipe(tell)
    parts = [part.strip("\n") for part in (piped, command.prompt) if part and part.strip()]
    if parts:
        return "\n\n".join(parts)
    if piped is None and command.prompt is None:
        return None
    raise OptionError("there is nothing to answer: stdin and --prompt are empty")


def _tell(console: Console, line: str) -> None:
    console.print(Text(one_line(line)), soft_wrap=True)


class _Run:
    """One run. `store` None: the session is not kept."""

    def __init__(self, command: ChatCommand, session: Session, store: SessionStore | None, console: Console) -> None:
        self._command, self._session, self._store, self._console = command, session, store, console
        self._chat: Chat | None = None  # once there is somebody to chat with

    @property
    def has_kept_it(self) -> bool:
        """Whether there is a conversation, and a session that has it."""
        chat = self._chat
        return chat is not None and chat.store is not None and chat.is_saved and bool(chat.conversation.messages)

    def choose_engine(self) -> Choice:
        """Find the model, and the engine to join. It may take long, and Ctrl-C simply ends the process."""
        from corellm.running_engines import choose
        from corellm_tui.startup import StartupDisplay

        command = self._command
        with StartupDisplay(self._console) as startup:
            choice = choose(command.engine, startup.report, name=command.attach_to, new=command.new_engine)
        if choice.running is not None:
            self._tell(f"using the running engine {choice.running.info.name}")
        elif command.engine.model is None:
            self._tell("no --model given and no GPU here: using the demo model, SmolLM2-135M-Instruct")
        return choice

    async def once(self, choice: Choice | None, question: str) -> ExitCode:
        """Answer one question on stdout. Without a choice, a server does. It fails if it is to be kept and is not."""
        from corellm_tui.chat_answer import PlainAnswer

        with _ending_on_signals():
            async with self._backend(choice) as backend:
                chat = self._new_chat(backend)
                chat.ask(question)
                view = PlainAnswer(sys.stdout, terminal=sys.stdout.isatty())
                try:
                    await chat.answer(view.push)
                finally:
                    view.finish()
                    for notice in chat.take_notices():
                        self._tell(notice)
        return ExitCode.OK if chat.is_saved else ExitCode.FAILURE

    async def talk(self, choice: Choice | None) -> ExitCode:
        """Chat until the user leaves."""
        folder = state_folder()
        try:
            make_private(folder)
        except ChatError as error:
            self._tell(f"nothing will be saved: {error.message}")
        # The line editor takes a while to import: it does so when the engine is first waited for.
        asyncio.get_running_loop().call_soon(_import_screen)
        with _ending_on_signals():
            async with self._backend(choice) as backend:
                from corellm_tui.chat_screen import chat_screen

                await chat_screen(self._new_chat(backend), folder / "history", plain=self._command.plain).run()
        return ExitCode.OK

    def _new_chat(self, backend: Backend) -> Chat:
        self._chat = Chat(backend, self._session, self._store)
        return self._chat

    def _tell(self, line: str) -> None:
        _tell(self._console, line)

    @contextlib.asynccontextmanager
    async def _backend(self, choice: Choice | None) -> AsyncIterator[Backend]:
        backend = await (self._server() if choice is None else self._engine(choice))
        try:
            yield backend
        finally:
            await backend.close()

    async def _server(self) -> Backend:
        from corellm.chat.http_backend import HttpBackend

        command = self._command
        return await HttpBackend.connect(str(command.url), command.api_key, command.engine.model)

    async def _engine(self, choice: Choice) -> Backend:
        from corellm.chat.engine_backend import EngineBackend
        from corellm.text_engine import TextEngine
        from corellm_tui.startup import StartupDisplay

        with StartupDisplay(self._console) as startup:
            if choice.running is not None:
                engine = await TextEngine.attach(choice.running.folder, choice.model, startup.report)
            else:
                engine = await TextEngine.start(choice.model, startup.report)
        startup.ready(engine.info)
        return EngineBackend(engine, _date(self._command.date))


def _import_screen() -> None:
    import corellm_tui.chat_screen  # noqa: F401


def _date(given: str | None) -> str | None:
    """The date that prompts give as today's, in the form of Meta's template."""
    if given is None:
        return datetime.now().strftime("%d %b %Y")
    return None if given == _NO_DATE else given


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP cancel the task, so that the terminal is left as it was and the engine ends.

    They do so once: a terminal that closes sends one and its shell another, which must not cut the ending short.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    signals = (signal.SIGTERM, signal.SIGHUP)
    is_ending = False

    def end() -> None:
        nonlocal is_ending
        if task is not None and not is_ending:
            is_ending = True
            task.cancel()

    for number in signals:
        loop.add_signal_handler(number, end)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
