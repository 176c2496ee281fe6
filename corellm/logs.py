"""Logging to stderr, at the level and in the form that the user asked for."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from typing import TextIO

ACCESS = "corellm.access"  # the server's log of requests, written whatever the level


class TextFormatter(logging.Formatter):
    """A record may quote a prompt, a file name or a model's output: none of them may drive the terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        from corellm.text.terminal import terminal_safe

        return terminal_safe(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line. A record that has `fields` says those instead of its message."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{seconds}.{int(record.msecs):03}Z", "level": record.levelname, "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= fields if fields is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class NarrationAsJson(io.TextIOBase):
    """A stderr whose every line becomes a record, as `JsonFormatter` has it, of a stream that programs read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._form = JsonFormatter()
        self._part = ""  # a line that has not ended yet

    def write(self, text: str) -> int:
        *lines, self._part = (self._part + text).split("\n")
        for line in filter(str.strip, lines):
            level = logging.ERROR if line.startswith("error:") else logging.INFO
            fields = {"name": "corellm", "levelno": level, "levelname": logging.getLevelName(level), "msg": line}
            self._stream.write(self._form.format(logging.makeLogRecord(fields)) + "\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def writable(self) -> bool:
        return True


def configure_logging(level: str, form: str = "text") -> None:
    """Send records of `level` and above to stderr, as "text" or "json". With "debug", errors bring their traceback.

    As "json", what is said on a stderr that is no terminal besides becomes records too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("corellm")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    logging.getLogger(ACCESS).setLevel(logging.INFO)
    if form == "json" and sys.stderr is not None and not sys.stderr.isatty():
        sys.stderr = NarrationAsJson(sys.stderr)
