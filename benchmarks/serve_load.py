"""Streaming load on any OpenAI server that takes prompts as token ids and `ignore_eos`: ours, or a peer beside it.

    python -m benchmarks.serve_load URL MODEL [--rates 4 16 32 48 0] [--requests 1000] [--vocab 128000]

Requests arrive as a Poisson process at each rate a second; 0 is all at once. The bar, on one NVIDIA H200 against vLLM
in the same run: at least as good at each rate in throughput, time to the first token and time per further token, p50
and p99.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.report import record
from benchmarks.workloads import sharegpt_like

SECONDS = 30  # of arrivals at a rate


@dataclass
class Load:
    """What the requests of one rate came to; times in seconds."""

    first: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)

    async def request(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        began = time.perf_counter()
        arrivals: list[float] = []
        usage: dict[str, int] = {}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                self.errors.append(f"{response.status}: {(await response.text())[:200]}")
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    if event.get("choices"):
                        arrivals.append(time.perf_counter())
        if not arrivals or usage.get("completion_tokens") != body["max_tokens"]:
            self.errors.append(f"a stream of {usage.get('completion_tokens')} tokens instead of {body['max_tokens']}")
            return
        self.first.append(arrivals[0] - began)
        self.tokens += body["max_tokens"]
        if body["max_tokens"] > 1:
            self.further.append((arrivals[-1] - arrivals[0]) / (body["max_tokens"] - 1))


async def run(url: str, model: str, rate: float, requests: int, vocab: int, seed: int) -> dict[str, Any]:
    """Figures of one rate."""
    count = min(requests, int(rate * SECONDS)) if rate else requests
    prompts, outputs = sharegpt_like(seed, count)
    rng, load = random.Random(seed), Load()
    timeout = aiohttp.ClientTimeout(total=600)
    began = time.perf_counter()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for prompt, output in zip(prompts, outputs, strict=True):
            if rate:
                await asyncio.sleep(rng.expovariate(rate))
            body = {
                "model": model, "prompt": [token % vocab for token in prompt], "max_tokens": output, "temperature": 0.6,
                "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            group.create_task(load.request(session, url, body))
    seconds = time.perf_counter() - began
    return {
        "rate": rate or "all at once",
        "requests": count,
        "out_tok_s": load.tokens / seconds,
        "errors": load.errors[:3],
        **{f"ttft_ms_p{share}": _percentile(load.first, share) for share in (50, 99)},
        **{f"tpot_ms_p{share}": _percentile(load.further, share) for share in (50, 99)},
    }


def _percentile(values: list[float], share: int) -> float | None:
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * share // 100)], 2) if ordered else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--rates", type=float, nargs="*", default=[4, 16, 32, 48, 0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--vocab", type=int, default=128000, help="token ids are taken modulo this")
    given = parser.parse_args()
    asyncio.run(run(given.url, given.model, 0, min(64, given.requests), given.vocab, 77))
    found = []
    for number, rate in enumerate(given.rates):
        found.append(asyncio.run(run(given.url, given.model, rate, given.requests, given.vocab, 100 + number)))
        print(json.dumps(found[-1]), flush=True)
    print(record("serve_load", {"url": given.url, "model": given.model, "rates": found}))


if __name__ == "__main__":
    main()
