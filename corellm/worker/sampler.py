"""From logits to tokens, on rank 0.

Every row is sampled by `Backend.sample`, which knows temperature and seed and can be captured in a graph. Rows that ask
for more are drawn there at temperature 0, and then once more here: logit bias; penalties; `min_tokens`; grammar mask;
temperature, min-p, top-k, top-p and the seeded draw. This is vLLM's order. NaN check and log-probabilities are of the
raw logits. Which rows ask for what is known on the host, so that choosing them never waits for the device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from corellm.comms.codec import f32, i32
from corellm.comms.messages import StepPlan, TopLogprobs
from corellm.kernels import Backend
from corellm.kernels.reference_sampling import COLDEST
from corellm.worker.batch_inputs import StepRows
from corellm.worker.slots import SlotTables
from corellm.worker.transfers import Download, upload


class RawLogprobs:
    """Log-probabilities of the rows that asked, on their way to the host; each gets as many as the most asked for."""

    def __init__(self, backend: Backend, logits: Tensor, tokens: Tensor, rows: NDArray[np.int64], k: int) -> None:
        index = upload(rows, logits.device)
        self._rows, self._k = rows, k
        self._download = Download(*backend.top_logprobs(logits[index], tokens[index], k))

    def message(self) -> TopLogprobs:
        """What a result says of them."""
        sampled, ids, values = self._download.arrays()
        return TopLogprobs(
            rows=i32(self._rows), sampled=f32(sampled), k=self._k, ids=i32(ids.ravel()), values=f32(values.ravel())
        )


class StepSampling:
    """How the sampling rows of one step are sampled, as the host knows it."""

    def __init__(self, plan: StepPlan, rows: StepRows, tables: SlotTables) -> None:
        self._tables, self._rows = tables, rows
        settings = self._settings = tables.settings[rows.slots]
        self._truncated = (settings["top_k"] > 0) | (settings["top_p"] < 1) | (settings["min_p"] > 0)
        self._truncated &= settings["temperature"] >= COLDEST
        self._penalized = (settings["repetition"] != 1) | (settings["presence"] != 0) | (settings["frequency"] != 0)
        self._held = rows.positions - settings["prompt_len"] < settings["min_tokens"]
        special = self._truncated | self._penalized | self._held | settings["biased"]
        special[plan.mask_rows] = True
        self.special = np.flatnonzero(special)
        self.temperatures = np.where(special, np.float32(0), settings["temperature"])  # as `Backend.sample` is told
        self._masked = np.searchsorted(self.special, np.asarray(plan.mask_rows))  # among the special rows
        self._masks = np.array(plan.masks).reshape(-1, -(-tables.vocab // 32))
        self.seeds: NDArray[np.int64] = settings["seed"]

    def draw_special(self, backend: Backend, logits: Tensor) -> Tensor:
        """Tokens int64 [m] of the special rows of raw logits [s, v]."""
        rows, device = self.special, logits.device
        settings = self._settings[rows]
        edited = logits[upload(rows, device)].float()
        self._bias(edited)
        edited = self._penalize(backend, edited)
        self._forbid_stops(edited)
        self._mask(backend, edited)
        temperatures = settings["temperature"]
        warm = temperatures >= COLDEST
        edited = edited / upload(np.where(warm, temperatures, np.float32(1)), device)[:, None]
        if (truncated := self._truncated[rows]).any():
            top_k = np.where(truncated, settings["top_k"], 0)
            top_p = np.where(truncated, settings["top_p"], np.float32(1))
            min_p = np.where(truncated, settings["min_p"], np.float32(0))
            edited = backend.mask_unlikely(edited, *(upload(limit, device) for limit in (top_k, top_p, min_p)))
        heat, seeds = upload(warm.astype(np.float32), device), upload(settings["seed"].copy(), device)
        tokens, _ = backend.sample(edited, heat, seeds, upload(self._rows.positions[rows], device))
        return tokens

    def logprobs(self, backend: Backend, logits: Tensor, tokens: Tensor) -> RawLogprobs | None:
        """Of the rows that asked, given every row's token [s]."""
        asked = self._settings["logprobs"]
        rows = np.flatnonzero(asked >= 0)
        return RawLogprobs(backend, logits, tokens, rows, int(asked.max())) if len(rows) else None

    def _bias(self, logits: Tensor) -> None:
        chosen = np.flatnonzero(self._settings["biased"][self.special])
        if len(chosen):
            lists = [self._tables.lists[slot] for slot in self._rows.slots[self.special[chosen]]]
            index = self._pairs(chosen, [entry.bias_ids for entry in lists])
            values = upload(np.concatenate([entry.bias_values for entry in lists]), logits.device)
            logits.index_put_(index, values, accumulate=True)

    def _penalize(self, backend: Backend, logits: Tensor) -> Tensor:
        if not self._penalized[self.special].any():
            return logits
        settings, device = self._settings[self.special], logits.device
        return backend.penalize(
            logits,
            self._tables.tokens,
            upload(self._rows.slots[self.special], device),
            upload(self._rows.positions[self.special], device),
            upload(settings["prompt_len"].copy(), device),
            upload(np.stack([settings["repetition"], settings["presence"], settings["frequency"]]), device),
        )

    def _forbid_stops(self, logits: Tensor) -> None:
        chosen = np.flatnonzero(self._held[self.special])
        if len(chosen):
            stops = [self._tables.lists[slot].stop_ids for slot in self._rows.slots[self.special[chosen]]]
            logits.index_put_(self._pairs(chosen, stops), logits.new_full((), -np.inf))  # a scalar would come by a wait

    def _mask(self, backend: Backend, logits: Tensor) -> None:
        if len(self._masked):
            index, masks = upload(self._masked, logits.device), upload(self._masks, logits.device)
            logits[index] = backend.apply_bitmask(logits[index], masks)

    def _pairs(self, rows: NDArray[np.int64], ids: list[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Index of every (row, id) where row `rows[i]` names the ids `ids[i]`."""
        device = self._tables.device
        return upload(np.repeat(rows, [len(entry) for entry in ids]), device), upload(np.concatenate(ids), device)
