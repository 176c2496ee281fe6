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

CORELLM = str(Path(sys.executable).with_name("corellm"))
START_S = 120


class ServeProcess:
    """A running server. `folder` has its run folder (`corellm`) and what it wrote to stderr (`serve.err`)."""

    def __init__(self, folder: Path, model: str, *options: str) -> None:
        self.folder = folder
        self.run_root = folder / "corellm"
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "NO_COLOR": "1"}
        self._words = [CORELLM, "serve", "--model", model, "--device", "cpu", "--port", "0", *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def stderr(self) -> str:
        return (self.folder / "serve.err").read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self) -> None:
        """Start it, and do not wait."""
        with (self.folder / "serve.err").open("wb") as stderr:
            self.process = subprocess.Popen(self._words, env=self.environment, stderr=stderr)

    def start(self) -> None:
        """Start it and wait until it says where it serves."""
        self.launch()
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while (found := re.search(r"serving on (https?://\S+)", self.stderr)) is None:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.05)
        self.url = found[1]

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
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
def serving(folder: Path, model: str, *options: str) -> Iterator[ServeProcess]:
    server = ServeProcess(folder, model, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()
