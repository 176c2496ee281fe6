"""How bytes read from a checkpoint reach the slab: directly, through a conversion, or through pinned memory.

Each reading thread has a sink of its own. It asks for a buffer, fills it with elements of the file's dtype, and puts
it:

    buffer(at, source, nbytes) -> memoryview    then    put(at, source, nbytes)    ...    finish()

`at` is the byte in the slab where the elements go, `source` a dtype name of `checkpoint.DTYPE_BYTES`, `nbytes` their
size in the file.
"""

from __future__ import annotations

from typing import Protocol

import torch

from corellm.worker.slab import Slab

SOURCE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Sink(Protocol):
    """Takes the pieces of one reading thread, in turn."""

    def buffer(self, at: int, source: str, nbytes: int) -> memoryview: ...

    def put(self, at: int, source: str, nbytes: int) -> None: ...

    def finish(self) -> None:
        """Return once everything that was put is in the slab."""


def make_sink(slab: Slab, dtype: torch.dtype, piece_bytes: int) -> Sink:
    """The sink for `slab`'s device. `piece_bytes` bounds every piece."""
    if slab.device.type == "cpu":
        return HostSink(slab, dtype)
    return PinnedSink(slab, dtype, piece_bytes)


class HostSink:
    """Into a slab in host memory: in place when the dtypes agree, else through one staging buffer."""

    def __init__(self, slab: Slab, dtype: torch.dtype) -> None:
        self._slab = slab
        self._dtype = dtype
        self._memory = slab.data.numpy().data
        self._staging = bytearray()

    def buffer(self, at: int, source: str, nbytes: int) -> memoryview:
        if SOURCE_DTYPES[source] is self._dtype:
            return self._memory[at : at + nbytes]
        if len(self._staging) < nbytes:
            self._staging = bytearray(nbytes)
        return memoryview(self._staging)[:nbytes]

    def put(self, at: int, source: str, nbytes: int) -> None:
        dtype = SOURCE_DTYPES[source]
        if dtype is not self._dtype:
            count = nbytes // dtype.itemsize
            staged = torch.frombuffer(self._staging, dtype=dtype, count=count)
            self._slab.view(at, (count,), self._dtype).copy_(staged)

    def finish(self) -> None:
        pass


class PinnedSink:
    """Into a slab on a GPU: two pinned buffers take turns, so that one is read while the other is copied."""

    def __init__(self, slab: Slab, dtype: torch.dtype, piece_bytes: int) -> None:
        self._slab = slab
        self._dtype = dtype
        self._stream = torch.cuda.Stream(slab.device)  # type: ignore[no-untyped-call]
        # The slab may still be written to by work queued before, such as zeroing the padded rows.
        self._stream.wait_stream(torch.cuda.default_stream(slab.device))
        self._staging = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._memory = [staging.numpy().data for staging in self._staging]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def buffer(self, at: int, source: str, nbytes: int) -> memoryview:
        self._copied[self._turn].synchronize()
        return self._memory[self._turn][:nbytes]

    def put(self, at: int, source: str, nbytes: int) -> None:
        staged = self._staging[self._turn][:nbytes].view(SOURCE_DTYPES[source])
        target = self._slab.view(at, (staged.numel(),), self._dtype)
        with torch.cuda.stream(self._stream):
            if staged.dtype is not self._dtype:
                # Converting on the device keeps the copy asynchronous; it costs one piece of device memory.
                staged = staged.to(self._slab.device, non_blocking=True)
            target.copy_(staged, non_blocking=True)
            self._copied[self._turn].record(self._stream)
        self._turn = 1 - self._turn

    def finish(self) -> None:
        self._stream.synchronize()
