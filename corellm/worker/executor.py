"""Runs plans on one rank: slot tables, forward pass, sampling. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.comms.codec import i32
from corellm.comms.messages import AllocateKV, Progress, StepPlan, StepResult
from corellm.errors import OutOfMemoryError
from corellm.kernels import AttentionPlan, default_backend, load_backend
from corellm.kernels.inputs import Rows
from corellm.layers.parallel import Collectives
from corellm.models.llama.graph import Llama
from corellm.models.llama.spec import LlamaSpec
from corellm.worker.batch_inputs import Layout, StepRows, device_inputs
from corellm.worker.cuda_graphs import Computed, DecodeGraphs, widths
from corellm.worker.kv_memory import kv_bytes, kv_cache
from corellm.worker.sampler import RawLogprobs, StepSampling
from corellm.worker.scoring import RowScores, score_prompts
from corellm.worker.slots import SlotTables, Write, write
from corellm.worker.transfers import Download, Stopwatch, upload

CPU_WARM_UP_TOKENS = 64
COMPILE_THREADS = 12
REHEARSED = (1, 2, 8, 16, 32)  # rows for which a product may have a kernel of its own


class Launched:
    """A step that runs on the device; rank 0 asks it for its result."""

    def __init__(
        self, step: int, watch: Stopwatch, tokens: Tensor, failed: Tensor, logprobs: RawLogprobs | None,
        scores: list[RowScores],
    ) -> None:  # fmt: skip
        self.step = step
        self._logprobs, self._scores = logprobs, scores
        self._watch = watch
        self._watch.stop()
        self._download = Download(tokens, failed)

    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._download.is_done()

    def result(self) -> StepResult:
        """What the step sampled, once it is there."""
        tokens, failed = self._download.arrays()
        return StepResult(
            step=self.step,
            tokens=i32(tokens),
            failed=i32(np.flatnonzero(failed)),
            logprobs=self._logprobs.message() if self._logprobs else None,
            prompt_logprobs=[scores.message() for scores in self._scores],
            seconds=self._watch.seconds(),
        )


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
        self.rank = group.rank
        self._backend = load_backend(backend or default_backend(device), device, dtype)

    def allocate(self, command: AllocateKV) -> None:
        """Lay out the KV blocks, and make the tables of every slot."""
        spec, group = self._spec, self._group
        self._kv = kv_cache(self._kv_memory, spec, group.size, command.num_blocks, self._page_size, self._dtype)
        self._tables = SlotTables(
            max_seqs=command.max_seqs,
            max_model_len=command.max_model_len,
            num_blocks=command.num_blocks,
            page_size=self._page_size,
            vocab=spec.vocab,
            device=self._device,
        )
        self._model = Llama(
            spec, self._weights, self._backend, group, max_model_len=command.max_model_len, dtype=self._dtype
        )
        self._graphs = DecodeGraphs() if self._backend.can_capture(self._model.heads) else None
        self._widest = min(command.max_batch_tokens, command.max_model_len)

    @torch.inference_mode()
    def warm_up(self, report: Callable[[Progress], None]) -> None:
        """Run the forward pass once; on a GPU at full width, so that memory it lacks is missed now, and capture graphs.

        Raises `OutOfMemoryError`.
        """
        tokens = self._widest if self._device.type == "cuda" else min(CPU_WARM_UP_TOKENS, self._widest)
        sizes = widths(self._tables.spare) if self._graphs else []
        total = tokens + sum(sizes)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(Progress(stage="warm up", done=done, total=total, unit="tokens", rank=self._group.rank))

        def compute() -> None:
            for width in (1, tokens):  # kernels of decode rows and of wide ones are compiled now, not in a step
                self._compute(*self._padding(np.array([width])))

        advance(0)
        try:
            if self._graphs:
                self._rehearse(compute, sizes[-1])
            else:
                compute()
            advance(tokens)
            if self._graphs:
                logits = torch.empty(sizes[-1], self._spec.vocab, dtype=self._dtype, device=self._device)
                for width in reversed(sizes):
                    self._capture(self._graphs, width, logits)
                    advance(width)
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                f"a step of {tokens} tokens does not fit beside weights and KV cache on {self._device}; "
                f"lower --gpu-memory or --max-batch-tokens"
            ) from None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Launched:
        """Launch one step.

        Raises `ProtocolError` for a plan that does not fit the tables.
        """
        watch, tables = Stopwatch(self._device), self._tables
        entries = tables.apply(plan)
        rows = StepRows.of(plan, tables)
        sampling = StepSampling(plan, rows, tables)
        tables.advance(rows.rows.slots, np.diff(rows.rows.starts))
        computed = self._run(rows, sampling, entries)
        count = len(rows.sampling)
        tokens, failed = computed.tokens[:count], computed.failed[:count]
        if len(sampling.special):
            self._sample_special(rows, sampling, computed)
        logits = computed.logits
        logprobs = sampling.logprobs(self._backend, logits, tokens) if logits is not None else None
        scores = score_prompts(plan, rows, tables, self._backend, computed.hidden, self._logits)
        return Launched(plan.step, watch, tokens, failed, logprobs, scores)

    def _run(self, rows: StepRows, sampling: StepSampling, entries: Write) -> Computed:
        """Upload what the step needs, write `entries` into the tables, and compute: by a graph if there is one."""
        graphs = self._graphs if rows.decodes else None
        captured = graphs.layout(rows.tokens) if graphs else None
        width = captured.tokens if captured else None
        plan = self._backend.plan_attention(rows.rows, self._model.heads, self._page_size, width)
        layout = captured or Layout(rows.tokens, len(rows.sampling), len(plan.words))
        words = rows.words(layout, plan.words, sampling.temperatures, sampling.seeds, self._tables.spare)
        uploaded = upload(np.concatenate((words, *entries)), self._device)
        if len(entries[0]):
            write(self._tables.memory, uploaded[layout.words :])
        if graphs and captured:
            return graphs.run(captured, uploaded)
        return self._compute(uploaded[: layout.words], layout, plan)

    def _compute(self, words: Tensor, layout: Layout, plan: AttentionPlan) -> Computed:
        """Forward and sample; what is launched does not depend on the values in `words`."""
        tables, group = self._tables, self._group
        tokens = torch.empty(layout.sampled, dtype=torch.int64, device=self._device)
        failed = torch.empty_like(tokens, dtype=torch.bool)
        if not layout.tokens:
            return Computed(torch.empty(0, self._spec.hidden), None, tokens, failed)
        batch, rows, attention = device_inputs(words, layout, tables, self._backend)
        attend = plan.bind(attention, tables.block_table)
        hidden = self._model.forward(batch, attend, self._kv)
        if not layout.sampled:
            return Computed(hidden, None, tokens, failed)
        logits = self._logits(hidden.index_select(0, batch.sampled))
        if logits is not None:
            tokens, failed = self._backend.sample(logits, rows.temperatures, rows.seeds, rows.positions)
        tokens = group.broadcast(tokens)
        tables.tokens[rows.slots, rows.positions] = tokens.int()
        return Computed(hidden, logits, tokens, failed)

    def _logits(self, hidden: Tensor) -> Tensor | None:
        """Logits of hidden [s, hidden] on rank 0, None elsewhere; every rank calls it."""
        return self._group.gather_logits(self._model.logits(hidden), self._spec.vocab)

    def _rehearse(self, compute: Callable[[], None], widest: int) -> None:
        """Run `compute` beside the products of narrow steps: what these compile takes long one by one."""

        def run(part: Callable[[], object]) -> None:
            with torch.cuda.device(self._device), torch.inference_mode():
                torch.zeros(1, device=self._device)  # gives the thread a context, without which cuBLAS warns
                part()

        narrow = [rows for rows in REHEARSED if rows <= widest]
        parts = [part for rows in narrow for part in self._model.rehearsals(rows, self._kv)]
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            list(pool.map(run, [compute, *parts]))
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()  # those of threads that are gone

    def _capture(self, graphs: DecodeGraphs, width: int, logits: Tensor) -> None:
        """Capture decode steps of `width` rows, which leave their logits in `logits`: one place for all graphs, since
        one runs at a time and every width would else hold memory of its own."""
        words, layout, plan = self._padding(np.ones(width, np.int64), width)

        def compute() -> Computed:
            computed = self._compute(words, layout, plan)
            if computed.logits is None:
                return computed
            return replace(computed, logits=logits[:width].copy_(computed.logits))

        graphs.capture(layout, words, compute)

    def _padding(self, counts: NDArray[np.int64], width: int | None = None) -> tuple[Tensor, Layout, AttentionPlan]:
        """Inputs of a step whose rows, of `counts` tokens, all belong to the spare slot: to warm up with."""
        spare = np.full(len(counts), self._tables.spare)
        starts = np.concatenate(([0], np.cumsum(counts)))
        every = np.arange(len(counts))
        rows = StepRows(Rows(spare, starts, counts), every, spare, counts)
        plan = self._backend.plan_attention(rows.rows, self._model.heads, self._page_size, width)
        layout = Layout(rows.tokens, len(counts), len(plan.words))
        settings = np.zeros(len(counts), np.float32), np.zeros(len(counts), np.int64)
        return upload(rows.words(layout, plan.words, *settings, self._tables.spare), self._device), layout, plan

    def _sample_special(self, rows: StepRows, sampling: StepSampling, computed: Computed) -> None:
        """Put the tokens of special rows in the place of those that every row got."""
        index = upload(sampling.special, self._device)
        if computed.logits is not None:
            tokens = sampling.draw_special(self._backend, computed.logits)
            tokens = tokens.masked_fill_(computed.failed[index], 0)
        else:
            tokens = torch.empty(len(sampling.special), dtype=torch.int64, device=self._device)
        tokens = self._group.broadcast(tokens)
        computed.tokens[index] = tokens
        slots, positions = (upload(of[sampling.special], self._device) for of in (rows.slots, rows.positions))
        self._tables.tokens[slots, positions] = tokens.int()
