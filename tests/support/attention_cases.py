"""Batches over blocks scattered at random, with NaN in all memory that no row owns, and their attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from corellm.kernels import Backend, PagedAttention
from corellm.kernels.inputs import Heads, Rows


@dataclass(frozen=True)
class AttentionCase:
    """q [n, heads, head_dim]; k and v [blocks, page_size, kv_heads, head_dim]; rows of (prefix, new tokens)."""

    rows: Rows
    block_table: torch.Tensor
    heads: Heads
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def make(
        cls,
        rows: list[tuple[int, int]],
        heads: Heads,
        page_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> AttentionCase:
        rng, generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
        contexts = np.array([prefix + new for prefix, new in rows])
        starts = np.concatenate(([0], np.cumsum([new for _, new in rows])))
        needed = -(-contexts // page_size)
        blocks = int(needed.sum()) + 3
        order = rng.permutation(blocks - 1)
        table = np.full((len(rows), int(needed.max()) + 1), blocks - 1, dtype=np.int32)
        owned = torch.zeros(blocks * page_size, dtype=torch.bool, device=device)
        used = 0
        for row, count in enumerate(needed):
            table[row, :count] = order[used : used + count]
            used += count
        case_table = torch.from_numpy(table).to(device)
        for row, context in enumerate(contexts):
            owned[_slots(case_table[row], int(context), page_size)] = True
        shape = (blocks * page_size, heads.kv, heads.dim)
        k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        k[~owned] = v[~owned] = torch.nan
        # Queries long enough that a few positions carry most of the weight, as in a model.
        q = 3 * torch.randn(int(starts[-1]), heads.count, heads.dim, generator=generator, device=device)
        paged = (blocks, page_size, heads.kv, heads.dim)
        rows_of_table = Rows(np.arange(len(rows)), starts, contexts)
        return cls(rows_of_table, case_table, heads, q.to(dtype), k.view(paged), v.view(paged))

    def truth(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """For each row, its tokens and their attention [t, heads, head_dim]: dense, head by head, in float64."""
        rows, heads = self.rows, self.heads
        for row, context in enumerate(rows.contexts):
            tokens = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
            slots = _slots(self.block_table[row], int(context), self.k.shape[1])
            q = self.q[tokens].double()
            out = torch.empty_like(q)
            span = torch.arange(int(context), device=q.device)
            hidden = span > span[len(span) - len(q) :, None]
            for head in range(heads.count):
                keys, values = (
                    cache.view(-1, heads.kv, heads.dim)[slots, head // heads.group].double()
                    for cache in (self.k, self.v)
                )
                scores = (q[:, head] @ keys.T / heads.dim**0.5).masked_fill_(hidden, -torch.inf)
                out[:, head] = scores.softmax(-1) @ values
            yield tokens, out

    def planned(self, backend: Backend, width: int | None = None) -> PagedAttention:
        plan = backend.plan_attention(self.rows, self.heads, self.k.shape[1], width)
        return plan.bind(torch.from_numpy(plan.words).to(self.q.device), self.block_table)

    def worst_error(self, backend: Backend) -> float:
        """Largest ‖out - truth‖ / ‖truth‖ over tokens and heads; NaN if any element is NaN."""
        attend = self.planned(backend)
        attend(self.q + 1, self.k, self.v)  # a plan serves every layer, and must keep nothing of the one before
        actual = attend(self.q, self.k, self.v).view(self.q.shape).double()
        errors = [((actual[tokens] - truth).norm(dim=-1) / truth.norm(dim=-1)).max() for tokens, truth in self.truth()]
        return float(torch.stack(errors).max())


def _slots(blocks: torch.Tensor, context: int, page_size: int) -> torch.Tensor:
    positions = torch.arange(context, device=blocks.device)
    return blocks[positions // page_size].long() * page_size + positions % page_size
