"""The Hopper prefill kernel against float64: ragged lengths, prefixes, page sizes, split KV, poisoned memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from corellm.kernels.attention_work import plan_work
from corellm.kernels.hopper_prefill import TILE, HopperPrefill, supports
from corellm.kernels.inputs import Heads
from tests.support.attention_cases import AttentionCase

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

ERROR = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}  # of the worst token and head
LLAMA_8B = Heads(32, 8, 128)


def worst_error(
    rows: list[tuple[int, int]], heads: Heads, page_size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> float:
    from corellm.kernels.triton_attention import merge_partials_kernel

    if not supports(heads, dtype, page_size, torch.cuda.get_device_capability()):
        pytest.skip("not a Hopper card, or another release of Triton")
    case = AttentionCase.make(rows, heads, page_size, dtype=dtype, device="cuda", seed=seed)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    work = plan_work(
        case.rows,
        np.arange(len(rows)),
        tokens_per_tile=TILE.block_m // heads.group,
        tile=TILE,
        programs=max(1, sms // heads.kv),
    )
    parts = (max(work.slots, 1), heads.kv, TILE.block_m)
    partials, stats = torch.full((*parts, heads.dim), torch.nan, device="cuda"), torch.full(parts, torch.nan).cuda()
    out = torch.full((len(case.q), heads.count * heads.dim), torch.nan, dtype=dtype, device="cuda")
    items, merges = (torch.from_numpy(x).cuda() for x in (work.items, work.merges()))
    counts = torch.tensor([len(items), len(merges)], dtype=torch.int32, device="cuda")
    prefill = HopperPrefill(heads, page_size, sms)
    prefill.run(case.q, case.k, case.v, out, items, counts, case.block_table, partials, stats)
    if len(merges):
        merge_partials_kernel[(len(merges) * heads.count,)](
            partials, stats, out, merges, counts,
            HEADS=heads.count, KV_HEADS=heads.kv, DIM=heads.dim, BLOCK_M=TILE.block_m, PDL=False, num_warps=2,
        )  # fmt: skip
    actual = out.view(case.q.shape).double()
    errors = [((actual[tokens] - truth).norm(dim=-1) / truth.norm(dim=-1)).max() for tokens, truth in case.truth()]
    return float(torch.stack(errors).max())


@pytest.mark.parametrize(
    "rows", [[(0, 1)], [(0, 2)], [(64, 1)], [(0, 65)], [(128, 1)], [(300, 20)], [(0, 300)]], ids=str
)
def test_one_short_row(rows: list[tuple[int, int]]) -> None:
    """From one token and position to the first second box, tile and unit: where a fault shows first."""
    assert worst_error(rows, LLAMA_8B, 64) < ERROR[torch.bfloat16]


@pytest.mark.parametrize("page_size", [64, 128, 256])
def test_ragged_mix(page_size: int) -> None:
    rng = random.Random(page_size)
    new = [5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 200, 300, 1000]
    rows = [(rng.choice([0, 1, 15, 63, 64, 65, rng.randrange(3000)]), count) for count in rng.sample(new, len(new))]
    assert worst_error(rows, LLAMA_8B, page_size, seed=page_size) < ERROR[torch.bfloat16]


@pytest.mark.parametrize("heads", [Heads(8, 8, 128), Heads(16, 8, 128), Heads(64, 8, 128), Heads(16, 1, 128)], ids=str)
def test_groups_of_other_sizes(heads: Heads) -> None:
    assert worst_error([(0, 200), (500, 70), (3, 9)], heads, 64) < ERROR[torch.bfloat16]


@pytest.mark.parametrize("rows", [[(8192, 16)], [(32640, 128)], [(131056, 16)], [(9000, 16), (1, 40)]], ids=str)
def test_short_suffix_on_a_long_prefix(rows: list[tuple[int, int]]) -> None:
    assert worst_error(rows, LLAMA_8B, 64) < ERROR[torch.bfloat16]


def test_float16() -> None:
    assert worst_error([(100, 150), (0, 40)], LLAMA_8B, 64, torch.float16) < ERROR[torch.float16]


def test_many_units() -> None:
    assert worst_error([(0, 2048), (1000, 1500), (0, 700)], LLAMA_8B, 64) < ERROR[torch.bfloat16]
