"""What the shell is told."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every `corellm` command."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    ROW_ERRORS = 3  # a batch finished, and some rows are errors
    INTERRUPTED = 130  # 128 + SIGINT
