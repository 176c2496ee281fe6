"""Find the attention tiles of `corellm/kernels/tuning.py` for the GPU at hand.

    python -m benchmarks.tune_attention [--page-size 64] [--narrow] [--wide]

Every candidate runs the cases of `benchmarks.attention_kernels` that its tile serves; the one whose times, each
relative to the best for that case, have the least mean stands first. Copy it into the table. A candidate that the card
cannot run is left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.attention_kernels import CASES, DTYPE, Inputs, backend_calls
from benchmarks.graph_timing import microseconds
from benchmarks.report import record
from corellm.kernels.triton_backend import TritonBackend
from corellm.kernels.tuning import AttentionTile, AttentionTuning, attention_tuning

DECODES = [name for name in CASES if name.startswith("decode")]
SHOWN = 8  # of the best
PREFILLS = [name for name in CASES if name.startswith(("prefill", "suffix"))]


def narrow_tiles() -> Iterator[AttentionTile]:
    for (block_n, warps), stages, programs in itertools.product(((32, 1), (32, 2), (64, 2)), (2, 3, 4), (2, 3, 4)):
        yield AttentionTile(16, block_n, warps, stages, programs, min_split=64 // block_n)


def wide_tiles() -> Iterator[AttentionTile]:
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        yield AttentionTile(block_m, block_n, warps, stages, programs_per_sm=1 if warps == 8 else 2, min_split=4)


def times(name: str, tunings: list[AttentionTuning], page_size: int) -> list[float]:
    """µs of one case by each tuning; infinite where the tile does not fit the card."""
    device, inputs = torch.device("cuda", 0), Inputs(CASES[name], page_size)
    found = []
    for tuning in tunings:
        backend = TritonBackend(device, DTYPE, tuning, hopper=False)
        try:
            found.append(microseconds(backend_calls(backend, inputs, page_size)))
        except Exception as error:  # noqa: BLE001  Triton has one class for each limit of a card
            print(f"left out: {tuning}: {type(error).__name__}")
            found.append(math.inf)
    return found


def tune(kind: str, tiles: Iterator[AttentionTile], names: list[str], page_size: int) -> list[dict[str, object]]:
    """Candidates, best first, with how far each is from the best of every case on average."""
    base, candidates = attention_tuning(torch.cuda.get_device_capability(), DTYPE), list(tiles)
    tunings = [replace(base, **{kind: tile}) for tile in candidates]
    by_case = {name: times(name, tunings, page_size) for name in names}
    found = [{name: by_case[name][i] for name in names} for i in range(len(candidates))]
    best = {name: min(micros) for name, micros in by_case.items()}
    scores = [statistics.fmean(micros[name] / best[name] for name in names) for micros in found]
    ranked = sorted(zip(scores, map(str, candidates), found, strict=True), key=lambda line: line[0])
    for score, tile, micros in ranked[:SHOWN]:
        print(f"{score:.3f}  {tile}  " + "  ".join(f"{name} {time:.1f}" for name, time in micros.items()))
    return [{"score": score, "tile": tile, "us": micros} for score, tile, micros in ranked if score < math.inf]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--narrow", action="store_true", help="tune the tile of decode rows alone")
    parser.add_argument("--wide", action="store_true", help="tune the tile of long rows alone")
    given = parser.parse_args()
    both = given.narrow == given.wide
    figures = {}
    if given.narrow or both:
        figures["narrow"] = tune("narrow", narrow_tiles(), DECODES, given.page_size)
    if given.wide or both:
        figures["wide"] = tune("wide", wide_tiles(), PREFILLS, given.page_size)
    print(record("tune_attention", figures))


if __name__ == "__main__":
    main()
