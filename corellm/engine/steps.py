"""A step on its way: the plan in the making, what is kept of it while it runs, and what its result brought."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from corellm.comms.codec import f32, i32
from corellm.comms.messages import I32, PromptLogprobs, SlotOpen, StepPlan, TopLogprobs
from corellm.engine.sequence import Sequence, State
from corellm.errors import ProtocolError


class Draft:
    """A plan in the making. `budget` is how many more tokens it may have.

    Tokens of the batch class have a budget of their own within it. They are counted in `batch_tokens`, those of
    interactive prompts in `prompt_tokens`.

    `sampling` lists the sequences of its sampling rows, `scoring` those whose row brings log-probabilities of their
    prompt, by the row's index.
    """

    __slots__ = (
        "append_blocks", "append_slots", "batch_budget", "batch_tokens", "budget", "counts", "mask_rows", "masks",
        "opens", "prompt_tokens", "samples", "sampling", "scoring", "slots", "step",
    )  # fmt: skip

    def __init__(self, step: int, budget: int, batch_budget: int) -> None:
        self.step = step
        self.budget = budget
        self.batch_budget = batch_budget
        self.batch_tokens = 0
        self.prompt_tokens = 0
        self.opens: list[SlotOpen] = []
        self.append_slots: list[int] = []
        self.append_blocks: list[int] = []
        self.slots: list[int] = []
        self.counts: list[int] = []
        self.samples: list[int] = []
        self.mask_rows: list[int] = []
        self.masks: list[I32] = []
        self.sampling: list[Sequence] = []
        self.scoring: dict[int, Sequence] = {}

    def room(self, sequence: Sequence) -> int:
        """How many tokens of this sequence the step may still have."""
        return min(self.budget, self.batch_budget - self.batch_tokens) if sequence.is_batch else self.budget

    def spend(self, sequence: Sequence, count: int) -> None:
        """Account for `count` tokens that are fed to a sequence."""
        self.budget -= count
        if sequence.is_batch:
            self.batch_tokens += count
        else:
            self.prompt_tokens += count

    def sample(self, sequence: Sequence) -> None:
        """The row being planned samples; a constrained sequence's mask goes with it, and the next one is awaited."""
        if sequence.mask is not None:
            self.mask_rows.append(len(self.sampling))
            self.masks.append(sequence.mask)
            sequence.mask, sequence.awaits_mask = None, True
        self.sampling.append(sequence)

    def plan(self, closes: list[int]) -> StepPlan:
        return StepPlan(
            step=self.step,
            closes=i32(closes),
            opens=self.opens,
            append_slots=i32(self.append_slots),
            append_blocks=i32(self.append_blocks),
            row_slots=i32(self.slots),
            row_tokens=i32(self.counts),
            row_samples=i32(self.samples),
            mask_rows=i32(self.mask_rows),
            masks=i32(np.concatenate(self.masks)) if self.masks else i32([]),
            score_rows=i32(list(self.scoring)),
        )


@dataclass(slots=True)
class Outcome:
    """What a result brought. Token i goes to `sequences[i]` as its output number `indices[i]`; `rows[i]` is its place
    among the sampling rows, by which log-probabilities are found."""

    step: int
    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    started: list[Sequence] = field(default_factory=list)  # those whose first token it brought
    constrained: list[tuple[Sequence, int]] = field(default_factory=list)  # with the token that a mask is to follow
    ended: list[Sequence] = field(default_factory=list)
    logprobs: TopLogprobs | None = None
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]] = field(default_factory=list)

    def score(self, sequence: Sequence | None, found: PromptLogprobs) -> None:
        """Take in log-probabilities of prompt tokens; what a recomputation after a preemption repeats is dropped.

        Raises `ProtocolError` when nobody asked for them, or when some before them are missing.
        """
        if sequence is not None and sequence.state is State.FINISHED:
            return  # it ended after the row was planned
        if sequence is None or found.first > sequence.scored:
            due = "none" if sequence is None else f"that at position {sequence.scored}"
            raise ProtocolError(
                f"step {self.step} brought log-probabilities from prompt position {found.first} on; due is {due}"
            )
        known, k = sequence.scored - found.first, found.k
        if known >= len(found.logprobs):
            return
        new = PromptLogprobs(
            first=sequence.scored,
            logprobs=f32(found.logprobs[known:]),
            ranks=i32(found.ranks[known:]),
            k=k,
            top_ids=i32(found.top_ids[known * k :]),
            top_logprobs=f32(found.top_logprobs[known * k :]),
        )
        sequence.scored = found.first + len(found.logprobs)
        self.prompt_logprobs.append((sequence, new))
