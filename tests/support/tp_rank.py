"""A tensor-parallel rank, run by test_executor: rank, size, rendezvous file, prompt ids; rank 0 prints its ids."""

from __future__ import annotations

import sys
from pathlib import Path

from corellm.worker.collectives import make_collectives
from tests.support.executor_models import CPU, Driver, greedy, make_executor, tiny_llama

COUNT = 12


def main(rank: int, size: int, rendezvous: Path, prompt: list[int]) -> None:
    group = make_collectives(rendezvous, rank, size, CPU)
    driver = Driver(make_executor(tiny_llama(), group=group))
    driver.open(0, prompt, greedy())
    driver.run([(0, 10)])
    driver.run([(0, len(prompt) - 10)])
    for _ in range(COUNT - 1):
        driver.run([(0, 1)])
    if rank == 0:
        print(*driver.running[0].outputs)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [int(token) for token in sys.argv[4:]])
