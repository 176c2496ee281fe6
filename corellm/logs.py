"""Logging to stderr, at the level and in the form that the user asked for."""

from __future__ import annotations

import json
import logging
import sys
import time

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


def configure_logging(level: str, form: str = "text") -> None:
    """Send records of `level` and above to stderr, as "text" or "json". With "debug", errors bring their traceback."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logger = logging.getLogger("corellm")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    logging.getLogger(ACCESS).setLevel(logging.INFO)
