"""The listening server of one process: routes and middleware over a socket that is bound already."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

from corellm.comms.messages import Stats
from corellm.errors import OptionError, ServerError
from corellm.openai_server.connection import HttpProtocol, WriteGuards
from corellm.openai_server.gate import Keys, Origins, gate
from corellm.openai_server.intake import Intake
from corellm.openai_server.metrics import Metrics
from corellm.openai_server.observe import Observer
from corellm.openai_server.options import ServerOptions
from corellm.openai_server.routes import Routes
from corellm.openai_server.state import ServerState

BACKLOG = 2048
LINGER_S = 2.0  # for the rest of a body that nobody wants
CLOSE_S = 2.0
TLS_HANDSHAKE_S = 10.0

log = logging.getLogger("corellm.server")


def bind(options: ServerOptions, *, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet. `shared`: other processes of this server bind the same port too.

    Raises `ServerError` when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((options.host, options.port))
    except OSError as error:
        bound.close()
        raise ServerError(
            f"cannot listen on {options.host} port {options.port}: {error.strerror}; choose another --host or --port"
        ) from None
    return bound


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """None without TLS. Raises `OptionError` for files that are none."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A key that asks for a password would ask the terminal.
        context.load_cert_chain(options.tls_cert, options.tls_key, password=lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise OptionError(
            f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key} cannot be used: {error}; "
            "give a certificate and its key, in PEM and without a password"
        ) from None
    return context


def make_app(
    state: ServerState, options: ServerOptions, stats: Callable[[], Stats | None], model: Callable[[], str]
) -> web.Application:
    """The whole application, with its middleware: observe, gate, then the route."""
    metrics = Metrics(stats, model)
    observer = Observer(metrics)
    origins = Origins(options.cors_origins)
    app = web.Application(
        middlewares=[observer.middleware, gate(Keys(options.api_keys), origins)],
        client_max_size=options.max_body,
        logger=log,
    )
    intake = Intake.make(options.max_body, options.deadlines.body_s)
    app.add_routes(Routes(state, intake, observer, metrics, options.served_model_names).table())
    app.on_response_prepare.append(observer.sign)
    app.on_response_prepare.append(origins.sign)

    async def close_intake(app: web.Application) -> None:
        intake.close()

    app.on_cleanup.append(close_intake)
    return app


class HttpServer:
    """Serves an application on a bound socket, from `start` to `close`."""

    def __init__(self, app: web.Application, options: ServerOptions) -> None:
        self._tls = tls_context(options)
        self._deadlines = options.deadlines
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a client that leaves ends its request
            shutdown_timeout=CLOSE_S,
        )
        self._listener: asyncio.Server | None = None
        self._sweep: asyncio.Task[None] | None = None

    async def start(self, bound: socket.socket) -> None:
        """Listen. The socket is ours from here on."""
        _raise_file_limit()
        await self._runner.setup()
        guards = WriteGuards(self._protocol, self._deadlines.write_s)
        self._sweep = asyncio.create_task(guards.sweep())
        self._listener = await asyncio.get_running_loop().create_server(
            guards,
            sock=bound,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if self._tls is None else TLS_HANDSHAKE_S,
        )

    def _protocol(self) -> asyncio.Protocol:
        if self._runner.server is None:
            raise ServerError("the HTTP server is not set up")
        return HttpProtocol(
            self._runner.server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._deadlines.header_s,
            lingering_time=LINGER_S,
            auto_decompress=False,  # few bytes could become many
            access_log=None,  # type: ignore[arg-type]  # as aiohttp's own documentation has it
            logger=log,
        )

    async def close(self) -> None:
        """Close every connection. Requests that are still open are cancelled."""
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        if self._sweep is not None:
            self._sweep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweep


def _raise_file_limit() -> None:
    """Each connection is an open file, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
