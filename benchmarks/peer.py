"""Another program, measured in the same run: a command that prints its figures as lines of JSON."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import threading
from typing import Any


def lines(command: str, seconds: float) -> list[dict[str, Any]]:
    """What `command` prints within `seconds`, each line as it comes. What is no JSON object does not count."""
    found = []
    with subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))  # its workers too
        timer.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                found.append(json.loads(line))
                print(line, end="", flush=True)
        process.wait()
        timer.cancel()
    return found
