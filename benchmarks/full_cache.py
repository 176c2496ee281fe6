"""What a full KV cache costs: the scheduler alone, on requests that the blocks do not all hold. Needs no GPU.

    python -m benchmarks.full_cache

Requests are there from the start, and steps take no time. What is counted: steps, preemptions, and the tokens that had
to be computed once more for them.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.report import record
from corellm.comms.codec import i32
from corellm.comms.messages import Request, Sampling, StepPlan, StepResult
from corellm.engine.admission import Limits
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.sequence import Sequence

PAGE = 64
LIMITS = Limits(max_seqs=1024, max_batch_tokens=8192, max_model_len=131072, vocab=128256)
NOTHING = i32(np.array([], dtype=np.int32))


@dataclass(frozen=True)
class Load:
    """`requests` of prompt and output lengths uniform in a range, on `blocks` KV blocks."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    blocks: int


LOADS = {
    "chats": Load(1000, (100, 900), (100, 1500), 6250),
    "chats, a small card": Load(1000, (100, 900), (100, 1500), 3000),
    "long answers": Load(600, (100, 500), (2000, 4000), 3000),
    "few, a laptop": Load(64, (100, 300), (500, 2000), 512),
}


def run(load: Load) -> dict[str, int]:
    rng = random.Random(0)
    scheduler = Scheduler(LIMITS, make_allocator("radix", load.blocks, PAGE), lambda: 0.0)
    prompts = 0
    for number in range(1, load.requests + 1):
        prompt = np.array([rng.randrange(LIMITS.vocab) for _ in range(rng.randint(*load.prompt))], dtype=np.int32)
        sampling = Sampling(max_tokens=rng.randint(*load.output))
        scheduler.add(Sequence(number, b"front end", Request(tag=number, prompt=i32(prompt), sampling=sampling), 0.0))
        prompts += len(prompt)
    in_flight: deque[StepPlan] = deque()
    while scheduler.running or scheduler.waiting or in_flight:
        while len(in_flight) < 2 and (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
        plan = in_flight.popleft()
        tokens = i32(np.full(int(plan.row_samples.sum()), 7, dtype=np.int32))
        scheduler.collect(StepResult(step=plan.step, tokens=tokens, failed=NOTHING, seconds=0.0))
    counters = scheduler.counters
    return {
        "steps": scheduler.steps,
        "preemptions": counters.preemptions,
        "prompt_tokens": prompts,
        "computed_again": counters.prompt_tokens - prompts,
    }


def main() -> None:
    found = {}
    for name, load in LOADS.items():
        found[name] = run(load)
        print(f"{name:20} " + "  ".join(f"{key} {value:,}" for key, value in found[name].items()), flush=True)
    print(record("full_cache", found))


if __name__ == "__main__":
    main()
