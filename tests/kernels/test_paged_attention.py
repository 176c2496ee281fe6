"""Paged attention against dense attention written out in float64, with NaN in all memory that no row owns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corellm.kernels import load_backend, reference_attention
from corellm.kernels.inputs import Heads, Rows
from tests.support.executor_models import CPU

HEADS = Heads(count=6, kv=2, dim=8)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [t, heads, d] are the last t tokens of k, v [context, kv, d]; query by query, head by head, in float64."""
    tokens, context = len(q), len(k)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(tokens):
        visible = context - tokens + i + 1
        for head in range(HEADS.count):
            kv = head // HEADS.group
            scores = k[:visible, kv].double() @ q[i, head].double() / HEADS.dim**0.5
            out[i, head] = scores.softmax(0) @ v[:visible, kv].double()
    return out.flatten(1)


def check_rows(rows: list[tuple[int, int]], page_size: int, seed: int) -> None:
    """Attend `rows` of (prefix, new tokens) over blocks scattered at random, and compare each with `dense`."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    contexts = np.array([prefix + new for prefix, new in rows])
    needed = -(-contexts // page_size)
    total_blocks = int(needed.sum()) + 3
    order = rng.permutation(total_blocks).tolist()
    k, v = torch.full((2, total_blocks, page_size, HEADS.kv, HEADS.dim), torch.nan)
    table = torch.full((len(rows), int(needed.max()) + 1), total_blocks - 1, dtype=torch.int32)
    truth = []
    queries = []
    for row, (_, new) in enumerate(rows):
        blocks = [order.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks)
        keys, values = torch.randn(2, int(contexts[row]), HEADS.kv, HEADS.dim, generator=generator)
        for position in range(contexts[row]):
            k[blocks[position // page_size], position % page_size] = keys[position]
            v[blocks[position // page_size], position % page_size] = values[position]
        queries.append(torch.randn(new, HEADS.count, HEADS.dim, generator=generator))
        truth.append(dense(queries[-1], keys, values))
    starts = np.concatenate(([0], np.cumsum([new for _, new in rows])))
    slots = rng.permutation(len(rows))
    by_slot = torch.empty_like(table)
    by_slot[torch.from_numpy(slots)] = table
    plan = load_backend("reference", CPU, torch.float32).plan_attention(Rows(slots, starts, contexts), HEADS, page_size)
    attend = plan.bind(torch.from_numpy(plan.words), by_slot)
    for _ in range(2):  # a plan serves every layer
        actual = attend(torch.cat(queries), k, v)
        torch.testing.assert_close(actual.double(), torch.cat(truth), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 5, 17])), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 3, 4, 16]),
    seed=st.integers(0, 2**16),
)
def test_any_mix_equals_dense(rows: list[tuple[int, int]], page_size: int, seed: int) -> None:
    check_rows(rows, page_size, seed)


def test_many_groups_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_attention, "SHORTEST_GROUP", 4)
    monkeypatch.setattr(reference_attention, "QUERY_TILE", 4)
    check_rows([(0, 1), (30, 1), (9, 13), (3, 1), (63, 1), (0, 9), (17, 1), (5, 8)], 4, 0)


def test_groups_pad_at_most_twofold() -> None:
    contexts = np.array([1, 5000, 256, 257, 513, 4097, 300])
    groups = reference_attention._by_length(np.arange(7), contexts)
    assert sorted(np.concatenate(groups).tolist()) == list(range(7))
    for group in groups:
        assert contexts[group].max() <= 2 * max(contexts[group].min(), reference_attention.SHORTEST_GROUP / 2)
    assert reference_attention._by_length(np.arange(0), contexts) == []
