"""From a plan's rows to the inputs of the graph, by tensor operations over the slot tables."""

from __future__ import annotations

import numpy as np
import torch

from corellm.comms.messages import StepPlan
from corellm.kernels.inputs import Batch
from corellm.worker.slots import SlotTables


def build_batch(plan: StepPlan, tables: SlotTables) -> Batch:
    """Inputs for the rows of `plan`, which `tables` has applied but not yet advanced over."""
    row_slots, lengths = plan.row_slots.astype(np.int64), plan.row_tokens.astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    computed = tables.computed[row_slots]
    sampled = starts[1:][np.asarray(plan.row_samples, dtype=bool)] - 1
    total = int(starts[-1])
    rows = np.stack((row_slots, computed - starts[:-1], lengths))
    slots, shifts, counts = tables.upload(rows)  # one upload for all that the device needs to know of the rows
    row_of = torch.repeat_interleave(counts, output_size=total)
    positions = torch.arange(total, device=tables.device) + shifts[row_of]
    block_table = tables.block_table[slots]
    blocks = block_table[row_of, positions // tables.page_size].long()
    return Batch(
        tokens=tables.tokens[slots[row_of], positions],
        positions=positions,
        kv_slots=blocks * tables.page_size + positions % tables.page_size,
        block_table=block_table,
        sampled=tables.upload(sampled),
        starts=starts,
        contexts=computed + lengths,
        page_size=tables.page_size,
    )


def padding_batch(tokens: int, pad_block: int, page_size: int, device: torch.device) -> Batch:
    """One row of `tokens` tokens that reads and writes the padding block alone: to warm up with."""
    positions = torch.arange(tokens, device=device)
    blocks = -(-tokens // page_size)
    return Batch(
        tokens=torch.zeros(tokens, dtype=torch.int32, device=device),
        positions=positions,
        kv_slots=pad_block * page_size + positions % page_size,
        block_table=torch.full((1, blocks), pad_block, dtype=torch.int32, device=device),
        sampled=positions[-1:],
        starts=np.array([0, tokens]),
        contexts=np.array([tokens]),
        page_size=page_size,
    )
