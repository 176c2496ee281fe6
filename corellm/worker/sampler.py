"""From logits to tokens, on rank 0.

For each row, in this order: NaN check and log-probabilities on the raw logits; logit bias; penalties; `min_tokens`;
then argmax at temperature 0, or temperature, min-p, top-k, top-p and a seeded draw. This is vLLM's order. Rows that do
not ask for a stage skip it: which ones do is known on the host, so that choosing them never waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.comms.codec import f32, i32
from corellm.comms.messages import TopLogprobs
from corellm.kernels import Backend
from corellm.worker.slots import SlotTables

COLDEST = 1e-5  # a lower temperature is greedy: dividing by it would leave the range of float32


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Natural-log probabilities, before any change to the logits, of the m rows that asked; k is the most asked for."""

    rows: NDArray[np.int64]  # [m] index into the sampling rows
    values: Tensor  # [m, v]
    k: int

    def of(self, tokens: Tensor) -> TopLogprobs:
        """What a result says of them, given every row's sampled token [s]."""
        sampled = self.values.gather(1, tokens[torch.from_numpy(self.rows)][:, None])
        top = self.values.topk(self.k, dim=-1)
        return TopLogprobs(
            rows=i32(self.rows),
            sampled=f32(sampled[:, 0].cpu()),
            k=self.k,
            ids=i32(top.indices.flatten().cpu()),
            values=f32(top.values.flatten().cpu()),
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of the s sampling rows."""

    tokens: Tensor  # [s] int64; 0 where failed
    failed: Tensor  # [s] bool: the row's logits hold NaN or infinity
    logprobs: RawLogprobs | None


class Sampler:
    """Samples rows of logits by the settings in the slot tables."""

    def __init__(self, backend: Backend, tables: SlotTables) -> None:
        self._backend = backend
        self._tables = tables

    def sample(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Sampled:
        """One token for each row of logits [s, v], which may be overwritten.

        slots [s]: whose row it is. positions [s]: of the new token, which is also how many tokens are known.
        """
        settings = self._tables.settings[slots]
        logits = logits.float()
        failed = self._backend.non_finite(logits)
        logprobs = _raw_logprobs(logits, settings)
        self._bias(logits, slots, settings)
        self._penalize(logits, slots, positions, settings)
        self._forbid_stops(logits, slots, positions, settings)
        tokens = self._choose(logits, positions, settings)
        return Sampled(tokens.masked_fill_(failed, 0), failed, logprobs)

    def _bias(self, logits: Tensor, slots: NDArray[np.int64], settings: NDArray[np.void]) -> None:
        rows = np.flatnonzero(settings["biased"])
        if len(rows):
            lists = [self._tables.lists[slot] for slot in slots[rows]]  # few rows, each of its own length
            index = self._pairs(rows, [entry.bias_ids for entry in lists])
            values = self._tables.upload(np.concatenate([entry.bias_values for entry in lists]))
            logits.index_put_(index, values, accumulate=True)

    def _penalize(
        self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64], settings: NDArray[np.void]
    ) -> None:
        wanted = (settings["repetition"] != 1) | (settings["presence"] != 0) | (settings["frequency"] != 0)
        rows = np.flatnonzero(wanted)
        if not len(rows):
            return
        upload, asked, lengths = self._tables.upload, settings[rows], positions[rows]
        index = upload(rows)
        logits[index] = self._backend.penalize(
            logits[index],
            self._tables.tokens[upload(slots[rows]), : int(lengths.max())],
            upload(lengths),
            upload(asked["prompt_len"].copy()),
            upload(np.stack([asked["repetition"], asked["presence"], asked["frequency"]])),
        )

    def _forbid_stops(
        self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64], settings: NDArray[np.void]
    ) -> None:
        rows = np.flatnonzero(positions - settings["prompt_len"] < settings["min_tokens"])
        if len(rows):
            stops = [self._tables.lists[slot].stop_ids for slot in slots[rows]]  # few rows, each of its own length
            logits[self._pairs(rows, stops)] = -torch.inf

    def _choose(self, logits: Tensor, positions: NDArray[np.int64], settings: NDArray[np.void]) -> Tensor:
        rows = np.flatnonzero(settings["temperature"] >= COLDEST)
        if not len(rows):
            return logits.argmax(-1)
        if len(rows) == len(settings):
            return self._draw(logits, positions, settings)
        tokens, index = logits.argmax(-1), self._tables.upload(rows)
        tokens[index] = self._draw(logits[index], positions[rows], settings[rows])
        return tokens

    def _draw(self, logits: Tensor, positions: NDArray[np.int64], settings: NDArray[np.void]) -> Tensor:
        upload, backend = self._tables.upload, self._backend
        logits = logits / upload(settings["temperature"].copy())[:, None]
        top_k, top_p, min_p = settings["top_k"], settings["top_p"], settings["min_p"]
        rows = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
        if len(rows):
            index = upload(rows)
            limits = (upload(limit[rows]) for limit in (top_k, top_p, min_p))
            logits[index] = backend.mask_unlikely(logits[index], *limits)
        return backend.draw(logits, upload(settings["seed"].copy()), upload(positions))

    def _pairs(self, rows: NDArray[np.int64], ids: list[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        """Index of every (row, id) where row `rows[i]` names the ids `ids[i]`."""
        counts = [len(entry) for entry in ids]
        return self._tables.upload(np.repeat(rows, counts)), self._tables.upload(np.concatenate(ids))


def _raw_logprobs(logits: Tensor, settings: NDArray[np.void]) -> RawLogprobs | None:
    rows = np.flatnonzero(settings["logprobs"] >= 0)
    if not len(rows):
        return None
    asked = logits[torch.from_numpy(rows).to(logits.device)]
    return RawLogprobs(rows, asked.log_softmax(-1), int(settings["logprobs"].max()))
