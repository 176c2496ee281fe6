"""Find the attention tiles of `corellm/kernels/tuning.py` for the GPU at hand.

    python -m benchmarks.tune_attention [--page-size 64] [--narrow] [--wide]

Every candidate runs the cases of `benchmarks.attention_kernels` that its tile serves; the one whose times, each
relative to the best for that case, have the least mean stands first. Copy it into the table. A candidate that the card
cannot run is left out.
"""

from __future__ import annotations

import argparse
import itertools
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
PREFILLS = [name for name in CASES if name.startswith(("prefill", "suffix"))]


def narrow_tiles() -> Iterator[AttentionTile]:
    for block_n, warps, stages, programs in itertools.product((32, 64, 128), (2, 4), (2, 3, 4), (1, 2, 3)):
        yield AttentionTile(16, block_n, warps, stages, programs, min_split=4)


def wide_tiles() -> Iterator[AttentionTile]:
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        yield AttentionTile(block_m, block_n, warps, stages, programs_per_sm=1 if warps == 8 else 2, min_split=4)


def times(tuning: AttentionTuning, names: list[str], page_size: int) -> dict[str, float] | None:
    """µs of each case, None where the tile does not fit the card."""
    device = torch.device("cuda", 0)
    backend = TritonBackend(device, DTYPE, tuning, hopper=False)
    found = {}
    for name in names:
        try:
            found[name] = microseconds(backend_calls(backend, Inputs(CASES[name], page_size), page_size))
        except Exception as error:  # noqa: BLE001  Triton has one class for each limit of a card
            print(f"left out: {tuning}: {type(error).__name__}")
            return None
    return found


def tune(kind: str, tiles: Iterator[AttentionTile], names: list[str], page_size: int) -> list[dict[str, object]]:
    """Candidates, best first, with how far each is from the best of every case on average."""
    base = attention_tuning(torch.cuda.get_device_capability(), DTYPE)
    measured = ((tile, times(replace(base, **{kind: tile}), names, page_size)) for tile in tiles)
    runs = [(tile, found) for tile, found in measured if found is not None]
    best = {name: min(found[name] for _, found in runs) for name in names}
    ranked = sorted((statistics.fmean(found[n] / best[n] for n in names), str(tile), found) for tile, found in runs)
    for score, tile, found in ranked[:5]:
        print(f"{score:.3f}  {tile}  " + "  ".join(f"{name} {micros:.1f}" for name, micros in found.items()))
    return [{"score": score, "tile": tile, "us": found} for score, tile, found in ranked]


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
