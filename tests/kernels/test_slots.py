"""Slot tables and the inputs built from them, against plain Python over the same plans."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corellm.comms.codec import i32
from corellm.comms.messages import Sampling, SlotOpen, StepPlan
from corellm.errors import ProtocolError
from corellm.kernels import load_backend
from corellm.worker.batch_inputs import Layout, StepRows, device_inputs
from corellm.worker.slots import SlotTables, write
from tests.support.executor_models import CPU

BACKEND = load_backend("reference", CPU, torch.float32)


def make_tables() -> SlotTables:
    return SlotTables(max_seqs=8, max_model_len=40, num_blocks=99, page_size=4, vocab=50, device=CPU)


def apply(tables: SlotTables, plan: StepPlan) -> None:
    """As the executor does: what the host decides is written on the device."""
    write(tables.memory, torch.from_numpy(np.concatenate(tables.apply(plan))))


def opened(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> SlotOpen:
    return SlotOpen(
        slot=slot,
        tokens=i32(tokens),
        prompt_len=len(tokens),
        computed=computed,
        blocks=i32(blocks),
        sampling=Sampling(max_tokens=5),
    )


def plan(
    opens: list[SlotOpen] | None = None,
    closes: list[int] | None = None,
    appends: list[tuple[int, int]] | None = None,
    rows: list[tuple[int, int, int]] | None = None,
) -> StepPlan:
    slots, blocks = zip(*appends, strict=True) if appends else ((), ())
    row_slots, row_tokens, row_samples = zip(*rows, strict=True) if rows else ((), (), ())
    return StepPlan(
        step=4,
        closes=i32(closes or []),
        opens=opens or [],
        append_slots=i32(slots),
        append_blocks=i32(blocks),
        row_slots=i32(row_slots),
        row_tokens=i32(row_tokens),
        row_samples=i32(row_samples),
    )


def test_blocks_of_one_slot_are_appended_in_the_order_given() -> None:
    tables = make_tables()
    apply(tables, plan([opened(6, [1] * 5, [70, 71]), opened(1, [2], [9])]))
    apply(tables, plan(appends=[(6, 30), (1, 50), (6, 20), (6, 40), (1, 8)]))
    apply(tables, plan(appends=[(1, 3)]))
    assert tables.block_table[6, :6].tolist() == [70, 71, 30, 20, 40, 99]
    assert tables.block_table[1, :5].tolist() == [9, 50, 8, 3, 99]


def test_a_slot_closes_before_it_opens_again() -> None:
    tables = make_tables()
    apply(tables, plan([opened(2, [1, 2, 3, 4, 5], [10, 11])]))
    apply(tables, plan([opened(2, [7, 8], [30], computed=1)], closes=[2], appends=[(2, 31)]))
    assert tables.block_table[2, :2].tolist() == [30, 31]
    assert tables.computed[2] == 1


def test_inputs_of_mixed_rows() -> None:
    tables = make_tables()
    apply(tables, plan([opened(5, list(range(20, 30)), [7, 3, 8], computed=3), opened(0, [41, 42], [60])]))
    mixed = plan(rows=[(5, 6, 0), (0, 2, 1)])
    apply(tables, mixed)
    step = StepRows.of(mixed, tables)
    assert step.rows.starts.tolist() == [0, 6, 8]
    assert step.rows.contexts.tolist() == [9, 2]
    for spread in (0, 5):  # words that fit the step, and a layout with room to spare
        layout = Layout(8 + spread, 1 + spread, 3)
        words = step.words(layout, i32([4, 5, 6]), np.float32([0.5]), np.array([-7]), tables.spare)
        batch, sampled, attention = device_inputs(torch.from_numpy(words), layout, tables, BACKEND)
        assert batch.tokens.tolist() == [23, 24, 25, 26, 27, 28, 41, 42] + [0] * spread
        assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 0, 1] + [0] * spread
        assert batch.kv_slots.tolist() == [7 * 4 + 3, 12, 13, 14, 15, 32, 240, 241] + [99 * 4] * spread
        assert batch.sampled[0] == 7
        assert sampled.slots.tolist() == [0] + [tables.spare] * spread
        assert sampled.positions.tolist() == [2] + [1] * spread
        assert (sampled.temperatures[0], sampled.seeds[0]) == (0.5, -7)
        assert attention.tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan([opened(0, [1] * 41, [1])]), "slot 0 opens with 41 tokens in 1 blocks; there is room for 40 in 10"),
        (plan([opened(0, [1], list(range(11)))]), "slot 0 opens with 1 tokens in 11 blocks"),
        (plan(appends=[(3, 1)] * 9), "slot 3 is given more blocks than the 10 it has room for"),
        (plan(rows=[(3, 5, 0)]), "feeds 5 tokens to slot 3, 9 in all; .* room for 8"),
        (plan(rows=[(3, 0, 0)]), "feeds 0 tokens to slot 3"),
        (plan(closes=[3], rows=[(3, 1, 1)]), "feeds 1 tokens to slot 3, 5 in all; .* room for 0"),
        (plan(rows=[(7, 1, 1)]), "feeds 1 tokens to slot 7, 1 in all; .* room for 0"),
    ],
)
def test_plans_that_do_not_fit_are_refused(wrong: StepPlan, message: str) -> None:
    tables = make_tables()
    apply(tables, plan([opened(3, [1] * 4, [20, 21], computed=4)]))
    with pytest.raises(ProtocolError, match=message):
        tables.apply(wrong)


def test_ids_outside_the_vocabulary_are_dropped() -> None:
    tables = make_tables()
    sampling = Sampling(max_tokens=5, stop_ids=(49, 50, 3), bias_ids=(60, 7), bias_values=(1.0, 2.0))
    apply(
        tables, plan([SlotOpen(slot=1, tokens=i32([1]), prompt_len=1, computed=0, blocks=i32([1]), sampling=sampling)])
    )
    lists = tables.lists[1]
    assert lists.stop_ids.tolist() == [3, 49]
    assert (lists.bias_ids.tolist(), lists.bias_values.tolist()) == ([7], [2.0])
    assert lists.bias_values.dtype == np.float32
