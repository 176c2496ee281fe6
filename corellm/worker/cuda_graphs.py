"""Decode steps as CUDA graphs: the whole forward pass and sampling, captured once for each batch width.

A step of fewer rows than a graph has runs it with rows that pad: they belong to the spare slot, write to the padding
block, and appear in no attention work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from corellm.worker.batch_inputs import Layout

WIDEST = 512  # rows; a wider step computes for longer than the host takes to launch it
FINE, COARSE = 8, 32  # steps between widths, up to 256 rows and beyond


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward pass leaves on the device, of n tokens and s sampling rows; valid until the next pass begins."""

    hidden: Tensor  # [n, hidden]; of the last layer, before the last norm
    logits: Tensor | None  # [s, v], on rank 0
    tokens: Tensor  # [s] int64
    failed: Tensor  # [s] bool


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    words: Tensor  # its inputs
    computed: Computed


def widths(max_seqs: int) -> list[int]:
    """Batch widths to capture, ascending: the last is `max_seqs`, or `WIDEST` where that is less."""
    top = min(max_seqs, WIDEST)
    fine, coarse = range(FINE, min(top, 256) + 1, FINE), range(256 + COARSE, top + 1, COARSE)
    return sorted({width for width in (1, 2, 4, *fine, *coarse, top) if width <= top})


class DecodeGraphs:
    """Graphs by width. `capture` all widths before `run`."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[Layout, _Captured]] = {}

    def capture(self, layout: Layout, words: Tensor, compute: Callable[[], Computed]) -> None:
        """Capture `compute`, which reads `words`, an example of a step's inputs that becomes the graph's own.

        Wide layouts first: narrower ones then take their memory from what those left.
        """
        compute()  # compiles and loads what a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            computed = compute()
        self._graphs[layout.tokens] = layout, _Captured(graph, words, computed)

    def layout(self, rows: int) -> Layout | None:
        """The layout of the narrowest graph that holds `rows` rows, None where there is none."""
        fitting = [width for width in self._graphs if width >= rows]
        return self._graphs[min(fitting)][0] if fitting else None

    def run(self, layout: Layout, words: Tensor) -> Computed:
        """Run the graph of `layout` on `words`, which start with that layout's."""
        captured = self._graphs[layout.tokens][1]
        captured.words.copy_(words[: layout.words])
        captured.graph.replay()
        return captured.computed
