"""Where a step's time goes on one GPU: kernels by name, and how long the GPU waits between steps.

    python -m benchmarks.step_profile --model FOLDER [--batch 1 64 256] [--context 640] [--mixed 2048]

FOLDER needs a config.json alone. The executor is driven as a worker drives it, one step ahead, without an engine. Each
table names the kernels of one step, their time, and the floor of what they do: bytes at the card's copy rate, or
arithmetic at its rate of dense products, measured here first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.report import record
from corellm.checkpoint import open_checkpoint
from corellm.comms.codec import i32
from corellm.comms.messages import AllocateKV, Sampling, SlotOpen, StepPlan
from corellm.models.llama.spec import LlamaSpec, weight_table
from corellm.worker.collectives import SingleRank
from corellm.worker.executor import Executor, Launched
from corellm.worker.slab import Slab
from corellm.worker.weight_loader import dummy_weights

PAGE = 64
STEPS = 40
LONGEST = 16384  # tokens: the prompt that is fed in chunks
DEVICE = torch.device("cuda", 0)


def room(context: int) -> int:
    """Tokens that a decoding sequence may come to."""
    return -(-(context + 3 * STEPS) // PAGE) * PAGE


def pool(rows: int, context: int) -> int:
    """Blocks for so many of them, and for the longest prompt."""
    return (rows * room(context) + LONGEST) // PAGE


class Bench:
    """An executor with `rows` sequences of `context` tokens whose KV is whatever is in memory."""

    def __init__(
        self, spec: LlamaSpec, weights: dict[str, torch.Tensor], slab: Slab, kv_at: int, rows: int, context: int
    ) -> None:
        self.rows, self.context = rows, context
        blocks = pool(rows, context)
        memory = slab.view(kv_at, (Executor.kv_bytes(spec, 1, blocks, PAGE, torch.bfloat16),), torch.uint8)
        self.executor = Executor(
            spec, weights, memory, page_size=PAGE, device=DEVICE, dtype=torch.bfloat16, group=SingleRank()
        )
        self.executor.allocate(
            AllocateKV(num_blocks=blocks, max_batch_tokens=8192, max_seqs=rows + 1, max_model_len=LONGEST)
        )
        self.executor.warm_up(lambda _: None)
        order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        held = np.split(order, np.arange(1, rows + 1) * (room(context) // PAGE))
        self.opens = [
            SlotOpen(
                slot=slot,
                tokens=np.random.default_rng(slot).integers(0, spec.vocab, known, dtype=np.int32),
                prompt_len=known,
                computed=known - 1 if slot < rows else 0,
                blocks=held[slot],
                sampling=Sampling(max_tokens=LONGEST, temperature=0.6, seed=slot),
            )
            for slot, known in enumerate([context] * rows + [LONGEST])
        ]
        self.step = 0

    def launch(self, prefill: int = 0) -> Launched:
        """A decode step, with a chunk of the last slot's prompt beside it."""
        self.step += 1
        rows = self.rows + bool(prefill)
        opens, self.opens = self.opens, []
        return self.executor.execute(
            StepPlan(
                step=self.step,
                closes=i32([]),
                opens=opens,
                append_slots=i32([]),
                append_blocks=i32([]),
                row_slots=i32(range(rows)),
                row_tokens=i32([1] * self.rows + [prefill] * (rows - self.rows)),
                row_samples=i32([1] * self.rows + [0] * (rows - self.rows)),
            )
        )

    def time(self, steps: int) -> dict[str, float]:
        """Seconds a step by the wall, in steady state, and the share of it in which the GPU had no step."""
        for _ in range(3):
            self.launch().result()
        ahead = self.launch()
        gpu = []
        began = time.perf_counter()
        for _ in range(steps):
            ahead, done = self.launch(), ahead
            gpu.append(done.result().seconds)
        wall = time.perf_counter() - began
        ahead.result()
        return {"step_ms": 1e3 * wall / steps, "gpu_ms": 1e3 * statistics.fmean(gpu), "idle": 1 - sum(gpu) / wall}

    def kernels(self, steps: int, prefill: int = 0) -> list[tuple[str, float, float]]:
        """Name, launches and µs of each kernel of a step."""
        self.launch(prefill).result()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(steps):
                self.launch(prefill).result()
        found: dict[str, list[float]] = defaultdict(list)
        for event in trace.events():
            if event.device_type == DeviceType.CUDA:
                found[event.name].append(event.device_time)
        table = [(name, len(times) / steps, sum(times) / steps) for name, times in found.items()]
        return sorted(table, key=lambda line: -line[2])


def ceilings() -> dict[str, float]:
    """Bytes a second of a large copy, read and written, and FLOP/s of a large bfloat16 product on random values."""
    source = torch.randn(1 << 30, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    square = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def seconds(run: Any) -> float:
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    found = {"bytes_s": 4 * source.numel() / seconds(lambda: target.copy_(source))}
    found["flop_s"] = 2 * 8192**3 / seconds(lambda: torch.mm(square, square))
    return found


def floors(spec: LlamaSpec, rows: int, tokens: int, context: int, rates: dict[str, float]) -> dict[str, float]:
    """µs of a step: reading all weights and KV once, and the arithmetic of its products."""
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    per_layer = spec.hidden * (qkv + spec.heads * spec.head_dim + 3 * spec.intermediate)
    linear, head = spec.layers * per_layer, spec.hidden * spec.vocab
    kv = rows * context * spec.kv_bytes_per_token(2, 1)
    return {
        "weights_us": 1e6 * 2 * (linear + head) / rates["bytes_s"],
        "kv_us": 1e6 * kv / rates["bytes_s"],
        "products_us": 1e6 * 2 * (tokens * linear + rows * head) / rates["flop_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument(
        "--mixed", type=int, default=2048, help="prompt tokens beside the largest batch's decodes; 0: none"
    )
    given = parser.parse_args()
    spec = open_checkpoint(given.model, "dummy").spec
    table = weight_table(spec, 2, 1, 0)
    kv = Executor.kv_bytes(spec, 1, pool(max(given.batch), given.context), PAGE, torch.bfloat16)
    rates = ceilings()
    slab = Slab(table.nbytes + kv, DEVICE)
    weights = dummy_weights(table, slab, torch.bfloat16, 0, 0)
    figures: dict[str, Any] = {"ceilings": rates}
    for batch in given.batch:
        bench = Bench(spec, weights, slab, table.nbytes, batch, given.context)
        figures[f"batch {batch}"] = show(f"batch {batch}", bench, floors(spec, batch, batch, given.context, rates))
        if batch == max(given.batch) and given.mixed:
            floor = floors(spec, batch, batch + given.mixed, given.context, rates)
            figures["mixed"] = show(f"batch {batch} + {given.mixed} prompt tokens", bench, floor, given.mixed)
        del bench
        torch.cuda.empty_cache()
    print(record("step_profile", figures))


def show(title: str, bench: Bench, floor: dict[str, float], prefill: int = 0) -> dict[str, Any]:
    """Print one table; its figures."""
    timing = bench.time(STEPS) if not prefill else {}
    kernels = bench.kernels(3 if prefill else 5, prefill)
    total = sum(micros for _, _, micros in kernels)
    print(f"\n{title}: kernels {total:.0f} µs, " + ", ".join(f"{k} {v:.4g}" for k, v in (timing | floor).items()))
    for name, count, micros in kernels[:16]:
        print(f"  {micros:9.1f} µs {100 * micros / total:5.1f} %  × {count:5.1f}  {name[:90]}")
    return {"timing": timing, "floor": floor, "kernels_us": total, "kernels": kernels[:30]}


if __name__ == "__main__":
    main()
