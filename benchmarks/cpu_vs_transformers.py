"""CoreLLM against Hugging Face transformers on this CPU: same model, dtype, threads and prompts, in one run.

    python -m benchmarks.cpu_vs_transformers [--model demo] [--rounds 3]

Two figures: 32 prompts of ragged length with 64 new tokens each (transformers: one padded batch), and one prompt alone.
Rounds alternate between the two programs, so that both see the same machine; the best round of each counts.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.report import record
from corellm import EngineNode, SamplingParams
from corellm.device import cpu_count
from corellm.model_source import find_model

NEW_TOKENS = 64
SINGLE_TOKENS = 128


def ragged_prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Token-id prompts of 16 to 512 tokens, log-uniform, as chat prompts are."""
    rng = random.Random(seed)
    return [[rng.randrange(100, vocab) for _ in range(int(16 * 32 ** rng.random()))] for _ in range(count)]


class Transformers:
    """The peer: `generate`, greedy, left-padded."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(cpu_count())
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def run(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds."""
        torch = self._torch
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens
            )
        if out.shape != (len(prompts), longest + new_tokens):
            raise RuntimeError(f"transformers answered a batch of shape {tuple(out.shape)}")
        return time.perf_counter() - began


def ours(engine: EngineNode, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds."""
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    found = engine.generate(prompts, params)
    if any(len(completion.token_ids) != new_tokens for completion in found):
        raise RuntimeError("a completion has another length than was asked for")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    path = find_model(given.model, lambda _: None)
    peer = Transformers(path)
    times: dict[str, list[float]] = {"corellm_batch": [], "peer_batch": [], "corellm_single": [], "peer_single": []}
    # Prefixes must not be reused between rounds: the naive cache computes every token each time.
    with EngineNode(str(path), device="cpu", dtype="float32", kv_cache="naive") as engine:
        prompts = ragged_prompts(32, 40000)
        single = ragged_prompts(1, 40000, seed=1)
        ours(engine, single, 8)
        peer.run(single, 8)
        for _ in range(given.rounds):
            times["corellm_batch"].append(ours(engine, prompts, NEW_TOKENS))
            times["peer_batch"].append(peer.run(prompts, NEW_TOKENS))
            times["corellm_single"].append(ours(engine, single, SINGLE_TOKENS))
            times["peer_single"].append(peer.run(single, SINGLE_TOKENS))
    best = {name: min(values) for name, values in times.items()}
    batch = 32 * NEW_TOKENS
    figures: dict[str, Any] = {
        "prompt_tokens": sum(map(len, prompts)),
        "threads": cpu_count(),
        "seconds": times,
        "batch_tok_s": {"corellm": batch / best["corellm_batch"], "transformers": batch / best["peer_batch"]},
        "single_tok_s": {
            "corellm": SINGLE_TOKENS / best["corellm_single"],
            "transformers": SINGLE_TOKENS / best["peer_single"],
        },
        "batch_ratio": best["peer_batch"] / best["corellm_batch"],
        "single_ratio": best["peer_single"] / best["corellm_single"],
    }
    for kind in ("batch", "single"):
        a, b = figures[f"{kind}_tok_s"]["corellm"], figures[f"{kind}_tok_s"]["transformers"]
        print(f"{kind:7} CoreLLM {a:7.1f} tok/s   transformers {b:7.1f} tok/s   ratio {a / b:.2f}")
    print(record("cpu_vs_transformers", figures))


if __name__ == "__main__":
    main()
