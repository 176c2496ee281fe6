"""Time to the first token of a chat, alone and beside a batch on the same engine. The bar: at most twice as long (p99).

    python -m benchmarks.serve_beside_batch [--model demo] [--device cpu] [--chats 40]

`corellm serve` is started on a free port; `corellm batch` then joins its engine with more rows than it can run at once.
Reported besides: the first chat after a pause, which finds the engine full of batch rows, and what the chats cost the
batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import record
from corellm.engine.batch_share import LINGER_S

CORELLM = str(Path(sys.executable).with_name("corellm"))
PAUSE_S = 0.3  # between two chats
ROWS = 5000
ROW_TOKENS = 200
CHAT_TOKENS = 16
START_S = 600
FIRST_CHATS = 3  # not counted: the engine warms up, or learns that it is shared
ALONE_S = 10.0  # for which the batch is measured without chats
BAR = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--chats", type=int, default=40)
    arguments = parser.parse_args()
    model, device, chats = arguments.model, arguments.device, arguments.chats
    with tempfile.TemporaryDirectory(prefix="corellm-bench-") as name:
        folder = Path(name)
        environment = {**os.environ, "XDG_RUNTIME_DIR": name}
        with _server(folder, model, device, environment) as url:
            asyncio.run(_first_token_times(url, FIRST_CHATS))
            alone = asyncio.run(_first_token_times(url, chats))
            with _batch(folder, model, device, environment):
                time.sleep(LINGER_S)  # until the batch has the engine for itself
                rate = _Rate(url)
                time.sleep(ALONE_S)
                batch_alone = rate.without(0)
                after_pause, *_ = asyncio.run(_first_token_times(url, FIRST_CHATS))
                rate = _Rate(url)
                beside = asyncio.run(_first_token_times(url, chats))
                batch_beside = rate.without(chats * CHAT_TOKENS)
    quiet, busy = _summary(alone), _summary(beside)
    ratio = busy["p99_ms"] / quiet["p99_ms"]
    figures = {
        "model": model,
        "chats": chats,
        "alone": quiet,
        "beside_batch": busy,
        "p99_ratio": ratio,
        "first_after_pause_ms": 1000 * after_pause,
        "batch_tokens_per_s": {"alone": batch_alone, "beside_chats": batch_beside},
    }
    print(json.dumps(figures, indent=1))
    print("recorded in", record("serve_beside_batch", figures))
    sys.exit(ratio > BAR)


@contextlib.contextmanager
def _server(folder: Path, model: str, device: str, environment: dict[str, str]) -> Iterator[str]:
    log = folder / "serve.err"
    words = [CORELLM, "serve", "--model", model, "--device", device, "--port", "0", "--name", "bench"]
    with log.open("wb") as stderr, _ended(subprocess.Popen(words, env=environment, stderr=stderr)) as process:
        deadline = time.monotonic() + START_S
        while (found := re.search(r"serving on (\S+)", log.read_text(errors="replace"))) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(log.read_text(errors="replace"))
            time.sleep(0.1)
        yield found[1]


@contextlib.contextmanager
def _batch(folder: Path, model: str, device: str, environment: dict[str, str]) -> Iterator[None]:
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for number in range(ROWS):
            row = {"prompt": f"Story number {number}. Once upon a time", "max_tokens": ROW_TOKENS, "ignore_eos": True}
            file.write(json.dumps(row) + "\n")
    words = [CORELLM, "batch", str(rows), "--model", model, "--device", device, "--engine", "bench", "--quiet"]
    with _ended(subprocess.Popen(words, env=environment)) as process:
        yield
        if process.poll() is not None:
            sys.exit("the batch ended before the measurement did; give it more rows")


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Rate:
    """Tokens a second that the engine has generated since this began."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._began, self._before = time.perf_counter(), self._generated()

    def without(self, others: int) -> float:
        """The rate, `others` tokens not counted."""
        return (self._generated() - self._before - others) / (time.perf_counter() - self._began)

    def _generated(self) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(r"^corellm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
        if found is None:
            sys.exit("the server's metrics do not count generated tokens")
        return float(found[1])


async def _first_token_times(url: str, chats: int) -> list[float]:
    """Seconds from sending a chat to its first piece of text, for one after another."""
    times = []
    async with aiohttp.ClientSession(url) as http:
        for number in range(chats):
            messages = [{"role": "user", "content": f"What is {number} plus {number + 1}?"}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": CHAT_TOKENS, "stream": True}
            began = time.perf_counter()
            async with http.post("/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                first = None
                async for line in response.content:
                    if first is None and b'"content":"' in line and b'"content":""' not in line:
                        first = time.perf_counter() - began
            times.append(first if first is not None else time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
    return times


def _summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50_ms": 0.50, "p99_ms": 0.99}
    return {name: 1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in at.items()}


if __name__ == "__main__":
    main()
