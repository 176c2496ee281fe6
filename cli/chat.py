"""`corellm chat`: its options. What they set in motion is in `chat_run`, imported when the command runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated
from urllib.parse import urlsplit

import typer

from corellm.config import EngineOptions, flag_name
from corellm.errors import OptionError

from .options import AttachTo, ChatSampling, NewEngine, check_attach, expand, is_set

HELP = "Chat with a model, here or on a server; with a pipe or --prompt, answer once."
_SERVER = "Instead of an engine, a server"
_WITH_URL = frozenset({"model", "seed", "log_level"})  # what an engine option means to a chat over HTTP as well


@expand(sampling=ChatSampling, engine=EngineOptions)
def chat(
    context: typer.Context,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="Answer this and leave; a piped text goes before it."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT|@FILE", help="System message, or the file that has it.")
    ] = None,
    session: Annotated[
        str | None, typer.Option(metavar="NAME", help="Go on with the session of this name, or begin it.")
    ] = None,
    continue_last: Annotated[bool, typer.Option("--continue", help="Go on with the last session.")] = False,
    tools: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Functions that the model may call, as in OpenAI's API; none is executed."),
    ] = None,
    date: Annotated[
        str | None,
        typer.Option(metavar="TEXT|none", help="Today's date in the prompt, such as '26 Jul 2024'; default: today."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Show answers as written, not as Markdown.")] = False,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Base URL of an OpenAI server: http://HOST:PORT/v1.", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Its key. Better set CORELLM_API_KEY: a command line can be read by others.",
            envvar="CORELLM_API_KEY",
            show_envvar=False,
            metavar="KEY",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    attach_to: AttachTo = None,
    new_engine: NewEngine = False,
    *,
    sampling: ChatSampling,
    engine: EngineOptions,
) -> None:
    """Check the options, chat, leave with its exit code."""
    if session is not None and continue_last:
        raise OptionError("--session and --continue contradict each other; give one of them")
    check_attach(attach_to, new_engine)
    if url is not None:
        _check_url(url)
        _check_no_engine(context)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise OptionError("--api-key has characters that no key has; look for a line end or a quote in it")
    settings = sampling.given()
    if is_set(context, "seed"):
        settings["seed"] = engine.seed
    from .chat_input import text_option, text_or_file_option
    from .chat_run import ChatCommand, run_chat

    if "stop" in settings:
        settings["stop"] = [text_option("--stop", text) for text in settings["stop"]]

    code = run_chat(
        ChatCommand(
            prompt=None if prompt is None else text_option("--prompt", prompt),
            system=None if system is None else text_or_file_option("--system", system),
            session=session,
            continue_last=continue_last,
            tools=tools,
            date=None if date is None else text_option("--date", date),
            plain=plain,
            url=None if url is None else url.rstrip("/").removesuffix("/chat/completions"),
            api_key=api_key,
            attach_to=attach_to,
            new_engine=new_engine,
            sampling=settings,
            engine=engine,
        )
    )
    raise typer.Exit(code)


def _check_url(url: str) -> None:
    """An address that can be used and shown: nothing secret in it."""
    try:
        parts = urlsplit(url)
        port_is_right = parts.port != 0
    except ValueError:
        raise OptionError("--url is not a URL; it is usually http://HOST:PORT/v1") from None
    if parts.username is not None or parts.password is not None:
        raise OptionError("--url has a name or password in it; give the key by CORELLM_API_KEY")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_right or parts.query:
        raise OptionError(f"--url is {url!r}; it must be http:// or https://, a host and a path, usually /v1")


def _check_no_engine(context: typer.Context) -> None:
    """Refuse options of an engine. The environment may have some: they are for other commands."""
    options = {spec.name: flag_name(spec.name) for spec in fields(EngineOptions) if spec.name not in _WITH_URL}
    options |= {"attach_to": "--engine", "new_engine": "--new-engine"}
    given = [flag for name, flag in options.items() if _is_on_command_line(context, name)]
    if given:
        raise OptionError(f"--url takes answers from a server, so {', '.join(given)} can mean nothing; leave it out")


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
