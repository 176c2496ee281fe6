"""Paged attention in torch.

Rows that feed one token are grouped by context length and attended together; longer rows go one by one. The KV of a
row is first gathered, one index per token, so that memory a row does not own is never read: positions past the end of
a shorter row repeat its last token, and are masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from corellm.kernels.inputs import Heads, Rows

SHORTEST_GROUP = 256  # tokens; shorter contexts share one group, since a call costs more than their padding
QUERY_TILE = 256  # tokens; bounds the mask of a chunk behind a long prefix


class ReferenceAttention:
    """Attention of one step: call it with q and the cache of each layer. Implements `PagedAttention`."""

    def __init__(self, rows: Rows, heads: Heads, block_table: Tensor, page_size: int) -> None:
        lengths = np.diff(rows.starts)
        decode = np.flatnonzero(lengths == 1)
        cache = _Cache(block_table, page_size, heads)
        self._heads = heads
        self._groups = [_DecodeGroup(rows, group, cache) for group in _by_length(decode, rows.contexts)]
        self._chunks = [_PrefillChunk(rows, int(row), cache) for row in np.flatnonzero(lengths > 1)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, head_dim]; k, v [blocks, page_size, kv_heads, head_dim]. Returns [n, heads * head_dim]."""
        k, v = k.view(-1, self._heads.dim), v.view(-1, self._heads.dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.tokens] = group.attend(q[group.tokens], k, v)
        for chunk in self._chunks:
            chunk.attend(q, k, v, out)
        return out.view(len(q), -1)


@dataclass(frozen=True, slots=True)
class _Cache:
    """How the cache of a layer is found: the block table of every slot, and what a block holds."""

    table: Tensor
    page_size: int
    heads: Heads

    def rows(self, slots: NDArray[np.int64], positions: Tensor) -> Tensor:
        """Rows of the cache seen as [kv slots * kv_heads, head_dim] for positions [r, l] of slots [r].

        Returns int64 [r, kv_heads, l].
        """
        table, size, kv_heads = self.table[torch.from_numpy(slots).to(self.table.device)], self.page_size, self.heads.kv
        found = table.gather(1, positions // size).long() * size + positions % size
        return found[:, None, :] * kv_heads + torch.arange(kv_heads, device=table.device)[:, None]


class _DecodeGroup:
    """Rows of one query token each: `tokens` are their places in the batch, r of them, l the longest context."""

    def __init__(self, rows: Rows, group: NDArray[np.int64], cache: _Cache) -> None:
        device = cache.table.device
        contexts = torch.from_numpy(rows.contexts[group]).to(device)
        first, last = int(rows.starts[group[0]]), int(rows.starts[group[-1]])
        contiguous = last - first + 1 == len(group)
        self.tokens: slice | Tensor = (
            slice(first, last + 1) if contiguous else torch.from_numpy(rows.starts[group]).to(device)
        )
        self._heads = cache.heads
        span = torch.arange(int(rows.contexts[group].max()), device=device)
        positions = torch.minimum(span, contexts[:, None] - 1)
        self._index = cache.rows(rows.slots[group], positions).flatten()
        mask = torch.zeros(len(group), len(span), device=device).masked_fill_(span >= contexts[:, None], -torch.inf)
        self._mask = mask.repeat_interleave(cache.heads.kv, dim=0)[:, None]  # [r * kv_heads, 1, l]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [r, heads, head_dim], k and v [kv slots * kv_heads, head_dim]. Softmax and sums in float32."""
        pairs, _, span = self._mask.shape
        keys = k.index_select(0, self._index).view(pairs, span, -1).float()
        values = v.index_select(0, self._index).view(pairs, span, -1).float()
        queries = q.reshape(pairs, self._heads.group, -1).float()
        scores = torch.baddbmm(self._mask, queries, keys.transpose(1, 2), alpha=self._heads.scale)
        return torch.bmm(scores.softmax(-1), values).view(q.shape).to(q.dtype)


class _PrefillChunk:
    """The t query tokens of one row, behind a prefix whose KV is there already (it may be empty)."""

    def __init__(self, rows: Rows, row: int, cache: _Cache) -> None:
        self._heads = cache.heads
        self._start, self._stop = int(rows.starts[row]), int(rows.starts[row + 1])
        context = int(rows.contexts[row])
        span = torch.arange(context, device=cache.table.device)
        self._index = cache.rows(rows.slots[row, None], span[None]).flatten()
        self._prefix = context - (self._stop - self._start)
        # Without a prefix the triangle is square, which torch's own causal mode computes without a mask.
        tile = QUERY_TILE if self._prefix else self._stop - self._start
        self._tiles = [
            (start, min(start + tile, self._stop), self._mask(start, min(start + tile, self._stop), span))
            for start in range(self._start, self._stop, tile)
        ]

    def _mask(self, start: int, stop: int, span: Tensor) -> Tensor | None:
        """Which keys the queries start:stop of the batch may see: bool [stop - start, keys up to the last query]."""
        if not self._prefix:
            return None
        last = self._prefix + stop - self._start
        queries = torch.arange(last - (stop - start), last, device=span.device)
        return span[:last] <= queries[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Fill this row's part of `out` [n, heads, head_dim]; k and v [kv slots * kv_heads, head_dim]."""
        # Shape [kv_heads, group, tokens, head_dim]: the KV heads take the batch dimension, so that the query heads of
        # a group read one copy of K and V through a stride of 0.
        kv, group, dim = self._heads.kv, self._heads.group, self._heads.dim
        keys = k.index_select(0, self._index).view(kv, 1, -1, dim).expand(-1, group, -1, -1)
        values = v.index_select(0, self._index).view(kv, 1, -1, dim).expand(-1, group, -1, -1)
        for start, stop, mask in self._tiles:
            last = self._prefix + stop - self._start
            queries = q[start:stop].view(stop - start, kv, group, dim).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(
                queries, keys[:, :, :last], values[:, :, :last], attn_mask=mask, is_causal=mask is None
            )
            out[start:stop].view(stop - start, kv, group, dim).copy_(attended.permute(2, 0, 1, 3))


def _by_length(rows: NDArray[np.int64], contexts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split rows so that within a group the longest context is at most twice the shortest (or `SHORTEST_GROUP`)."""
    octave = np.ceil(np.log2(np.maximum(contexts[rows], SHORTEST_GROUP)))
    return [rows[octave == level] for level in np.unique(octave)]
