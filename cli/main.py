"""Entry point of `corellm`. Importing it costs Typer and nothing heavier: each command imports what it needs."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

try:
    import typer

    from corellm.errors import CoreLLMError, OptionError

    from . import batch, chat, serve, top
    from .exit_codes import ExitCode
except KeyboardInterrupt:  # imports take some tenths of a second, and `run` is not there yet to say so
    sys.exit(130)

app = typer.Typer(
    name="corellm",
    help="Run Llama 3.1 yourself.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("batch", help=batch.HELP)(batch.batch)
app.command("chat", help=chat.HELP)(chat.chat)
app.command("serve", help=serve.HELP)(serve.serve)
app.command("top", help=top.HELP)(top.top)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"corellm {version('corellm')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def corellm(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options that come before a command; without a command, the help."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit(ExitCode.USAGE)


def main() -> None:
    """Run the command line and leave with its exit code: the one place where errors become codes."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Errors are told on stderr, in one line."""
    try:
        return app(arguments, prog_name="corellm", standalone_mode=False) or ExitCode.OK
    except typer.TyperException as error:
        _print_error(f"{error.format_message().rstrip('.')} (see {_help_for(arguments)})")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        return _end_with(error)
    except CoreLLMError as error:
        _log_origin(error)
        _print_error(error.message)
        return ExitCode.USAGE if isinstance(error, OptionError) else ExitCode.FAILURE


def _end_with(error: OSError) -> int:
    """What no command has words for: a write to stdout that fails, or a file that nobody thought could be missing."""
    if error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO) and error.filename is None:
        if sys.stdout is not None:  # Python would complain once more when it flushes it at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # a reader that left wants to hear nothing
            _print_error(f"the output cannot be written: {error.strerror}; free space, or write elsewhere")
        return ExitCode.FAILURE
    _log_origin(error)
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error) or type(error).__name__
    _print_error(f"{names}: {reason}" if names else reason)
    return ExitCode.FAILURE


def _log_origin(error: Exception) -> None:
    """The traceback of an error, for --log-level debug."""
    import logging

    logging.getLogger("corellm").debug("the error below came from here", exc_info=error)


def _help_for(arguments: list[str]) -> str:
    commands = {command.name for command in app.registered_commands}
    return " ".join(["corellm", *(name for name in arguments[:1] if name in commands), "--help"])


def _print_error(message: str) -> None:
    if sys.stderr is None:
        return
    from corellm_tui.foreign import one_line

    red, reset = ("\x1b[1;31m", "\x1b[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{reset} {one_line(message)}", file=sys.stderr)
