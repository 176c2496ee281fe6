"""Copies between host and device that neither side waits for.

On a GPU they go through pinned memory, which torch's caching host allocator hands out and takes back once the copy is
done. On a CPU they are no copies at all.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on `device`; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Device tensors on their way to the host, in the order of the stream that computes them."""

    def __init__(self, *tensors: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._tensors = tensors
        if any(tensor.is_cuda for tensor in tensors):
            self._tensors = tuple(
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def is_done(self) -> bool:
        """Whether `arrays` returns at once."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[NDArray[np.generic]]:
        """The values, once they are there."""
        if self._done is not None:
            self._done.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class Stopwatch:
    """Seconds from here to `stop`, as the device lives through them."""

    def __init__(self, device: torch.device) -> None:
        kinds = range(2 if device.type == "cuda" else 0)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in kinds]  # type: ignore[no-untyped-call]
        self._times: list[float] = []
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def seconds(self) -> float:
        """The time between; what was launched before `stop` has to be done."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._times[1] - self._times[0]

    def _mark(self, end: int) -> None:
        if self._events:
            self._events[end].record()
        else:
            self._times.append(time.perf_counter())
