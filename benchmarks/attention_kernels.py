"""Attention of one layer of Llama 3.1 8B on a GPU, against what the arithmetic and the memory allow.

    python -m benchmarks.attention_kernels [--page-size 64] [--cases prefill_1x8192 ...] [--peer 'COMMAND']

Each case runs as a CUDA graph over several sets of inputs in turn, so that no set is left in the L2 cache; the median
counts. `backend` is the whole path of `TritonBackend`; `hopper` the Gluon kernel alone, for rows of more than four new
tokens. The peer is a command that prints lines of JSON, with "case" and "fa3_us"; it runs first.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks import peer
from benchmarks.graph_timing import microseconds
from benchmarks.report import record
from corellm.kernels import Backend, load_backend
from corellm.kernels.attention_work import plan_work
from corellm.kernels.hopper_prefill import TILE, HopperPrefill, supports
from corellm.kernels.inputs import Heads, Rows

HEADS = Heads(32, 8, 128)
DTYPE = torch.bfloat16
PEER_SECONDS = 240.0
SET_BYTES = 200 << 20  # inputs that are gone through between two uses of one set: several times an L2 cache
_RAGGED = random.Random(0)

Case = list[tuple[int, int]]  # rows of (new tokens, context)
CASES: dict[str, Case] = {
    "decode_b1_l640": [(1, 640)],
    "decode_b1_l4096": [(1, 4096)],
    "decode_b1_l131072": [(1, 131072)],
    "decode_b16_l2048": [(1, 2048)] * 16,
    "decode_b64_l640": [(1, 640)] * 64,
    "decode_b64_l1024": [(1, 1024)] * 64,
    "decode_b128_l512": [(1, 512)] * 128,
    "decode_b256_l1024": [(1, 1024)] * 256,
    "decode_b256_ragged": [(1, _RAGGED.randint(100, 2048)) for _ in range(256)],
    "decode_b8_l32768": [(1, 32768)] * 8,
    "prefill_1x8192": [(8192, 8192)],
    "prefill_8x1024": [(1024, 1024)] * 8,
    "prefill_chunk2048_at_30720": [(2048, 32768)],
    "suffix_16_at_8192": [(16, 8208)],
    "suffix_128_at_32640": [(128, 32768)],
    "mixed_255dec_1x2048": [(1, _RAGGED.randint(100, 2048)) for _ in range(255)] + [(2048, 2048)],
    "mixed_128dec_4x512": [(1, _RAGGED.randint(100, 2048)) for _ in range(128)] + [(512, 512)] * 4,
}


class Inputs:
    """q, k and v of `sets` equal batches over blocks in random order, and their block table."""

    def __init__(self, case: Case, page_size: int) -> None:
        new, contexts = (np.array(column) for column in zip(*case, strict=True))
        self.rows = Rows(np.arange(len(case)), np.concatenate(([0], np.cumsum(new))), contexts)
        needed = -(-contexts // page_size)
        blocks = int(needed.sum()) + 1
        order = torch.randperm(blocks - 1, device="cuda").int()
        self.table = torch.full((len(case), int(needed.max())), blocks - 1, dtype=torch.int32, device="cuda")
        for row, (count, stop) in enumerate(zip(needed, needed.cumsum(), strict=True)):
            self.table[row, :count] = order[stop - count : stop]
        cache = (blocks, page_size, HEADS.kv, HEADS.dim)
        size = 4 * blocks * page_size * HEADS.kv * HEADS.dim
        self.sets = [
            tuple(torch.randn(shape, device="cuda", dtype=DTYPE) for shape in ((int(new.sum()), 32, 128), cache, cache))
            for _ in range(2 + SET_BYTES // size)
        ]


def backend_calls(backend: Backend, inputs: Inputs, page_size: int) -> list[Callable[[], object]]:
    plan = backend.plan_attention(inputs.rows, HEADS, page_size)
    attend = plan.bind(torch.from_numpy(plan.words).cuda(), inputs.table)
    return [lambda q=q, k=k, v=v: attend(q, k, v) for q, k, v in inputs.sets]  # type: ignore[misc]


def hopper_calls(inputs: Inputs, page_size: int) -> list[Callable[[], object]]:
    """Without the merge of split tiles."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    long = np.flatnonzero(np.diff(inputs.rows.starts) > 4)
    per_tile = TILE.block_m // HEADS.group
    work = plan_work(inputs.rows, long, tokens_per_tile=per_tile, tile=TILE, programs=sms // HEADS.kv)
    items = torch.from_numpy(work.items).cuda()
    count = torch.tensor([len(items)], dtype=torch.int32, device="cuda")
    parts = (max(work.slots, 1), HEADS.kv, TILE.block_m)
    partials, stats = torch.empty(*parts, HEADS.dim, device="cuda"), torch.empty(parts, device="cuda")
    prefill = HopperPrefill(HEADS, page_size, sms)

    def call(q: Tensor, k: Tensor, v: Tensor) -> None:
        prefill.run(q, k, v, q.new_empty(len(q), 4096), items, count, inputs.table, partials, stats)

    return [lambda q=q, k=k, v=v: call(q, k, v) for q, k, v in inputs.sets]  # type: ignore[misc]


def measure(case: Case, page_size: int) -> dict[str, float]:
    inputs = Inputs(case, page_size)
    backend = load_backend("triton", torch.device("cuda", 0), DTYPE)
    found = {"backend_us": microseconds(backend_calls(backend, inputs, page_size))}
    capability = torch.cuda.get_device_capability()
    if max(new for new, _ in case) > 4 and supports(HEADS, DTYPE, page_size, capability):
        found["hopper_us"] = microseconds(hopper_calls(inputs, page_size))
    operations = sum(4 * HEADS.count * HEADS.dim * (new * context - new * (new - 1) / 2) for new, context in case)
    read = sum(4 * HEADS.kv * HEADS.dim * context for _, context in case)
    seconds = found["backend_us"] * 1e-6
    return found | {"tflop_s": operations / seconds / 1e12, "tb_s": read / seconds / 1e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peer", help="command that measures the peer")
    given = parser.parse_args()
    lines = peer.lines(given.peer, PEER_SECONDS) if given.peer else []
    theirs = {line["case"]: line["fa3_us"] for line in lines if "fa3_us" in line}
    torch.manual_seed(0)
    found = {}
    for name in given.cases:
        measured = measure(CASES[name], given.page_size)
        if name in theirs:
            measured["ratio"] = theirs[name] / measured["backend_us"]
        found[name] = {key: round(value, 2) for key, value in measured.items()}
        print(f"{name:28} " + "  ".join(f"{key} {value:8}" for key, value in found[name].items()), flush=True)
        torch.cuda.empty_cache()
    record("attention_kernels", {"page_size": given.page_size, "cases": found, "peer": lines})


if __name__ == "__main__":
    main()
