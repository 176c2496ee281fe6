"""Fixed workloads: prompts as token ids, and how many tokens each is to be answered with. Same seed, same workload."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Workload = tuple[list[list[int]], list[int]]

VOCAB = 128000  # ids below the special tokens of Llama 3.1


def nano(seed: int = 0) -> Workload:
    """256 requests, lengths uniform in 100..1024 both ways: nano-vllm's published offline workload."""
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


def sharegpt_like(seed: int = 1, requests: int = 1000) -> Workload:
    """Chat-shaped: log-normal lengths, mean about 210 in and 185 out, capped at 2048 and 1024."""
    rng = random.Random(seed)

    def length(mean: int, cap: int) -> int:
        sigma = 1.0
        return max(4, min(cap, int(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))

    prompts = [[rng.randrange(VOCAB) for _ in range(length(220, 2048))] for _ in range(requests)]
    return prompts, [length(190, 1024) for _ in range(requests)]


def single(seed: int = 2) -> Workload:
    """One request alone: 128 in, 512 out."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(128)]], [512]


def prefill(seed: int = 3) -> Workload:
    """8 prompts of 8192 tokens, answered with one token each."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(8192)] for _ in range(8)], [1] * 8


def shared_prefix(seed: int = 4) -> Workload:
    """256 requests of 2048 tokens that all share and 128 of their own, 64 out."""
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(2048)]
    return [head + [rng.randrange(VOCAB) for _ in range(128)] for _ in range(256)], [64] * 256


WORKLOADS: dict[str, Callable[..., Workload]] = {
    f.__name__: f for f in (single, nano, sharegpt_like, prefill, shared_prefix)
}
