"""Logging to stderr, at the level the user asked for."""

from __future__ import annotations

import logging
import sys


class _SafeFormatter(logging.Formatter):
    """A record may quote a prompt, a file name or a model's output: none of them may drive the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        from corellm.text.terminal import terminal_safe

        return terminal_safe(super().format(record))


def configure_logging(level: str) -> None:
    """Send records of `level` and above to stderr. With "debug", errors come with their traceback."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("corellm")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
