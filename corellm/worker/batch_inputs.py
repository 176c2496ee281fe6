"""From a plan's rows to the inputs of the graph: one array of words, uploaded whole, and tensor operations over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.comms.messages import StepPlan
from corellm.kernels import Backend
from corellm.kernels.inputs import Batch, Rows
from corellm.worker.slots import SlotTables

ALIGNED = 4  # words: each part starts at a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """How the words (int32) of a step are shared out: n tokens, s sampling rows, and what attention asks for.

    A captured graph reads a layout of its own, wider than most steps it runs; what a step leaves over is padding.
    """

    tokens: int
    sampled: int
    attention: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of slots, positions, sampled, temperatures, seeds, attention."""
        return (self.tokens, self.tokens, self.sampled, self.sampled, 2 * self.sampled, self.attention)

    @property
    def words(self) -> int:
        return sum(_aligned(size) for size in self.sizes)

    @property
    def parts(self) -> Iterator[slice]:
        """Where the parts lie, in the order of `sizes`."""
        at = 0
        for size in self.sizes:
            yield slice(at, at + size)
            at += _aligned(size)


@dataclass(frozen=True, slots=True)
class StepRows:
    """What the host knows of a step's rows."""

    rows: Rows
    sampling: NDArray[np.int64]  # [s] rows that sample
    slots: NDArray[np.int64]  # [s] of these
    positions: NDArray[np.int64]  # [s] of the token that each samples, which is also how many it knows

    @classmethod
    def of(cls, plan: StepPlan, tables: SlotTables) -> StepRows:
        """Rows of `plan`, which `tables` has applied but not yet advanced over."""
        slots, counts = plan.row_slots.astype(np.int64), plan.row_tokens.astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        contexts = tables.computed[slots] + counts
        sampling = np.flatnonzero(plan.row_samples)
        return cls(Rows(slots, starts, contexts), sampling, slots[sampling], contexts[sampling])

    @property
    def tokens(self) -> int:
        return int(self.rows.starts[-1])

    @property
    def decodes(self) -> bool:
        """Whether there are rows, each feeds one token, and each samples."""
        return 0 < self.tokens == len(self.rows.slots) == len(self.sampling)

    def words(
        self, layout: Layout, attention: NDArray[np.int32], temperatures: NDArray[np.float32], seeds: NDArray[np.int64],
        spare: int,
    ) -> NDArray[np.int32]:  # fmt: skip
        """The words of this step; temperatures and seeds are of its sampling rows, `spare` is the slot that pads."""
        rows, count, sampled = self.rows, self.tokens, len(self.sampling)
        words = np.zeros(layout.words, dtype=np.int32)
        slots, positions, indices, heat, seed, work = (words[part] for part in layout.parts)
        lengths = np.diff(rows.starts)
        slots[:count] = np.repeat(rows.slots, lengths)
        slots[count:] = spare
        positions[:count] = np.arange(count) + np.repeat(rows.contexts - rows.starts[1:], lengths)
        indices[:sampled] = rows.starts[1:][self.sampling] - 1
        indices[sampled:] = layout.tokens - 1  # of a padding token: only a layout wider than the step has such rows
        heat[:sampled] = temperatures.astype(np.float32).view(np.int32)
        seed[: 2 * sampled] = seeds.astype(np.int64).view(np.int32)
        work[: len(attention)] = attention
        return words


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The s sampling rows of a step on the device."""

    slots: Tensor  # [s] int32
    positions: Tensor  # [s] int64 of the token that each samples
    temperatures: Tensor  # [s] float32
    seeds: Tensor  # [s] int64


def device_inputs(
    words: Tensor, layout: Layout, tables: SlotTables, backend: Backend
) -> tuple[Batch, SampledRows, Tensor]:
    """What the graph reads, who samples, and the words for attention, from the words of a step on the device."""
    slots, positions, sampled, heat, seeds, attention = (words[part] for part in layout.parts)
    sampled = sampled.long()
    located = backend.locate(slots, positions, tables.tokens, tables.block_table, tables.page_size)
    batch = Batch(*located, sampled)
    rows = SampledRows(
        slots=slots[sampled],
        positions=batch.positions[sampled] + 1,
        temperatures=heat.view(torch.float32),
        seeds=seeds.view(torch.int64),
    )
    return batch, rows, attention


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
