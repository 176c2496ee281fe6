"""How long something takes on a GPU, without the time of its launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def microseconds(
    calls: list[Callable[[], object]], replays: int = 20, before: Callable[[], object] = lambda: None
) -> float:
    """Of one call: the median over `replays` of a CUDA graph that makes all of them. `before` runs ahead of each."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(replays):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)
