"""`corellm top`: its options. What they set in motion is in `top_run`, imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corellm.errors import OptionError

from .options import expand

HELP = "Watch a running engine: its KV cache, steps, requests and rates."


@expand()
def top(
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="Watch the running engine of this name.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and leave; the default without a terminal.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print snapshots as JSON lines; with --once a single one.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="Save the stream, for --replay.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", metavar="FILE", help="Play a recording; it needs no engine.")
    ] = None,
) -> None:
    """Check the options, watch, leave with the exit code."""
    if replay is not None and (engine is not None or record is not None):
        flag = "--engine" if engine is not None else "--record"
        raise OptionError(f"--replay plays a file and {flag} needs a running engine; give one of them")
    if record is not None and (once or json):
        flag = "--once" if once else "--json"
        raise OptionError(f"--record saves the stream and {flag} prints it; give one of them")
    from .top_run import TopCommand, run_top

    raise typer.Exit(run_top(TopCommand(engine=engine, once=once, json=json, record=record, replay=replay)))
