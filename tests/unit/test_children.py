"""Child processes from their first moment on."""

from __future__ import annotations

import signal

from corellm.comms.children import spawn, stop_all


def test_ctrl_c_does_not_reach_a_child_that_is_still_starting() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    child = spawn("slow", "timeit", ["-n", "1", "__import__('time').sleep(60)"])
    try:
        child.process.send_signal(signal.SIGINT)
        assert not child.wait(0.5), child.describe_exit()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    finally:
        stop_all([child], 0.0)
