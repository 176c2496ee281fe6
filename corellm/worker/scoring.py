"""Log-probabilities of prompt tokens, for the rows of a step whose requests ask for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from corellm.comms.codec import f32, i32
from corellm.comms.messages import PromptLogprobs, StepPlan
from corellm.kernels import Backend
from corellm.worker.batch_inputs import StepRows
from corellm.worker.slots import SlotTables
from corellm.worker.transfers import Download

AT_ONCE = 256  # tokens: logits of a whole prompt might not fit beside the cache


class RowScores:
    """Scores of the prompt tokens from position `first` on, on their way to the host."""

    def __init__(self, row: int, first: int, k: int, parts: list[tuple[Tensor, ...]]) -> None:
        self._row, self._first, self._k = row, first, k
        self._download = Download(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def message(self) -> tuple[int, PromptLogprobs]:
        """The number of the row in its plan, and what a result says of it."""
        arrays = self._download.arrays()
        logprobs, ids, values, ranks = arrays if arrays else [np.empty(0)] * 4
        return self._row, PromptLogprobs(
            first=self._first,
            logprobs=f32(logprobs),
            ranks=i32(ranks),
            k=self._k,
            top_ids=i32(ids.ravel()),
            top_logprobs=f32(values.ravel()),
        )


def score_prompts(
    plan: StepPlan, rows: StepRows, tables: SlotTables, backend: Backend, hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor | None],
) -> list[RowScores]:  # fmt: skip
    """Score the plan's `score_rows`.

    hidden [n, hidden]: of every token of the step. logits_of: from some of these to logits [m, v], on every rank at
    once; None on all ranks but the first, which leaves theirs empty.
    """
    found = []
    for row in plan.score_rows.tolist():
        slot, start = int(rows.rows.slots[row]), int(rows.rows.starts[row])
        settings, context = tables.settings[slot], int(rows.rows.contexts[row])
        first = context - int(rows.rows.starts[row + 1]) + start + 1
        stop = min(context, int(settings["prompt_len"]) - 1) + 1
        k, parts = int(settings["prompt_logprobs"]), []
        for at in range(first, stop, AT_ONCE):
            end = min(at + AT_ONCE, stop)
            shift = start - first  # position p is predicted by token start + p - first of the step
            logits = logits_of(hidden[shift + at : shift + end])
            if logits is not None:
                parts.append(_scores(backend, logits, tables.tokens[slot, at:end].long(), k))
        found.append(RowScores(row, first, k, parts))
    return found


def _scores(backend: Backend, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
    """Log-probability of each token [m], the k likeliest ids and theirs [m, k], and each token's rank [m]."""
    ranks = (logits >= logits.gather(1, tokens[:, None])).sum(-1)
    return (*backend.top_logprobs(logits, tokens, k), ranks)
