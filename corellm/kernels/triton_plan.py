"""Attention of a step by the Triton kernels: what the host plans, and the launches of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.kernels import PagedAttention, hopper_prefill
from corellm.kernels.attention_work import ITEM_FIELDS, AttentionWork, most_items, plan_work
from corellm.kernels.hopper_prefill import HopperPrefill
from corellm.kernels.inputs import Heads, Rows
from corellm.kernels.triton_attention import merge_partials_kernel, paged_attention_kernel
from corellm.kernels.tuning import AttentionTile, AttentionTuning

HEADER = 8  # words: items and merges of each launch, at most two, 16 bytes apart
ALIGNED = 4  # words: each list starts at a multiple of 16 bytes, which kernels are compiled for


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What attention is planned for, the same for every step. `prefill`: in the place of the wide tile, if not None."""

    heads: Heads
    page_size: int
    sms: int
    tuning: AttentionTuning
    pdl: bool
    prefill: HopperPrefill | None

    @property
    def wide(self) -> AttentionTile:
        """The tile of rows with many new tokens."""
        return hopper_prefill.TILE if self.prefill else self.tuning.wide

    def work(self, rows: Rows, chosen: NDArray[np.int64], tile: AttentionTile) -> tuple[int, int, AttentionWork]:
        """The tile's rows, how many of its programs run at a time for each KV head, and what they do."""
        group = self.heads.group
        block_m = max(tile.block_m, 1 << (group - 1).bit_length())  # a group wider than a tile widens it
        programs = max(1, self.sms * tile.programs_per_sm // self.heads.kv)
        work = plan_work(rows, chosen, tokens_per_tile=block_m // group, tile=tile, programs=programs)
        return block_m, programs, work

    def plan(self, rows: Rows, width: int | None) -> TritonPlan:
        """See `Backend.plan_attention`."""
        if width is not None:
            every = np.arange(len(rows.slots))
            return TritonPlan(self, [_Launch.narrow(self, rows, every, width)])
        narrow = np.diff(rows.starts) <= max(self.tuning.narrow.block_m // self.heads.group, 1)
        launches = []
        if narrow.any():
            launches.append(_Launch.narrow(self, rows, np.flatnonzero(narrow)))
        if not narrow.all():
            launches.append(_Launch.wide(self, rows, np.flatnonzero(~narrow)))
        return TritonPlan(self, launches)


class TritonPlan:
    """Implements `corellm.kernels.AttentionPlan`.

    Rows whose new tokens fit one narrow tile (all that decode) run in one launch, longer ones in another. `words` holds
    how many items and merges each launch has, then what each reads and writes: see `_Launch`.
    """

    def __init__(self, setup: AttentionSetup, launches: list[_Launch]) -> None:
        self._setup, self._launches = setup, launches
        lists = [part for launch in launches for part in (launch.items.ravel(), launch.rest.ravel())]
        self.words = np.concatenate((np.zeros(HEADER, np.int32), *lists))
        for i, launch in enumerate(launches):
            self.words[4 * i : 4 * i + 2] = launch.count, launch.merges

    def bind(self, words: Tensor, block_table: Tensor) -> PagedAttention:
        return TritonAttention(self._setup, self._launches, words, block_table)


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch of a plan.

    items: int32 [i, ITEM_FIELDS], of which the first `count` are work. fused: the kernel merges its partial results
    itself, and `rest` are the arrivals that it counts; else `rest` is the list of `merges` for a second kernel.
    """

    tile: AttentionTile
    fused: bool
    block_m: int
    items: NDArray[np.int32]
    count: int
    slots: int
    rest: NDArray[np.int32]
    merges: int

    @classmethod
    def narrow(cls, setup: AttentionSetup, rows: Rows, chosen: NDArray[np.int64], width: int | None = None) -> _Launch:
        """With `width`, in arrays as long as any work for so many rows needs."""
        tile = setup.tuning.narrow
        block_m, programs, work = setup.work(rows, chosen, tile)
        length = most_items(width, programs, tile) if width else len(work.items)
        items = np.zeros((length, ITEM_FIELDS), np.int32)
        items[: len(work.items)] = work.items
        slots = length if width else work.slots
        arrivals = np.zeros(-(-slots * setup.heads.kv // ALIGNED) * ALIGNED, np.int32)
        return cls(tile, True, block_m, items, len(work.items), slots, arrivals, merges=0)

    @classmethod
    def wide(cls, setup: AttentionSetup, rows: Rows, chosen: NDArray[np.int64]) -> _Launch:
        block_m, _, work = setup.work(rows, chosen, setup.wide)
        merges = work.merges()
        return cls(setup.wide, False, block_m, work.items, len(work.items), work.slots, merges, len(merges))


class TritonAttention:
    """A plan on the device: call it with q and the cache of each layer. Implements `PagedAttention`.

    Memory for partial results is shared by the layers, which run in turn.
    """

    def __init__(self, setup: AttentionSetup, launches: list[_Launch], words: Tensor, block_table: Tensor) -> None:
        self._setup, self._launches, self._table = setup, launches, block_table
        self._counts = words[:HEADER].view(-1, 4)
        self._lists: list[tuple[Tensor, Tensor]] = []
        self._partials: list[tuple[Tensor, Tensor]] = []
        at = HEADER
        for launch in launches:
            middle, stop = at + launch.items.size, at + launch.items.size + launch.rest.size
            self._lists.append((words[at:middle], words[middle:stop]))
            at = stop
            parts = (max(launch.slots, 1), setup.heads.kv, launch.block_m)
            partials = torch.empty(*parts, setup.heads.dim, dtype=torch.float32, device=words.device)
            self._partials.append((partials, torch.empty(parts, dtype=torch.float32, device=words.device)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, head_dim]; k, v [blocks, page_size, kv_heads, head_dim]. Returns [n, heads * head_dim]."""
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for i in range(len(self._launches)):
            self._run(i, q, k, v, out)
        return out

    def _run(self, i: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill the part of `out` [n, heads * head_dim] that the work of launch `i` names."""
        setup, launch, tile = self._setup, self._launches[i], self._launches[i].tile
        (items, rest), (partials, stats), counts = self._lists[i], self._partials[i], self._counts[i]
        heads, dependent = setup.heads, {"PDL": setup.pdl, "launch_pdl": setup.pdl}
        sizes = {"HEADS": heads.count, "KV_HEADS": heads.kv, "DIM": heads.dim, "BLOCK_M": launch.block_m}
        if setup.prefill is not None and tile is hopper_prefill.TILE:
            setup.prefill.run(q, k, v, out, items, counts, self._table, partials, stats)
        else:
            paged_attention_kernel[(len(launch.items) * heads.kv,)](
                q, k, v, out, partials, stats, rest, items, counts,
                self._table, self._table.stride(0), q.stride(0), heads.scale * math.log2(math.e),
                **sizes, PAGE=setup.page_size, BLOCK_N=tile.block_n,
                MERGE=launch.fused,
                PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
                num_warps=tile.warps, num_stages=tile.stages, **dependent,
            )  # fmt: skip
        if launch.merges:
            merge_partials_kernel[(launch.merges * heads.count,)](
                partials, stats, out, rest, counts, **sizes, num_warps=2, **dependent
            )
