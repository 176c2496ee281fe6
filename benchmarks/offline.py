"""Fixed workloads on one engine, and on a peer in the same run.

    python -m benchmarks.offline --model FOLDER [workload ...] [--peer 'COMMAND' [--peer-seconds 540]]

FOLDER needs a config.json alone: weights are dummies. Each workload runs with two seeds. The peer is a command that
prints one JSON line a workload, {"workload", "in", "out", "s", ...}, in the same order; it runs before the engine, on
the same machine, and what it has printed when its time is over counts. Ratios compare the better run of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from benchmarks import peer
from benchmarks.report import record
from benchmarks.workloads import WORKLOADS
from corellm import EngineNode, SamplingParams

SEEDS = (None, 1001)


def run(engine: EngineNode, name: str, seed: int | None = None) -> dict[str, Any]:
    """Figures of one workload."""
    prompts, outputs = WORKLOADS[name]() if seed is None else WORKLOADS[name](seed=seed)
    params = [SamplingParams(temperature=0.6, max_tokens=count, ignore_eos=True) for count in outputs]
    before, began = engine.stats(), time.perf_counter()
    found = engine.generate(prompts, params)
    seconds, after = time.perf_counter() - began, engine.stats()
    if [completion.output_tokens for completion in found] != outputs:
        raise RuntimeError(f"{name}: a completion has another length than was asked for")
    return {
        "workload": name,
        "seed": seed,
        "in": sum(map(len, prompts)),
        "out": sum(outputs),
        "s": round(seconds, 3),
        "steps": after.steps - before.steps,
        "device_idle": round(1 - (after.busy_s - before.busy_s) / seconds, 4),  # before, between and after its steps
        "cached": sum(completion.cached_tokens for completion in found),
    }


def ours(model: str, names: list[str], options: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from nothing to ready, and the runs."""
    began = time.perf_counter()
    with EngineNode(model, load_format="dummy", max_model_len=16384, **options) as engine:
        ready = time.perf_counter() - began
        run(engine, "single")
        run(engine, "sharegpt_like", 99)
        runs = []
        for name in names:
            for seed in SEEDS:
                runs.append(run(engine, name, seed))
                print(json.dumps(runs[-1]), flush=True)
        return ready, runs


def rate(line: dict[str, Any]) -> float:
    """Tokens a second: of the prompt where that is the work, else of the output."""
    return float(line["in"] if line["workload"] == "prefill" else line["out"]) / float(line["s"])


def best(runs: list[dict[str, Any]], name: str) -> float | None:
    return max((rate(line) for line in runs if line.get("workload") == name), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer", help="command that measures the peer")
    parser.add_argument("--peer-seconds", type=float, default=540.0)
    parser.add_argument("--options", type=json.loads, default={}, help="engine options as JSON")
    given = parser.parse_args()
    names = given.workloads or list(WORKLOADS)
    theirs = peer.lines(given.peer, given.peer_seconds) if given.peer else []
    ready, runs = ours(given.model, names, given.options)
    table = {}
    for name in names:
        mine, other = best(runs, name), best(theirs, name)
        table[name] = {"corellm": mine, "peer": other, "ratio": mine / other if mine and other else None}
        print(f"{name:14} {mine:10.1f} tok/s" + (f"  peer {other:10.1f}  ratio {mine / other:.3f}" if other else ""))
    print(f"ready in {ready:.1f} s")
    path = record("offline", {"ready_s": ready, "options": given.options, "table": table, "runs": runs, "peer": theirs})
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
