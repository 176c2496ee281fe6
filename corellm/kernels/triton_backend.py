"""The Triton backend: attention, what lies between matrix products, and draws; the rest is the reference's."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.kernels import PagedAttention, triton_pointwise, triton_sampling
from corellm.kernels.attention_work import plan_work
from corellm.kernels.inputs import Batch, Heads, Rope
from corellm.kernels.reference import ReferenceBackend
from corellm.kernels.triton_attention import merge_partials_kernel, paged_attention_kernel
from corellm.kernels.tuning import AttentionTile, AttentionTuning, attention_tuning

HEAD_DIMS = (16, 32, 64, 128)  # a tile's side is a power of 2, and a matrix instruction takes 16


class TritonBackend(ReferenceBackend):
    """Implements `corellm.kernels.Backend`; what has no kernel here, the reference does.

    tuning, sms (multiprocessors): read off the device unless given.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, tuning: AttentionTuning | None = None, sms: int | None = None
    ) -> None:
        super().__init__(device, dtype)
        self._tuning = tuning or attention_tuning(torch.cuda.get_device_capability(device), dtype)
        self._sms = sms or torch.cuda.get_device_properties(device).multi_processor_count

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_pointwise.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_pointwise.rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_pointwise.silu_mul(gate_up)

    def rope_write_kv(self, qkv: Tensor, rope: Rope, heads: Heads, kv_slots: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if heads.dim not in HEAD_DIMS:
            return super().rope_write_kv(qkv, rope, heads, kv_slots, k, v)
        return triton_pointwise.rope_write_kv(qkv, rope, heads, kv_slots, k, v)

    def plan_attention(self, batch: Batch, heads: Heads) -> PagedAttention:
        if heads.dim not in HEAD_DIMS:
            return super().plan_attention(batch, heads)
        return TritonAttention(batch, heads, self._tuning, self._sms)

    draw = staticmethod(triton_sampling.draw)


class TritonAttention:
    """Attention of one step: call it with q and the cache of each layer. Implements `PagedAttention`.

    Rows whose new tokens fit one narrow tile (all that decode) run in one launch, longer ones in another.
    """

    def __init__(self, batch: Batch, heads: Heads, tuning: AttentionTuning, sms: int) -> None:
        narrow = np.diff(batch.starts) <= max(tuning.narrow.block_m // heads.group, 1)
        by_tile = ((tuning.narrow, np.flatnonzero(narrow)), (tuning.wide, np.flatnonzero(~narrow)))
        self._launches = [_Launch(batch, heads, tile, rows, sms) for tile, rows in by_tile if len(rows)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, head_dim]; k, v [blocks, page_size, kv_heads, head_dim]. Returns [n, heads * head_dim]."""
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for launch in self._launches:
            launch.run(q, k, v, out)
        return out


class _Launch:
    """The work of `rows` on the device, with memory for its partial results, which the layers reuse in turn."""

    def __init__(self, batch: Batch, heads: Heads, tile: AttentionTile, rows: NDArray[np.int64], sms: int) -> None:
        self._heads, self._tile = heads, tile
        self._table, self._page_size = batch.block_table, batch.page_size
        self._block_m = max(tile.block_m, 1 << (heads.group - 1).bit_length())  # a group wider than a tile widens it
        work = plan_work(
            rows,
            batch.starts,
            batch.contexts,
            tokens_per_tile=self._block_m // heads.group,
            tile=tile,
            programs=max(1, sms * tile.programs_per_sm // heads.kv),
        )
        device = batch.block_table.device
        self._items, self._merges = _upload(work.items, work.merges, device)
        parts = (max(work.slots, 1), heads.kv, self._block_m)
        self._partials = torch.empty(*parts, heads.dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(parts, dtype=torch.float32, device=device)

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill the part of `out` [n, heads * head_dim] that the work list names."""
        heads, tile = self._heads, self._tile
        sizes = {"HEADS": heads.count, "KV_HEADS": heads.kv, "DIM": heads.dim, "BLOCK_M": self._block_m}
        paged_attention_kernel[(len(self._items) * heads.kv,)](
            q, k, v, out, self._partials, self._stats, self._items,
            self._table, self._table.stride(0), q.stride(0), heads.scale * math.log2(math.e),
            **sizes, PAGE=self._page_size, BLOCK_N=tile.block_n,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if len(self._merges):
            merge_partials_kernel[(len(self._merges) * heads.count,)](
                self._partials, self._stats, out, self._merges, **sizes, num_warps=2
            )


def _upload(items: NDArray[np.int32], merges: NDArray[np.int32], device: torch.device) -> tuple[Tensor, Tensor]:
    """Both lists on the device, in one copy."""
    joined = torch.from_numpy(np.concatenate((items.ravel(), merges.ravel()))).to(device, non_blocking=True)
    return joined[: items.size].view(items.shape), joined[items.size :].view(merges.shape)
