"""What a step costs the engine's own Python: 256 decode rows, a fake executor that answers at once.

    python -m benchmarks.engine_step [--rows 256] [--steps 2000]

Counted: receive, collect, schedule, encode and send the plan, build and send the events. Not counted: the fake worker's
and the front end's own time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import zmq

from benchmarks.report import record
from corellm.comms.codec import encode, i32
from corellm.comms.messages import PROTOCOL_VERSION, EngineInfo, Hello, Request, Sampling, StepPlan, StepResult, Submit
from corellm.comms.run_folder import RunFolder
from corellm.engine.admission import Limits
from corellm.engine.constraints import Constraints
from corellm.engine.engine import Engine
from corellm.engine.front_ends import FrontEnds
from corellm.engine.kv_cache import make_allocator
from corellm.engine.scheduler import Scheduler
from corellm.engine.stats import StatsPublisher
from corellm.errors import InvalidRequestError


class InstantWorkers:
    """Takes plans as workers do, encoding them for the wire; every row's token is there when it is asked for."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def send(self, plan: StepPlan) -> None:
        encode(plan)
        self.plans.append(plan)

    def receive(self) -> Iterator[StepResult]:
        if self.plans:
            plan = self.plans.pop(0)
            rows = int(plan.row_samples.sum())
            yield StepResult(step=plan.step, tokens=i32(np.full(rows, 7)), failed=i32([]), seconds=0.0)

    def check(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class BusyEngine:
    """A loop in which every row decodes, and the one front end that all of them belong to."""

    engine: Engine
    scheduler: Scheduler
    folder: RunFolder
    front_end: zmq.Socket[bytes]

    def turn(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """One step; the seconds that it took the loop. What the front end got is thrown away afterwards."""
        began = clock()
        self.engine.turn()
        seconds = clock() - began
        while self.front_end.poll(0):
            self.front_end.recv()
        return seconds


@contextlib.contextmanager
def busy_engine(rows: int, steps: int, cache: str) -> Iterator[BusyEngine]:
    """An engine with `rows` decoding sequences that last for at least `steps` steps."""
    blocks = rows * (steps // 16 + 16)
    scheduler = Scheduler(Limits(rows, 8192, 131072, 128256), make_allocator(cache, blocks, 16), time.monotonic)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        run = RunFolder(Path(folder))
        front_ends, stats = FrontEnds(run), StatsPublisher(run, "benchmark")
        constraints = Constraints(_no_vocabulary, 128256)
        front_end: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for part in (constraints, stats, front_ends, front_end):
            closing.callback(part.close)
        front_end.connect(run.requests)
        info = EngineInfo(
            name="benchmark", model="", model_path="", dtype="", device="", tp=1, kv_cache=cache, page_size=16,
            kv_blocks=blocks, max_model_len=131072, max_batch_tokens=8192, max_seqs=rows, vocab=128256, seed=0,
            load_format="dummy", max_request_tokens=131072, startup_s=0.0,
        )  # fmt: skip
        workers: Any = InstantWorkers()
        engine = Engine(info, front_ends, workers, scheduler, stats, constraints, death_pipe=-1)
        front_end.send(encode(Hello(version=PROTOCOL_VERSION, front_end="benchmark")))
        prompt = i32(np.arange(100))
        sampling = Sampling(max_tokens=steps + 1000, stop_ids=(128001, 128008, 128009))
        requests = [Request(tag=tag, prompt=prompt, sampling=sampling) for tag in range(rows)]
        front_end.send(encode(Submit(requests=requests)))
        deadline = time.monotonic() + 30
        while len(scheduler.running) < rows or any(s.is_prefilling for s in scheduler.running):
            engine.turn()
            if time.monotonic() > deadline:
                raise TimeoutError("the rows were not all running within 30 s")
        yield BusyEngine(engine, scheduler, run, front_end)


def _no_vocabulary() -> NoReturn:
    raise InvalidRequestError("nothing is constrained in this benchmark")


def measure(rows: int, steps: int, cache: str) -> dict[str, float]:
    """Microseconds of one turn of the loop: median and 99th percentile."""
    with busy_engine(rows, steps, cache) as busy:
        times = [busy.turn() * 1e6 for _ in range(steps)]
    return {"median_us": statistics.median(times), "p99_us": float(np.percentile(times, 99))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    found = {cache: measure(given.rows, given.steps, cache) for cache in ("radix", "naive")}
    for cache, times in found.items():
        median, p99 = times["median_us"], times["p99_us"]
        print(f"{cache:6} {given.rows} decode rows: median {median:.0f} us, p99 {p99:.0f} us a step")
    record("engine_step", {"rows": given.rows, "steps": given.steps, **found})


if __name__ == "__main__":
    main()
