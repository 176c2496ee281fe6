"""`python -m corellm.worker RUN_FOLDER RANK`: started by the engine, one a rank."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from corellm.comms.children import enter_child
from corellm.comms.run_folder import RunFolder


def main() -> int:
    death_pipe = enter_child()
    # Signals to the whole process group, such as of `timeout` or a closed terminal, are the engine's to handle.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from corellm.worker.process import run  # imports torch: seconds

    return run(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), death_pipe)


if __name__ == "__main__":
    sys.exit(main())
