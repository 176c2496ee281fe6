"""`corellm serve` as a process, with a run folder of its own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from corellm.openai_server.options import Deadlines

CORELLM = str(Path(sys.executable).with_name("corellm"))
START_S = 120
# `corellm serve`, with deadlines that a test can wait for: they are no options of the command.
IMPATIENT = """
import sys
from corellm.config import EngineOptions
from corellm.openai_server.options import Deadlines, ServerOptions
from corellm_cli.serve_run import run_serve
model, header_s, body_s, write_s = sys.argv[1], *map(float, sys.argv[2:])
deadlines = Deadlines(header_s=header_s, body_s=body_s, write_s=write_s)
sys.exit(run_serve(ServerOptions(port=0, deadlines=deadlines), EngineOptions(model=model, device="cpu")))
"""


class ServeProcess:
    """A running server. `folder` has its run folder (`corellm`) and what it wrote to stderr (`serve.err`).

    With `deadlines` it takes no options.
    """

    def __init__(self, folder: Path, model: str, *options: str, deadlines: Deadlines | None = None) -> None:
        self.folder = folder
        self.run_root = folder / "corellm"
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "NO_COLOR": "1"}
        self.words = [CORELLM, "serve", "--model", model, "--device", "cpu", "--port", "0", *options]
        if deadlines is not None:
            times = (deadlines.header_s, deadlines.body_s, deadlines.write_s)
            self.words = [sys.executable, "-c", IMPATIENT, model, *map(str, times)]
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.headers: dict[str, str] = {}  # of our requests, such as a key

    @property
    def stderr(self) -> str:
        return (self.folder / "serve.err").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self, stderr: IO[bytes] | None = None) -> None:
        """Start it, and do not wait. `stderr` is what it writes to instead of `serve.err`."""
        with (self.folder / "serve.err").open("wb") as file:
            self.process = subprocess.Popen(self.words, env=self.environment, stderr=stderr or file)

    def start(self) -> None:
        """Start it and wait until it says where it serves."""
        self.launch()
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while (found := re.search(r"serving on (https?://[^\s\"]+)", self.stderr)) is None:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.05)
        self.url = found[1]

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self, patience_s: float = 30) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=self.headers), timeout=10
        ) as response:
            text: str = response.read().decode()
        return text

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric."""
        found = re.findall(rf"^corellm:{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), flags=re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            return '"ok"' in self.get("/health")
        return False


@contextlib.contextmanager
def serving(folder: Path, model: str, *options: str, deadlines: Deadlines | None = None) -> Iterator[ServeProcess]:
    """A `ServeProcess` that has started."""
    server = ServeProcess(folder, model, *options, deadlines=deadlines)
    try:
        server.start()
        yield server
    finally:
        server.stop()
