"""`python -m corellm.engine RUN_FOLDER`: started by a front end, which it does not outlive."""

from __future__ import annotations

import sys
from pathlib import Path

from corellm.comms.children import enter_child
from corellm.comms.run_folder import RunFolder


def main() -> int:
    death_pipe = enter_child()  # before all else: whoever started us may die at any moment
    from corellm.engine.process import run

    return run(RunFolder(Path(sys.argv[1])), death_pipe)


if __name__ == "__main__":
    sys.exit(main())
