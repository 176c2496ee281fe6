"""`python -m corellm.openai_server RUN_FOLDER`: an API worker, started by the server's main process."""

from __future__ import annotations

import sys
from pathlib import Path

from corellm.comms.children import enter_child
from corellm.comms.run_folder import RunFolder


def main() -> int:
    death_pipe = enter_child()  # before all else: the main process may die at any moment
    from corellm.openai_server.worker_process import run

    return run(RunFolder(Path(sys.argv[1])), death_pipe)


if __name__ == "__main__":
    sys.exit(main())
