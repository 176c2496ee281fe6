"""Runs plans on one rank: slot tables, forward pass, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from corellm.comms.codec import i32
from corellm.comms.messages import AllocateKV, Progress, StepPlan, StepResult
from corellm.errors import OutOfMemoryError
from corellm.kernels import default_backend, load_backend
from corellm.layers.parallel import Collectives
from corellm.models.llama.graph import Llama
from corellm.models.llama.spec import LlamaSpec
from corellm.worker.batch_inputs import build_batch, padding_batch
from corellm.worker.kv_memory import kv_bytes, kv_cache
from corellm.worker.sampler import Sampled, Sampler
from corellm.worker.slots import SlotTables

CPU_WARM_UP_TOKENS = 64


class Executor:
    """The compute plane of one rank: `allocate`, `warm_up`, then `execute` each plan in order.

    weights: by the names of `weight_table`. kv_memory: uint8, one dimension, of at least `kv_bytes`.
    """

    kv_bytes = staticmethod(kv_bytes)

    def __init__(
        self,
        spec: LlamaSpec,
        weights: Mapping[str, Tensor],
        kv_memory: Tensor,
        *,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        group: Collectives,
        backend: str | None = None,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._kv_memory = kv_memory
        self._page_size = page_size
        self._device = device
        self._dtype = dtype
        self._group = group
        self._backend = load_backend(backend or default_backend(device), device, dtype)

    def allocate(self, command: AllocateKV) -> None:
        """Lay out the KV blocks, and make the tables of every slot."""
        spec, group = self._spec, self._group
        self._num_blocks = command.num_blocks
        self._kv = kv_cache(self._kv_memory, spec, group.size, command.num_blocks, self._page_size, self._dtype)
        self._tables = SlotTables(
            max_seqs=command.max_seqs,
            max_model_len=command.max_model_len,
            num_blocks=command.num_blocks,
            page_size=self._page_size,
            vocab=spec.vocab,
            device=self._device,
        )
        self._sampler = Sampler(self._backend, self._tables)
        self._model = Llama(spec, self._weights, self._backend, group, max_model_len=command.max_model_len)
        self._warm_up_tokens = min(command.max_batch_tokens, command.max_model_len)

    @torch.inference_mode()
    def warm_up(self, report: Callable[[Progress], None]) -> None:
        """Run the forward pass once; on a GPU at full width, so that memory it lacks is missed now.

        Raises `OutOfMemoryError`.
        """
        tokens = self._warm_up_tokens if self._device.type == "cuda" else min(CPU_WARM_UP_TOKENS, self._warm_up_tokens)
        report(Progress(stage="warm up", done=0, total=tokens, unit="tokens", rank=self._group.rank))
        try:
            for width in (1, tokens):  # kernels of decode rows and of wide ones are compiled now, not in a step
                batch = padding_batch(width, self._num_blocks, self._page_size, self._device)
                self._group.gather_logits(self._model.forward(batch, self._kv), self._spec.vocab)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                f"a step of {tokens} tokens does not fit beside weights and KV cache on {self._device}; "
                f"lower --gpu-memory or --max-batch-tokens"
            ) from None
        report(Progress(stage="warm up", done=tokens, total=tokens, unit="tokens", rank=self._group.rank))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run one step. Rank 0 returns its result, the others None.

        Raises `ProtocolError` for a plan that does not fit the tables.
        """
        started = time.perf_counter()
        self._tables.apply(plan)
        sampled = self._run_rows(plan) if len(plan.row_slots) else None
        if self._group.rank:
            return None
        if sampled is None:
            return StepResult(step=plan.step, tokens=i32([]), failed=i32([]), seconds=time.perf_counter() - started)
        return StepResult(
            step=plan.step,
            tokens=i32(sampled.tokens.cpu()),
            failed=i32(np.flatnonzero(sampled.failed.cpu())),
            logprobs=sampled.logprobs.of(sampled.tokens) if sampled.logprobs else None,
            seconds=time.perf_counter() - started,
        )

    def _run_rows(self, plan: StepPlan) -> Sampled | None:
        """Forward and sample; None where there is nothing to sample, or another rank does it."""
        tables, group = self._tables, self._group
        batch = build_batch(plan, tables)
        tables.advance(plan.row_slots.astype(np.int64), plan.row_tokens.astype(np.int64))
        logits = self._model.forward(batch, self._kv)
        sampling = np.asarray(plan.row_samples, dtype=bool)
        if not sampling.any():
            return None
        slots, positions = plan.row_slots[sampling].astype(np.int64), batch.contexts[sampling]
        gathered = group.gather_logits(logits, self._spec.vocab)
        sampled = None if gathered is None else self._sampler.sample(gathered, slots, positions)
        tokens = sampled.tokens if sampled else torch.empty(len(slots), dtype=torch.int64, device=self._device)
        tokens = group.broadcast(tokens)
        tables.tokens[tables.upload(slots), tables.upload(positions)] = tokens.int()
        return sampled
