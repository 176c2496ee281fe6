"""What a worker knows of every running sequence, by slot, between steps.

Tokens and block tables live on the device, so that a sampled token becomes the next step's input without passing
through the host. Lengths and sampling settings live on the host: they follow from the plans alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
        ("biased", "?"),
    ]
)
"""Sampling settings of one slot."""


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Sampling settings that differ in length between slots."""

    stop_ids: NDArray[np.int64]
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]


class SlotTables:
    """State of `max_seqs` slots. `apply` brings it up to a plan; `advance` counts what the plan computes."""

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
        blocks = -(-max_model_len // page_size)
        self.tokens = torch.zeros(max_seqs, max_model_len, dtype=torch.int32, device=device)
        self.block_table = torch.full((max_seqs, blocks), num_blocks, dtype=torch.int32, device=device)
        self.computed = np.zeros(max_seqs, dtype=np.int64)  # tokens whose KV is in the cache
        self.settings = np.zeros(max_seqs, dtype=SETTINGS)
        self.lists: dict[int, TokenLists] = {}
        self._blocks = np.zeros(max_seqs, dtype=np.int64)  # filled entries of block_table
        self._num_blocks = num_blocks
        self._vocab = vocab

    def apply(self, plan: StepPlan) -> None:
        """Close, open and extend slots. Raises `ProtocolError` for a plan that does not fit the tables."""
        self._blocks[plan.closes] = 0
        for opened in plan.opens:  # per row, since each brings arrays of its own length
            self._open(opened)
        self._append(np.asarray(plan.append_slots), np.asarray(plan.append_blocks))
        self._check(plan)

    def advance(self, slots: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """The KV of the next `counts` tokens of `slots` (no slot twice) is being written."""
        self.computed[slots] += counts

    def upload(self, values: NDArray[np.generic]) -> torch.Tensor:
        """A host array on the device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _open(self, opened: SlotOpen) -> None:
        slot, length, blocks = opened.slot, len(opened.tokens), len(opened.blocks)
        if length > self.tokens.shape[1] or blocks > self.block_table.shape[1]:
            raise ProtocolError(
                f"slot {slot} opens with {length} tokens in {blocks} blocks; "
                f"there is room for {self.tokens.shape[1]} in {self.block_table.shape[1]}"
            )
        # Arrays of a message are read-only views of its frame, which torch does not take.
        self.tokens[slot, :length] = self.upload(np.array(opened.tokens))
        self.block_table[slot, :blocks] = self.upload(np.array(opened.blocks))
        self._blocks[slot] = blocks
        self.computed[slot] = opened.computed
        self.settings[slot] = _settings(opened)
        self.lists[slot] = _token_lists(opened.sampling, self._vocab)

    def _append(self, slots: NDArray[np.int32], blocks: NDArray[np.int32]) -> None:
        """Extend block tables; a slot that occurs twice takes its blocks in the order given."""
        if not len(slots):
            return
        order = np.argsort(slots, kind="stable")
        slots, blocks = slots[order].astype(np.int64), blocks[order].copy()
        columns = self._blocks[slots] + np.arange(len(slots)) - np.searchsorted(slots, slots)
        room = self.block_table.shape[1]
        if columns.max() >= room:
            raise ProtocolError(f"slot {slots[columns.argmax()]} is given more blocks than the {room} it has room for")
        self.block_table[self.upload(slots), self.upload(columns)] = self.upload(blocks)
        np.add.at(self._blocks, slots, 1)

    def _check(self, plan: StepPlan) -> None:
        """A row past its blocks or its tokens would write into another sequence's memory."""
        slots, counts = plan.row_slots, plan.row_tokens
        after = self.computed[slots] + counts
        room = np.minimum(self._blocks[slots] * self.page_size, self.tokens.shape[1] - plan.row_samples)
        wrong = (counts < 1) | (after > room)
        if wrong.any():
            row = int(wrong.argmax())
            raise ProtocolError(
                f"step {plan.step} feeds {counts[row]} tokens to slot {slots[row]}, {after[row]} in all; "
                f"it may feed at least 1, and the slot has room for {room[row]}"
            )


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
        bool(sampling.bias_ids),
    )


def _token_lists(sampling: Sampling, vocab: int) -> TokenLists:
    """Ids outside the vocabulary have no logit to change, so they drop out here."""
    stop_ids = np.unique(np.asarray(sampling.stop_ids, dtype=np.int64))
    bias_ids = np.asarray(sampling.bias_ids, dtype=np.int64)
    bias_values = np.asarray(sampling.bias_values, dtype=np.float32)
    known = (bias_ids >= 0) & (bias_ids < vocab)
    return TokenLists(stop_ids[(stop_ids >= 0) & (stop_ids < vocab)], bias_ids[known], bias_values[known])
