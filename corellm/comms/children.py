"""Child processes that cannot outlive their parent, and parents that notice a child's death at once.

A child dies with its parent twice over: the kernel sends it SIGKILL (parent-death signal), and a pipe whose other end
only the parent holds reads as closed. A parent holds a pidfd of each child, which becomes readable when it exits.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1
_DEATH_FD = "CORELLM_DEATH_FD"
_PARENT = "CORELLM_PARENT_PID"
KILL_S = 5.0

log = logging.getLogger(__name__)


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

    def wait(self, seconds: float) -> bool:
        """Wait for its exit, and reap it; False when the time passes first."""
        try:
            self.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def hang_up(self) -> None:
        """Close the death pipe: a child that heeds it leaves."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def forget(self) -> None:
        """Close what we hold of it. Idempotent."""
        self.hang_up()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def stop_all(children: Sequence[Child], patience_s: float) -> None:
    """Hang up on all, give them one deadline together, then kill what is left. They are gone and reaped afterwards,
    but for one that the kernel itself cannot end (stuck in a driver), which is left to it. Idempotent."""
    for child in children:
        child.hang_up()
    deadline = time.monotonic() + patience_s
    left = [child for child in children if not child.wait(deadline - time.monotonic())]
    for child in left:
        child.process.kill()
    deadline = time.monotonic() + KILL_S
    for child in left:
        if not child.wait(deadline - time.monotonic()):
            log.error("%s (pid %d) does not die of SIGKILL", child.name, child.pid)
    for child in children:
        child.forget()


def is_readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor becomes readable, or its other end closed, within `seconds`. Any number will do, unlike
    with `select.select`, which fails from 1024 on: a host program may hold that many files."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def spawn(name: str, module: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> Child:
    """Start `python -m module arguments…`. Its standard output is our standard error: data has stdout for itself."""
    read_end, write_end = os.pipe()
    # Ctrl-C is for us to act on, and a child that is still importing does not ignore it yet. It inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
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
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
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
