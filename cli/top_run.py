"""Which form of `corellm top` is run: the dashboard, one picture, JSON lines or a recording alone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from corellm.comms.stats_messages import SNAPSHOTS, Snapshot
from corellm.errors import EngineDeadError, OptionError
from corellm.running_engines import RunningEngine, by_name, running_engines
from corellm_tui.foreign import one_line
from corellm_tui.top_once import json_line, picture, published, record, stream_json, text_lines
from corellm_tui.top_recording import Recorder, Recording, read_recording
from corellm_tui.top_replay import Player
from corellm_tui.top_state import TopState

from .exit_codes import ExitCode
from .standard_streams import prepare_streams

if TYPE_CHECKING:
    from corellm_tui.top_app import TopApp

PLAIN_COLUMNS = 100  # of a picture that goes to no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class TopCommand:
    """The options of `corellm top`, checked."""

    engine: str | None
    once: bool
    json: bool
    record: Path | None
    replay: Path | None


def run_top(command: TopCommand) -> ExitCode:
    """Watch, or play. Raises `CoreLLMError` for what keeps it from doing so."""
    prepare_streams()  # not every encoding has block characters
    # Textual draws to stderr and reads stdin; a redirected stdout wants text.
    is_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    has_screen = is_terminal and not command.once and not command.json
    if command.replay is not None:
        with contextlib.closing(read_recording(command.replay)) as recording:
            if has_screen:
                return _play(recording)
            _print_recording(recording, command)
    elif has_screen:
        return _watch(command)
    elif command.record is not None:
        _record(_the_engine(command.engine), command.record)
    elif command.json and not command.once:
        asyncio.run(stream_json(_the_engine(command.engine), _write))
    else:
        asyncio.run(_print_once(_the_engine(command.engine), as_json=command.json))
    return ExitCode.OK


def _the_engine(name: str | None) -> RunningEngine:
    """The engine called `name`, or the only one. Raises `OptionError` or `EngineDeadError` without such a one."""
    engines = running_engines()
    if name is not None:
        return by_name(name, engines)
    if not engines:
        raise EngineDeadError("no engine runs; start one with `corellm serve` or `corellm batch`")
    if len(engines) > 1:
        names = ", ".join(engine.info.name for engine in engines)
        raise OptionError(f"--engine is not given and several engines run; choose one of {names}")
    return engines[0]


def _watch(command: TopCommand) -> ExitCode:
    """The dashboard of a running engine; it asks which one where there are several, and waits where there is none."""
    from corellm_tui.top_app import TopApp
    from corellm_tui.top_sources import LiveSource
    from corellm_tui.top_tokens import TokenTexts

    engines = running_engines()
    if command.record is not None or command.engine is not None:
        engines = [_the_engine(command.engine)]
    several = engines if len(engines) > 1 else ()
    with contextlib.ExitStack() as closing:
        recorder = None
        if command.record is not None:
            recorder = closing.enter_context(contextlib.closing(Recorder(command.record, engines[0].info)))
        source = LiveSource(engines[0] if len(engines) == 1 else None, recorder)
        app = TopApp(source, token_text=TokenTexts(lambda: app.source.state.info), engines=several)
        return _run(app)


def _play(recording: Recording) -> ExitCode:
    from corellm_tui.top_app import TopApp
    from corellm_tui.top_sources import ReplaySource

    app = TopApp(ReplaySource(Player(recording, TopState())), token_text=lambda token: "")
    return _run(app)


def _run(app: TopApp) -> ExitCode:
    """What is loaded by now stays until the end: searching it for garbage would make keys wait for 50 ms and more."""
    gc.freeze()
    app.run()
    return ExitCode(app.return_code or 0)


def _print_recording(recording: Recording, command: TopCommand) -> None:
    """Its last picture, or all its snapshots as JSON."""
    if command.json and not command.once:
        for event in recording.between(-1.0, recording.duration_s):
            if isinstance(event, Snapshot):
                _write(json_line(event))
        return
    player = Player(recording, TopState())
    player.seek(recording.duration_s)
    _print(player.state, as_json=command.json)


async def _print_once(engine: RunningEngine, *, as_json: bool) -> None:
    if not as_json:
        _print(await picture(engine), as_json=False)
        return
    async for message in published(engine, SNAPSHOTS):
        _write(json_line(message))
        return


def _record(engine: RunningEngine, path: Path) -> None:
    """Until the engine ends or Ctrl-C, which is how a recording is meant to end."""
    recorder = Recorder(path, engine.info)
    print(one_line(f"recording engine {engine.info.name} to {path}; Ctrl-C ends it"), file=sys.stderr)
    try:
        asyncio.run(record(engine, recorder))
    except (KeyboardInterrupt, EngineDeadError) as end:
        print(one_line(f"the recording ends: {str(end) or 'interrupted'}"), file=sys.stderr)
    finally:
        recorder.close()


def _print(state: TopState, *, as_json: bool) -> None:
    if as_json and state.snapshot is not None:
        _write(json_line(state.snapshot))
        return
    columns = shutil.get_terminal_size((PLAIN_COLUMNS, 24)).columns
    for line in text_lines(state, columns):
        print(line)


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
