"""What the machine has, found without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path


def gpu_count() -> int:
    """NVIDIA GPUs that this process may use, by device files and `CUDA_VISIBLE_DEVICES`."""
    try:
        present = sum(1 for path in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", path.name))
    except OSError:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]))


def cpu_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes of main memory that could be used without swapping, by /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
