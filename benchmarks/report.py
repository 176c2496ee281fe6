"""One JSON a run, with what it ran on: hardware, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from corellm.device import cpu_count

RESULTS = Path(__file__).parent.parent / "results"
_PACKAGES = ("corellm", "torch", "triton", "transformers", "tokenizers", "pyzmq", "msgspec", "numpy")


def record(name: str, figures: dict[str, Any], *, folder: Path = RESULTS) -> Path:
    """Write `results/<name>-<time>.json` and return its path."""
    now = time.gmtime()
    run = {
        "benchmark": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        "command": " ".join(["python -m benchmarks." + name, *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}.json"
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit that ran, marked when the tree had changes on top."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def _hardware() -> dict[str, Any]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    gpus = subprocess.run(
        ["sh", "-c", "command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name --format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {"cpu": model, "cores": cpu_count(), "gpus": gpus.stdout.split("\n")[:-1]}
