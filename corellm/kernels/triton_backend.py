"""The Triton backend: attention, what lies between matrix products, and sampling; the rest is the reference's."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.kernels import (
    AttentionPlan,
    PagedAttention,
    triton_logits,
    triton_pointwise,
    triton_sampling,
    triton_truncation,
)
from corellm.kernels.attention_work import AttentionWork, most_items, most_split, plan_work
from corellm.kernels.inputs import Heads, Rope, Rows
from corellm.kernels.reference import ReferenceBackend
from corellm.kernels.skinny_products import SkinnyProducts
from corellm.kernels.triton_attention import merge_partials_kernel, paged_attention_kernel
from corellm.kernels.tuning import AttentionTile, AttentionTuning, attention_tuning

HEAD_DIMS = (16, 32, 64, 128)  # a tile's side is a power of 2, and a matrix instruction takes 16
HEADER = 8  # words: items and merges of each launch, at most two, 16 bytes apart


class TritonBackend(ReferenceBackend):
    """Implements `corellm.kernels.Backend`; what has no kernel here, the reference does.

    tuning, sms (multiprocessors): read off the device unless given.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tuning: AttentionTuning | None = None, sms: int | None = None
    ) -> None:
        super().__init__(device, dtype)
        self._skinny = SkinnyProducts(device, dtype)
        self.linear = self._skinny.linear
        self._pdl = self._skinny.pdl
        self._tuning = tuning or attention_tuning(torch.cuda.get_device_capability(device), dtype)
        self._sms = sms or torch.cuda.get_device_properties(device).multi_processor_count

    locate = staticmethod(triton_pointwise.locate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_pointwise.rms_norm(x, weight, eps, pdl=self._pdl)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_pointwise.silu_mul(gate_up, pdl=self._pdl)

    def rope_write_kv(self, qkv: Tensor, rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if heads.dim not in HEAD_DIMS:
            return super().rope_write_kv(qkv, rope, heads, kv_slots, k, v)
        return triton_pointwise.rope_write_kv(qkv, rope, heads, kv_slots, k, v, pdl=self._pdl)

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> None:
        if self._skinny.covers(len(x), *weight.shape):
            self._skinny.linear_add(x, weight, residual)
        else:
            residual.addmm_(x, weight.t())  # the sum is rounded once, and takes no pass of its own

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
        if self._skinny.fuses(len(x), *weight.shape):
            return self._skinny.norm_linear(x, norm_weight, eps, weight)
        return super().norm_linear(x, norm_weight, eps, weight)

    def norm_gated(self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        if self._skinny.fuses(len(x), *gate_up.shape):
            return self._skinny.norm_gated(x, norm_weight, eps, gate_up)
        return super().norm_gated(x, norm_weight, eps, gate_up)

    def norm_qkv(
        self, x: Tensor, norm_weight: Tensor, eps: float, qkv: Tensor,
        rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor,
    ) -> Tensor:  # fmt: skip
        if heads.dim in HEAD_DIMS and self._skinny.fuses(len(x), *qkv.shape):
            return self._skinny.norm_qkv(x, norm_weight, eps, qkv, rope, heads, kv_slots, k, v)
        return super().norm_qkv(x, norm_weight, eps, qkv, rope, heads, kv_slots, k, v)

    def can_capture(self, heads: Heads) -> bool:
        return heads.dim in HEAD_DIMS

    def plan_attention(self, rows: Rows, heads: Heads, width: int | None = None) -> AttentionPlan:
        if heads.dim not in HEAD_DIMS:
            return super().plan_attention(rows, heads, width)
        return TritonPlan.make(rows, heads, self._tuning, self._sms, width, self._pdl)

    sample = staticmethod(triton_sampling.sample)
    penalize = staticmethod(triton_logits.penalize)
    mask_unlikely = staticmethod(triton_truncation.mask_unlikely)
    apply_bitmask = staticmethod(triton_logits.apply_bitmask)


class TritonPlan:
    """Implements `corellm.kernels.AttentionPlan`.

    Rows whose new tokens fit one narrow tile (all that decode) run in one launch, longer ones in another. `words` holds
    how many items and merges each launch has, then the lists.
    """

    def __init__(self, heads: Heads, launches: list[_Launch], pdl: bool) -> None:
        self._heads, self._pdl = heads, pdl
        self._launches = launches
        lists = [part for launch in launches for part in (launch.items.ravel(), launch.merges.ravel())]
        self.words = np.concatenate((np.zeros(HEADER, np.int32), *lists))
        for i, launch in enumerate(launches):
            self.words[4 * i : 4 * i + 2] = launch.work.items.shape[0], launch.work.merges.shape[0]

    @classmethod
    def make(
        cls, rows: Rows, heads: Heads, tuning: AttentionTuning, sms: int, width: int | None, pdl: bool
    ) -> TritonPlan:
        """See `Backend.plan_attention`."""
        if width is not None:
            every = np.arange(len(rows.slots))
            return cls(heads, [_Launch.make(rows, every, heads, tuning.narrow, sms, width)], pdl)
        narrow = np.diff(rows.starts) <= max(tuning.narrow.block_m // heads.group, 1)
        by_tile = ((tuning.narrow, np.flatnonzero(narrow)), (tuning.wide, np.flatnonzero(~narrow)))
        launches = [_Launch.make(rows, chosen, heads, tile, sms) for tile, chosen in by_tile if len(chosen)]
        return cls(heads, launches, pdl)

    def bind(self, words: Tensor, block_table: Tensor, page_size: int) -> PagedAttention:
        return TritonAttention(self._heads, self._launches, words, block_table, page_size, self._pdl)


class _Launch:
    """One launch of a plan: its work, in lists that may be longer than the work is."""

    def __init__(self, tile: AttentionTile, block_m: int, work: AttentionWork, items: int, merges: int) -> None:
        self.tile, self.block_m, self.work = tile, block_m, work
        self.items = _padded(work.items, items)
        self.merges = _padded(work.merges, merges)
        self.slots = max(work.slots if items == len(work.items) else items, 1)

    @classmethod
    def make(
        cls, rows: Rows, chosen: NDArray[np.int64], heads: Heads, tile: AttentionTile, sms: int,
        width: int | None = None,
    ) -> _Launch:  # fmt: skip
        block_m = max(tile.block_m, 1 << (heads.group - 1).bit_length())  # a group wider than a tile widens it
        programs = max(1, sms * tile.programs_per_sm // heads.kv)
        work = plan_work(rows, chosen, tokens_per_tile=block_m // heads.group, tile=tile, programs=programs)
        if width is None:
            return cls(tile, block_m, work, len(work.items), len(work.merges))
        return cls(tile, block_m, work, most_items(width, programs), most_split(width, programs))


class TritonAttention:
    """A plan on the device: call it with q and the cache of each layer. Implements `PagedAttention`.

    Memory for partial results is shared by the layers, which run in turn.
    """

    def __init__(
        self, heads: Heads, launches: list[_Launch], words: Tensor, block_table: Tensor, page_size: int, pdl: bool
    ) -> None:
        self._pdl = pdl
        self._heads, self._launches, self._table, self._page_size = heads, launches, block_table, page_size
        self._counts = words[:HEADER].view(-1, 4)
        self._lists: list[tuple[Tensor, Tensor]] = []
        self._partials: list[tuple[Tensor, Tensor]] = []
        at = HEADER
        for launch in launches:
            middle, stop = at + launch.items.size, at + launch.items.size + launch.merges.size
            self._lists.append((words[at:middle], words[middle:stop]))
            at = stop
            parts = (launch.slots, heads.kv, launch.block_m)
            partials = torch.empty(*parts, heads.dim, dtype=torch.float32, device=words.device)
            self._partials.append((partials, torch.empty(parts, dtype=torch.float32, device=words.device)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, head_dim]; k, v [blocks, page_size, kv_heads, head_dim]. Returns [n, heads * head_dim]."""
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for i in range(len(self._launches)):
            self._run(i, q, k, v, out)
        return out

    def _run(self, i: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill the part of `out` [n, heads * head_dim] that the work of launch `i` names."""
        heads, launch, tile = self._heads, self._launches[i], self._launches[i].tile
        (items, merges), (partials, stats), counts = self._lists[i], self._partials[i], self._counts[i]
        sizes = {"HEADS": heads.count, "KV_HEADS": heads.kv, "DIM": heads.dim, "BLOCK_M": launch.block_m}
        paged_attention_kernel[(len(launch.items) * heads.kv,)](
            q, k, v, out, partials, stats, items, counts,
            self._table, self._table.stride(0), q.stride(0), heads.scale * math.log2(math.e),
            **sizes, PAGE=self._page_size, BLOCK_N=tile.block_n,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.warps, num_stages=tile.stages, PDL=self._pdl, launch_pdl=self._pdl,
        )  # fmt: skip
        if len(launch.merges):
            merge_partials_kernel[(len(launch.merges) * heads.count,)](
                partials, stats, out, merges, counts, **sizes, num_warps=2, PDL=self._pdl, launch_pdl=self._pdl
            )  # fmt: skip


def _padded(rows: NDArray[np.int32], length: int) -> NDArray[np.int32]:
    padded = np.zeros((length, rows.shape[1]), dtype=np.int32)
    padded[: len(rows)] = rows
    return padded
