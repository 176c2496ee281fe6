"""Options of the server, checked before anything starts."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from corellm.errors import OptionError

LOG_FORMATS = ("text", "json")
_ORIGIN = re.compile(r"https?://[^/\s]+")  # as browsers send it: any path, and be it a slash, would never match


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a connection may keep the server waiting, in seconds."""

    header_s: float = 15.0  # for the whole head of a request, from the connection or the answer before it
    body_s: float = 30.0  # for the whole body
    write_s: float = 20.0  # for the client to take anything of what is held for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a user may say about the server. Raises `OptionError`, naming the option."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False
    served_model_names: tuple[str, ...] = ()  # the first names the model in answers; none: as the engine names it
    cors_origins: tuple[str, ...] = ()
    tls_cert: str | None = None
    tls_key: str | None = None
    max_concurrent: int = 2048
    max_body: int = 8 << 20  # bytes
    shutdown_grace: float = 30.0  # seconds
    api_workers: int = 1
    log_format: str = "text"
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        _check_range("--port", self.port, 0, 65535)
        _check_range("--max-concurrent", self.max_concurrent, 1, 1 << 20)
        _check_range("--max-body", self.max_body, 1 << 10, 1 << 30)
        _check_range("--shutdown-grace", self.shutdown_grace, 0, 86400)
        _check_range("--api-workers", self.api_workers, 1, 64)
        if self.log_format not in LOG_FORMATS:
            raise OptionError(f"--log-format is {self.log_format!r}; choose one of {', '.join(LOG_FORMATS)}")
        for key in self.api_keys:
            if not key or not key.isprintable() or not key.isascii() or " " in key:
                raise OptionError("--api-key holds a key that no header can carry; use printable ASCII without spaces")
        if "" in self.served_model_names:
            raise OptionError("--served-model-name is empty; give a name")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise OptionError(f"--cors-origin is {origin!r}; give an origin such as https://example.org, or *")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("--tls-cert and --tls-key go together; give both or neither")
        if not (self.api_keys or self.insecure or is_loopback(self.host)):
            raise OptionError(
                f"--host is {self.host}, which others can reach, and there is no --api-key; give one, or --insecure"
            )

    @property
    def scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on `host`. A name other than localhost may mean any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line; lines that begin with # are comments. Raises `OptionError`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--api-key-file {path} cannot be read: {error}; give a file with a key on each line"
        ) from None
    stripped = (line.strip() for line in lines)
    keys = tuple(line for line in stripped if line and not line.startswith("#"))
    if not keys:
        raise OptionError(f"--api-key-file {path} holds no key; write one on each line")
    if any(" " in key for key in keys):
        raise OptionError(
            f"--api-key-file {path} has a line with a space in it; write one key on each line, and comments on lines "
            "of their own that begin with #"
        )
    return keys


def _check_range(flag: str, value: float, low: float, high: float) -> None:
    # So written that NaN, which compares false with everything, is refused.
    if not low <= value <= high:
        raise OptionError(f"{flag} is {value}; it must be from {low} to {high}")
