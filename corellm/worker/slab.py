"""The flat memory of one rank: weights in front, KV blocks behind, all views of one allocation."""

from __future__ import annotations

import math
import mmap

import torch

from corellm.errors import OutOfMemoryError


class Slab:
    """`nbytes` of memory on one device.

    On a CPU it starts on a page and is zero, but takes no physical memory until it is touched. On a GPU it is
    uninitialised: who needs zeros or finite values there writes them.

    Raises `OutOfMemoryError` when the device does not have that much.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.device = device
        try:
            self.data = _map_pages(nbytes) if device.type == "cpu" else _allocate(nbytes, device)
        except (OSError, torch.OutOfMemoryError):
            raise OutOfMemoryError(
                f"{nbytes / 2**30:.2f} GiB for weights and KV cache cannot be allocated on {device}; "
                f"lower --gpu-memory or --kv-blocks, or raise --tp"
            ) from None

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over the bytes from `offset` on; writes to it are writes to the slab.

        Raises `ValueError` when it would leave the slab or `offset` is no multiple of the dtype's size.
        """
        stop = offset + math.prod(shape) * dtype.itemsize
        if offset < 0 or stop > self.nbytes or offset % dtype.itemsize:
            raise ValueError(f"bytes {offset}:{stop} as {dtype} are not within a slab of {self.nbytes} bytes")
        return self.data[offset:stop].view(dtype).view(shape)


def _map_pages(nbytes: int) -> torch.Tensor:
    # torch.zeros writes every page; an anonymous mapping is zero without being touched.
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
