"""Memory that all GPUs of a group reach, as over NVLink: where the ranks leave their parts of a sum for the others.

Small sums, those of decode steps, are made by one kernel on each rank from here; wide ones are NCCL's.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

from corellm.errors import StartupError
from corellm.kernels.skinny_products import has_pdl
from corellm.kernels.triton_peer_sum import MAX_PROGRAMS, add_peer_sum
from corellm.layers.parallel import PLACES

PAIR_BYTES = 8 << 20  # of a part, up to which two ranks do without NCCL
TRIAL_S = 60.0  # for the first sums, in which each rank compiles the kernel
_TRIED = (3, 1000)
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver

log = logging.getLogger(__name__)


def part_bytes(size: int) -> int:
    """The largest part of a sum over `size` ranks that is left here.

    A rank reads size - 1 parts, where NCCL's ring moves less than 2: the more ranks, the sooner that is faster. Where
    exactly is a guess until `benchmarks.all_reduce` has run on such machines.
    """
    return PAIR_BYTES // (size - 1) ** 2 // 16 * 16


def memory_bytes(size: int) -> int:
    """Of each rank: a part and its flags for every place."""
    return PLACES * (part_bytes(size) + _flag_bytes(size))


def _flag_bytes(size: int) -> int:
    return MAX_PROGRAMS * size * 4


class PeerMemory:
    """This rank's memory, uint8 [memory_bytes], zero at first, and where this process finds that of all ranks.

    addresses: multiples of 16, one for each rank, this one included. pdl: programmatic dependent launch. held_by: what
    keeps the other ranks' memory within reach.
    """

    def __init__(
        self, memory: Tensor, addresses: Sequence[int], rank: int, *, pdl: bool, held_by: object = None
    ) -> None:
        self._held_by = held_by
        self._memory, self._addresses, self._rank, self._pdl = memory, tuple(addresses), rank, pdl
        size = len(addresses)
        self._part_bytes, self._flag_bytes = part_bytes(size), _flag_bytes(size)

    def fits(self, part: Tensor) -> bool:
        """Whether a part of this size is left here: the same on every rank."""
        return part.nbytes <= self._part_bytes

    def part(self, like: Tensor, place: int) -> Tensor:
        """See `Collectives.part`, for what `fits`."""
        start = place * self._part_bytes
        return self._memory[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def add_sum(self, residual: Tensor, place: int) -> None:
        """Add the parts that all ranks left at `place`. On a GPU it is queued, and waits there for the other ranks."""
        flags = PLACES * self._part_bytes + place * self._flag_bytes
        add_peer_sum(residual, self._addresses, place * self._part_bytes, flags, self._rank, pdl=self._pdl)


def connect(device: torch.device, rank: int, size: int) -> PeerMemory | None:
    """Memory shared with the other ranks of the default process group, whose GPUs are numbered as they are.

    None, on every rank alike, where some GPU cannot reach another one's memory, or sums do not come out right. Raises
    `StartupError` when a first sum does not end.
    """
    if not _everywhere(all(_reaches(a, b) for a, b in permutations(range(size), 2)), device):
        log.info("not every GPU reaches every other one's memory: all sums go over NCCL")
        return None
    peers = None
    try:
        peers = _share(device, rank, size)
    except (ImportError, RuntimeError) as error:  # a driver or a container may still refuse, and then does on all ranks
        log.info("the GPUs' memory cannot be shared, all sums go over NCCL: %s", str(error).partition("\n")[0])
    if not _everywhere(peers is not None, device) or peers is None:
        return None
    if not _everywhere(_is_right(peers, rank, size, device), device):
        log.warning("sums over the GPUs' shared memory come out wrong: all go over NCCL; please report this")
        return None
    return peers


def _reaches(a: int, b: int) -> bool:
    """Whether GPU a reads and writes the memory of GPU b, atomic operations included."""
    driver, devices, atomics = ctypes.CDLL("libcuda.so.1"), (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    for device, number in zip(devices, (a, b), strict=True):
        driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetP2PAttribute(ctypes.byref(atomics), _NATIVE_ATOMICS, *devices)
    return bool(atomics.value) and torch.cuda.can_device_access_peer(a, b)


def _share(device: torch.device, rank: int, size: int) -> PeerMemory:
    import torch.distributed._symmetric_memory as symmetric_memory

    # Nothing here uses NVLink multicast, which takes resources that all GPUs of a host share.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    memory = symmetric_memory.empty(memory_bytes(size), dtype=torch.uint8, device=device)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no process group")
    handle = symmetric_memory.rendezvous(memory, group)
    if handle.buffer_ptrs[rank] != memory.data_ptr():
        raise RuntimeError("the tensor does not begin where its allocation does")
    memory.zero_()
    torch.cuda.synchronize(device)
    return PeerMemory(memory, handle.buffer_ptrs, rank, pdl=has_pdl(device), held_by=handle)


def _everywhere(here: bool, device: torch.device) -> bool:
    """Whether `here` is true on every rank. All ranks have come so far when it returns."""
    verdict = torch.tensor([here], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def _is_right(peers: PeerMemory, rank: int, size: int, device: torch.device) -> bool:
    """Sum known numbers, every place twice."""
    residual = torch.zeros(_TRIED, device=device)
    for call, place in enumerate((*range(PLACES), *range(PLACES))):
        peers.part(residual, place).fill_((call + 1) * (rank + 1))
        peers.add_sum(residual, place)
    truth = sum(range(1, 2 * PLACES + 1)) * sum(range(1, size + 1))
    ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ended.record()
    deadline = time.monotonic() + TRIAL_S
    while not ended.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            raise StartupError(
                f"rank {rank} of --tp {size}: a sum over the GPUs' shared memory has not ended after {TRIAL_S:.0f} s; "
                f"use --tp 1, and please report this"
            )
        time.sleep(0.001)
    return bool((residual == truth).all())
