"""What a worker knows of every running sequence, by slot, between steps.

Tokens and block tables live on the device, so that a sampled token becomes the next step's input without passing
through the host. Lengths and sampling settings live on the host: they follow from the plans alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.comms.messages import Sampling, SlotOpen, StepPlan
from corellm.errors import ProtocolError

SETTINGS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("top_k", "i8"),
        ("seed", "i8"),
        ("min_tokens", "i8"),
        ("prompt_len", "i8"),
        ("logprobs", "i8"),  # -1: not asked for
        ("prompt_logprobs", "i8"),  # meant for the plan's score_rows alone
        ("biased", "?"),
    ]
)
"""Sampling settings of one slot."""

COLUMNS_ALIGNED = 4  # words: kernels are compiled for tables whose rows start at multiples of 16 bytes

Write = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Rows, columns and new values of some entries of `SlotTables.memory`, no entry twice."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Sampling settings that differ in length between slots."""

    stop_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]


class SlotTables:
    """State of `max_seqs` slots, and of one more, `spare`, that rows which only pad a batch read and write.

    `apply` brings the host's part up to a plan and says what to write into `memory`; `advance` counts what the plan
    computes.
    """

    def __init__(
        self,
        *,
        max_seqs: int,
        max_model_len: int,
        num_blocks: int,
        page_size: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.spare = max_seqs
        self._max_model_len = max_model_len
        self._blocks_at = _aligned(max_model_len + 1)  # rows that warm up sample a token past the longest
        width = self._blocks_at + _aligned(-(-max_model_len // page_size))
        self.memory = torch.zeros(max_seqs + 1, width, dtype=torch.int32, device=device)
        self.tokens = self.memory[:, : max_model_len + 1]
        self.block_table = self.memory[:, self._blocks_at :][:, : -(-max_model_len // page_size)]
        self.block_table.fill_(num_blocks)  # the padding block, until a slot gets blocks of its own
        self.computed = np.zeros(max_seqs, dtype=np.int64)  # tokens whose KV is in the cache
        self.settings = np.zeros(max_seqs, dtype=SETTINGS)
        self.lists: dict[int, TokenLists] = {}
        self._blocks = np.zeros(max_seqs, dtype=np.int64)  # filled entries of block_table
        self.vocab = vocab

    def apply(self, plan: StepPlan) -> Write:
        """Close, open and extend slots. Raises `ProtocolError` for a plan that does not fit the tables."""
        self._blocks[plan.closes] = 0
        writes = [
            write for opened in plan.opens for write in self._open(opened)
        ]  # each brings arrays of its own length
        writes += self._append(np.asarray(plan.append_slots), np.asarray(plan.append_blocks))
        self._check(plan)
        return _joined(writes)

    def advance(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """The KV of the next `counts` tokens of `slots` (no slot twice) is being written."""
        self.computed[slots] += counts

    def _open(self, opened: SlotOpen) -> Iterable[Write]:
        slot, length, blocks = opened.slot, len(opened.tokens), len(opened.blocks)
        if length > self._max_model_len or blocks > self.block_table.shape[1]:
            raise ProtocolError(
                f"slot {slot} opens with {length} tokens in {blocks} blocks; "
                f"there is room for {self._max_model_len} in {self.block_table.shape[1]}"
            )
        self._blocks[slot] = blocks
        self.computed[slot] = opened.computed
        self.settings[slot] = _settings(opened)
        self.lists[slot] = _token_lists(opened.sampling, self.vocab)
        yield np.full(length, slot, np.int32), np.arange(length, dtype=np.int32), opened.tokens
        yield np.full(blocks, slot, np.int32), np.arange(blocks, dtype=np.int32) + self._blocks_at, opened.blocks

    def _append(self, slots: NDArray[np.int32], blocks: NDArray[np.int32]) -> Iterable[Write]:
        """Extend block tables; a slot that occurs twice takes its blocks in the order given."""
        if not len(slots):
            return
        order = np.argsort(slots, kind="stable")
        slots, blocks = slots[order], blocks[order]
        columns = self._blocks[slots] + np.arange(len(slots)) - np.searchsorted(slots, slots)
        room = self.block_table.shape[1]
        if columns.max() >= room:
            raise ProtocolError(f"slot {slots[columns.argmax()]} is given more blocks than the {room} it has room for")
        np.add.at(self._blocks, slots, 1)
        yield slots, (columns + self._blocks_at).astype(np.int32), blocks

    def _check(self, plan: StepPlan) -> None:
        """A row past its blocks or its tokens would write into another sequence's memory."""
        slots, counts = plan.row_slots, plan.row_tokens
        after = self.computed[slots] + counts
        room = np.minimum(self._blocks[slots] * self.page_size, self._max_model_len - plan.row_samples)
        wrong = (counts < 1) | (after > room)
        if wrong.any():
            row = int(wrong.argmax())
            raise ProtocolError(
                f"step {plan.step} feeds {counts[row]} tokens to slot {slots[row]}, {after[row]} in all; "
                f"it may feed at least 1, and the slot has room for {room[row]}"
            )


def write(memory: Tensor, entries: Tensor) -> None:
    """Carry a `Write` out, its three arrays end to end on the device: [3 * entries]."""
    rows, columns, values = entries.view(3, -1)
    memory.index_put_((rows, columns), values)


def _aligned(columns: int) -> int:
    return -(-columns // COLUMNS_ALIGNED) * COLUMNS_ALIGNED


def _joined(writes: list[Write]) -> Write:
    if not writes:
        return (np.empty(0, np.int32),) * 3
    rows, columns, values = (np.concatenate(parts) for parts in zip(*writes, strict=True))
    return rows, columns, values


def _settings(opened: SlotOpen) -> tuple[float | int | bool, ...]:
    """One record of `SETTINGS`."""
    sampling = opened.sampling
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        max(sampling.top_k, 0),
        sampling.seed,
        sampling.min_tokens,
        opened.prompt_len,
        -1 if sampling.logprobs is None else sampling.logprobs,
        sampling.prompt_logprobs or 0,
        bool(sampling.bias_ids),
    )


def _token_lists(sampling: Sampling, vocab: int) -> TokenLists:
    """Ids outside the vocabulary have no logit to change, so they drop out here."""
    stop_ids = np.unique(np.asarray(sampling.stop_ids, dtype=np.int64))
    bias_ids = np.asarray(sampling.bias_ids, dtype=np.int64)
    bias_values = np.asarray(sampling.bias_values, dtype=np.float32)
    known = (bias_ids >= 0) & (bias_ids < vocab)
    return TokenLists(stop_ids[(stop_ids >= 0) & (stop_ids < vocab)], bias_ids[known], bias_values[known])
