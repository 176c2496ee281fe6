"""Child processes that cannot outlive their parent, and parents that notice a child's death at once.

A child dies with its parent twice over: the kernel sends it SIGKILL (parent-death signal), and a pipe whose other end
only the parent holds reads as closed. A parent holds a pidfd of each child, which becomes readable when it exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1
_DEATH_FD = "CORELLM_DEATH_FD"
_PARENT = "CORELLM_PARENT_PID"


@dataclass(slots=True)
class Child:
    """A running `python -m module`. `pidfd` is readable once it has exited."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    _pipe: int | None = field(repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        return self.process.poll()

    def describe_exit(self) -> str:
        code = self.exit_code()
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self, deadline_s: float) -> bool:
        """Wait for its exit; False when the deadline passes first."""
        ready, _, _ = select.select([self.pidfd], [], [], max(deadline_s, 0.0))
        if ready:
            self.process.wait()
        return bool(ready)

    def hang_up(self) -> None:
        """Close the death pipe: a child that heeds it leaves."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def stop(self, deadline_s: float) -> None:
        """Hang up, wait, then kill. The child is gone and reaped when this returns."""
        self.hang_up()
        if not self.wait(deadline_s):
            self.signal(signal.SIGKILL)
            self.process.wait()
        os.close(self.pidfd)


def spawn(name: str, module: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> Child:
    """Start `python -m module arguments…`. Its standard output is our standard error: data has stdout for itself."""
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
            pass_fds=(read_end,),
            env={**os.environ, **(environment or {}), _DEATH_FD: str(read_end), _PARENT: str(os.getpid())},
        )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return Child(name, process, os.pidfd_open(process.pid), write_end)


def enter_child() -> int:
    """First thing in a child: tie its life to the parent's and leave Ctrl-C to it. Returns the death pipe's end.

    Exits at once when the parent is gone already.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[_PARENT]):
        os._exit(1)
    death_pipe = int(os.environ.pop(_DEATH_FD))
    os.set_inheritable(death_pipe, False)
    return death_pipe
