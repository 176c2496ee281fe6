"""Paged attention in torch.

Rows that feed one token are grouped by context length and attended together; longer rows go one by one. The KV of a
row is first gathered, one index per token, so that memory a row does not own is never read: positions past the end of
a shorter row repeat its last token, and are masked.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from corellm.kernels.inputs import Batch, Heads

SHORTEST_GROUP = 256  # tokens; shorter contexts share one group, since a call costs more than their padding
QUERY_TILE = 256  # tokens; bounds the mask of a chunk behind a long prefix


class ReferenceAttention:
    """Attention of one step: call it with q and the cache of each layer. Implements `PagedAttention`."""

    def __init__(self, batch: Batch, heads: Heads) -> None:
        lengths = np.diff(batch.starts)
        decode = np.flatnonzero(lengths == 1)
        self._heads = heads
        self._groups = [_DecodeGroup(batch, heads, rows) for rows in _by_length(decode, batch.contexts)]
        self._chunks = [_PrefillChunk(batch, heads, int(row)) for row in np.flatnonzero(lengths > 1)]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, heads, head_dim]; k, v [blocks, page_size, kv_heads, head_dim]. Returns [n, heads * head_dim]."""
        k, v = k.view(-1, self._heads.dim), v.view(-1, self._heads.dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.tokens] = group.attend(q[group.tokens], k, v)
        for chunk in self._chunks:
            chunk.attend(q, k, v, out)
        return out.view(len(q), -1)


class _DecodeGroup:
    """Rows of one query token each: `tokens` are their places in the batch, r of them, l the longest context."""

    def __init__(self, batch: Batch, heads: Heads, rows: NDArray[np.int64]) -> None:
        device = batch.tokens.device
        contexts = torch.from_numpy(batch.contexts[rows]).to(device)
        first, last = int(batch.starts[rows[0]]), int(batch.starts[rows[-1]])
        contiguous = last - first + 1 == len(rows)
        self.tokens: slice | Tensor = (
            slice(first, last + 1) if contiguous else torch.from_numpy(batch.starts[rows]).to(device)
        )
        self._heads = heads
        span = torch.arange(int(batch.contexts[rows].max()), device=device)
        positions = torch.minimum(span, contexts[:, None] - 1)
        table = batch.block_table[torch.from_numpy(rows).to(device)]
        self._index = _kv_rows(table, positions, batch.page_size, heads.kv).flatten()
        mask = torch.zeros(len(rows), len(span), device=device).masked_fill_(span >= contexts[:, None], -torch.inf)
        self._mask = mask.repeat_interleave(heads.kv, dim=0)[:, None]  # [r * kv_heads, 1, l]

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

    def __init__(self, batch: Batch, heads: Heads, row: int) -> None:
        device = batch.tokens.device
        self._heads = heads
        self._start, self._stop = int(batch.starts[row]), int(batch.starts[row + 1])
        context = int(batch.contexts[row])
        span = torch.arange(context, device=device)
        self._index = _kv_rows(batch.block_table[row, None], span[None], batch.page_size, heads.kv).flatten()
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


def _kv_rows(table: Tensor, positions: Tensor, page_size: int, kv_heads: int) -> Tensor:
    """Rows of the cache seen as [kv slots * kv_heads, head_dim] for each position of each sequence.

    table [r, blocks], positions [r, l]. Returns int64 [r, kv_heads, l].
    """
    slots = table.gather(1, positions // page_size).long() * page_size + positions % page_size
    return slots[:, None, :] * kv_heads + torch.arange(kv_heads, device=table.device)[:, None]
