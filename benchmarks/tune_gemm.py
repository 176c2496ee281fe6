"""Find the fastest tiles for products of few rows on this GPU: makes the data of `corellm.kernels.gemm_tuning`.

    python -m benchmarks.tune_gemm [--models 8b,70b] [--tp 1,2] [--seconds 600]

Each candidate is timed in a CUDA graph over weights that no cache holds. For each weight it prints a line for the
table, None where cuBLAS wins, and the microseconds of both. The fastest plain products are checked against float32;
fused ones are checked by the GPU tests, which run over the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import record
from benchmarks.tile_candidates import candidates
from corellm.kernels.gemm_tuning import WIDTHS, HeldTile, Tile, Tiles
from corellm.kernels.inputs import Heads, Rope
from corellm.kernels.skinny_products import SkinnyProducts

DTYPE = torch.bfloat16
EPS = 1e-5
MODELS = {"8b": (4096, 32, 8, 14336), "70b": (8192, 64, 8, 28672)}  # hidden, heads, KV heads, intermediate
VOCAB, HEAD_DIM = 128256, 128
CACHE_BYTES = 1 << 28  # more than any GPU's L2
GRAPH_LAUNCHES = 32  # at least, so that the start of a graph does not count
REPLAYS = 5
MAX_ERROR = 5e-3  # relative, of a bfloat16 result
SMALL_KERNEL = 2.0  # microseconds that a norm, rotation or activation of its own costs between two products
UNFUSED = {"qkv": 2, "gated": 2, "head": 1, "add": 0}  # such kernels that a product which is not fused needs


@dataclass(frozen=True, slots=True)
class Product:
    """One weight [n, k] of a model; `form`, a key of UNFUSED, says what is fused with it where a kernel can."""

    form: str
    n: int
    k: int
    heads: Heads


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found for a product: for each of WIDTHS the tile, its microseconds, and those of cuBLAS."""

    product: Product
    tiles: Tiles
    ours: list[float]
    cublas: list[float]


def products(models: list[str], tps: list[int]) -> list[Product]:
    """The weights of one rank of each model and degree of tensor parallelism, each shape once."""
    found: dict[tuple[int, int], Product] = {}
    for hidden, heads, kv_heads, intermediate in (MODELS[name] for name in models):
        for tp in tps:
            local = Heads(heads // tp, kv_heads // tp, HEAD_DIM)
            for form, n, k in (
                ("qkv", (local.count + 2 * local.kv) * HEAD_DIM, hidden),
                ("add", hidden, local.count * HEAD_DIM),
                ("gated", 2 * intermediate // tp, hidden),
                ("add", hidden, intermediate // tp),
                ("head", VOCAB // tp, hidden),
            ):
                found.setdefault((n, k), Product(form, n, k, local))
    return list(found.values())


class Bench:
    """Random inputs for one product, and `copies` of its weight."""

    def __init__(self, product: Product, copies: int) -> None:
        n, k, m = product.n, product.k, WIDTHS[-1]
        self.product = product
        self.weights = [torch.empty(n, k, dtype=DTYPE, device="cuda").normal_(0, k**-0.5) for _ in range(copies)]
        self.x, self.norm, self.residual = _random(m, k), _random(k), _random(m, n)
        self._rope = Rope(_random(m, 1, HEAD_DIM), _random(m, 1, HEAD_DIM))
        self._kv_slots = torch.randperm(m, device="cuda")
        self._k, self._v = torch.empty(2, m, 1, product.heads.kv, HEAD_DIM, dtype=DTYPE, device="cuda")

    def run(self, kernels: SkinnyProducts, m: int, weight: Tensor, residual: Tensor) -> None:
        """The product of m rows, with what can be fused with it; `residual` is changed."""
        form, x = self.product.form, self.x[:m]
        if form == "add":
            kernels.linear_add(x, weight, residual)
        elif not kernels.fuses(m, *weight.shape):
            kernels.linear(x, weight)
        elif form == "head":
            kernels.norm_linear(x, self.norm, EPS, weight)
        elif form == "gated":
            kernels.norm_gated(x, self.norm, EPS, weight)
        else:
            rope = Rope(self._rope.cos[:m], self._rope.sin[:m])
            slots = self._kv_slots[:m]
            kernels.norm_qkv(x, self.norm, EPS, weight, rope, self.product.heads, slots, self._k, self._v)

    def error(self, kernels: SkinnyProducts, m: int) -> float:
        """Of the first weight's product, relative, against float32: added to `residual`, or plain."""
        x, weight, before = self.x[:m], self.weights[0], self.residual[:m]
        expected = x.float() @ weight.float().T
        if self.product.form == "add":
            out, expected = before.clone(), before.float() + expected
            kernels.linear_add(x, weight, out)
        else:
            out = kernels.linear(x, weight)
        return float((out.float() - expected).norm() / expected.norm())

    def microseconds(self, call: Callable[[Tensor, Tensor], object], m: int) -> float:
        """Of one call(weight, residual [m, n]): the median over replays of a graph of many."""
        residual = self.residual[:m].clone()
        launches = max(len(self.weights), GRAPH_LAUNCHES)

        def all_launches() -> None:
            for i in range(launches):
                call(self.weights[i % len(self.weights)], residual)

        all_launches()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_launches()
        graph.replay()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        times: list[float] = []
        for _ in range(REPLAYS):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / launches)
        return statistics.median(times)


def only(tile: Tile, product: Product) -> SkinnyProducts:
    """The kernels with `tile` for any number of rows."""
    return SkinnyProducts(torch.device("cuda"), DTYPE, {(product.n, product.k): (tile,) * len(WIDTHS)})


def jobs(product: Product) -> Iterator[tuple[int, Tile]]:
    """Every width with every tile to try."""
    for width in WIDTHS:
        for tile in candidates(product.n, product.k, width, fused=product.form != "add"):
            yield width, tile


def compile_share(wanted: list[Product], share: int, shares: int) -> None:
    """Run every `shares`-th job once, so that Triton's cache on disk holds its kernels."""
    at = 0
    for product in wanted:
        bench = Bench(product, copies=1)
        for width, tile in jobs(product):
            at += 1
            if at % shares == share:
                bench.run(only(tile, product), width, bench.weights[0], bench.residual[:width])


def compile_all(seconds: float) -> None:
    """This command once for each core, every one with its share of the jobs."""
    shares = os.cpu_count() or 1
    command = [sys.executable, "-m", "benchmarks.tune_gemm", *sys.argv[1:], "--share"]
    children = [subprocess.Popen([*command, f"{share}/{shares}"]) for share in range(shares)]
    try:
        for child in children:
            child.wait(timeout=seconds)
    finally:
        for child in children:
            child.kill()


def tune(product: Product) -> Tuned:
    """Try every tile at every width. Raises `RuntimeError` if the fastest computes something else."""
    bench = Bench(product, copies=max(2, CACHE_BYTES // (2 * product.n * product.k)))
    small_kernels = SMALL_KERNEL * UNFUSED[product.form]
    best: dict[int, tuple[float, Tile | None]] = {}
    cublas = []
    for width in WIDTHS:
        cublas.append(bench.microseconds(partial(_cublas, bench.x[:width]), width))
        best[width] = cublas[-1] + small_kernels, None
    for width, tile in jobs(product):
        kernels = only(tile, product)
        cost = bench.microseconds(partial(bench.run, kernels, width), width)
        cost += 0.0 if isinstance(tile, HeldTile) else small_kernels
        best[width] = min(best[width], (cost, tile), key=lambda pair: pair[0])
    for width, (_, fastest) in best.items():
        plain = product.form == "add" or not isinstance(fastest, HeldTile)
        if fastest and plain and not bench.error(only(fastest, product), width) < MAX_ERROR:
            raise RuntimeError(f"{product}, {width} rows: the result of {fastest} is wrong")
    return Tuned(product, tuple(best[width][1] for width in WIDTHS), [best[width][0] for width in WIDTHS], cublas)


def _cublas(x: Tensor, weight: Tensor, _: Tensor) -> None:
    F.linear(x, weight)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(DTYPE)


def _line(tuned: Tuned) -> str:
    """An entry of the table, as Python."""
    product = tuned.product
    tiles = ", ".join(repr(tile) for tile in tuned.tiles)
    times = ", ".join(f"{ours:.1f} {cublas:.1f}" for ours, cublas in zip(tuned.ours, tuned.cublas, strict=True))
    return f"({product.n}, {product.k}): ({tiles}),  # {product.form}; ours, cuBLAS: {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--tp", default="1,2")
    parser.add_argument("--seconds", type=float, default=600, help="no weight is begun after this time")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.monotonic()
    wanted = products(options.models.split(","), [int(tp) for tp in options.tp.split(",")])
    if options.share:
        share, shares = options.share.split("/")
        compile_share(wanted, int(share), int(shares))
        return
    compile_all(options.seconds)
    figures = []
    for product in wanted:
        if time.monotonic() - started > options.seconds:
            print(f"no time left for {product}", file=sys.stderr)
            break
        tuned = tune(product)
        figures.append(dataclasses.asdict(tuned))
        print(_line(tuned), flush=True)
    record("tune_gemm", {"weights": figures})


if __name__ == "__main__":
    main()
