"""`corellm serve`: its options. What they set in motion is in `serve_run`, imported when the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from corellm.config import EngineOptions

from .options import expand

HELP = "Serve OpenAI's API over one engine, which other commands may join."
_SERVER = "Server"


@expand(engine=EngineOptions)
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine only with a key.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 is any free one.", rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients may use; may be given several times. Also read from CORELLM_API_KEY.",
            envvar="CORELLM_API_KEY",
            show_envvar=False,
            metavar="KEY",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            help="File with one key on each line; lines that begin with # are comments.",
            metavar="FILE",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without a key.", rich_help_panel=_SERVER)
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in the API, several times for several; default: that of --model.",
            metavar="NAME",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Site whose pages may use the API, such as https://example.org, or *.",
            metavar="ORIGIN",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="Certificate chain, PEM.", metavar="FILE", rich_help_panel=_SERVER)
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(help="Its private key, PEM.", metavar="FILE", rich_help_panel=_SERVER)
    ] = None,
    max_concurrent: Annotated[
        int, typer.Option(help="Answers worked on or queued at once; more are a 429.", rich_help_panel=_SERVER)
    ] = 2048,
    max_body: Annotated[int, typer.Option(help="Longest request body, in bytes.", rich_help_panel=_SERVER)] = 8 << 20,
    shutdown_grace: Annotated[
        float, typer.Option(help="Seconds that open requests get after SIGTERM.", rich_help_panel=_SERVER)
    ] = 30.0,
    api_workers: Annotated[
        int, typer.Option(help="HTTP processes on the one port and engine.", rich_help_panel=_SERVER)
    ] = 1,
    log_format: Annotated[
        str, typer.Option(metavar="text|json", help="Form of log lines, on stderr.", rich_help_panel=_SERVER)
    ] = "text",
    *,
    engine: EngineOptions,
) -> None:
    """Check the options, serve until told to stop, leave with its exit code."""
    from corellm.openai_server.options import ServerOptions, read_keys

    options = ServerOptions(
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *(read_keys(api_key_file) if api_key_file is not None else ())),
        insecure=insecure,
        served_model_names=tuple(served_model_name or ()),
        cors_origins=tuple(cors_origin or ()),
        tls_cert=tls_cert,
        tls_key=tls_key,
        max_concurrent=max_concurrent,
        max_body=max_body,
        shutdown_grace=shutdown_grace,
        api_workers=api_workers,
        log_format=log_format,
    )
    from .serve_run import run_serve

    raise typer.Exit(run_serve(options, engine))
