"""The Hopper prefill kernel without a GPU: what it computes, emulated in numpy, and that it compiles for sm_90."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from corellm.kernels import hopper_prefill
from corellm.kernels.attention_work import ITEM_FIELDS, AttentionWork, plan_work
from corellm.kernels.hopper_prefill import TILE, supports
from corellm.kernels.inputs import Heads
from tests.kernels.emulated_gluon import Descriptor, Pointer, emulated, launch
from tests.support.attention_cases import AttentionCase

SOURCE = Path(hopper_prefill.__file__).with_name("gluon_prefill.py")
COMPILES = ((3, 6), (3, 9))  # releases of Triton whose Gluon takes the kernel; it has run with the first
LLAMA_8B = Heads(32, 8, 128)
SHARED_MEMORY = 227 << 10  # bytes that a program may use
CASES = [
    ([(0, 300)], Heads(4, 1, 128), 64, 3),
    ([(0, 40), (100, 33), (250, 200), (127, 1), (128, 128)], Heads(8, 2, 128), 16, 5),  # units of many lengths
    ([(0, 1)], Heads(4, 2, 128), 128, 7),  # more programs than units
    ([(900, 20), (3, 5)], Heads(4, 1, 128), 32, 40),  # split KV
    ([(700, 16), (0, 64)], Heads(16, 1, 128), 128, 20),
    ([(300, 150)], Heads(2, 2, 128), 64, 4),  # one head a group: a tile spans more tokens than positions
]


def plan(case: AttentionCase, programs: int) -> AttentionWork:
    every = np.arange(len(case.rows.slots))
    per_tile = TILE.block_m // case.heads.group
    programs = max(1, programs // case.heads.kv)
    return plan_work(case.rows, every, tokens_per_tile=per_tile, tile=TILE, programs=programs)


def emulate(case: AttentionCase, work: AttentionWork, programs: int) -> np.ndarray:
    """Output [n, heads, head_dim] of the kernel, splits merged; memory that nothing wrote is NaN."""
    module, heads, page_size = emulated(SOURCE), case.heads, case.k.shape[1]
    parts = (max(work.slots, 1), heads.kv, TILE.block_m)
    out = np.full((len(case.q), heads.count, heads.dim), np.nan, np.float32)
    partials, stats = np.full((*parts, heads.dim), np.nan, np.float32), np.full(parts, np.nan, np.float32)
    stale = np.full((3, ITEM_FIELDS), -(1 << 30), np.int32)  # what lies behind the items, `count` says, is no work
    memory = (out, partials, stats, np.concatenate((work.items, stale)), np.array([len(work.items)]))
    table = case.block_table.numpy()
    q_box = (TILE.block_m // 2 // heads.group, heads.group, heads.dim)
    cache = [
        Descriptor(x.numpy().reshape(-1, heads.kv * heads.dim), (min(page_size, TILE.block_n), heads.dim))
        for x in (case.k, case.v)
    ]
    launch(
        module.prefill_attention_kernel, programs, Descriptor(case.q.numpy(), q_box), *cache,
        *(Pointer(x.reshape(-1)) for x in (*memory, table)), table.shape[1], heads.scale * math.log2(math.e),
        HEADS=heads.count, KV_HEADS=heads.kv, PAGE=page_size,
    )  # fmt: skip
    for token, local, first, splits in work.merges().tolist():
        for head in range(heads.count):
            group, row = head // heads.group, local * heads.group + head % heads.group
            stat = stats[first : first + splits, group, row]
            weights = np.exp2(stat - stat.max())
            out[token, head] = weights / weights.sum() @ partials[first : first + splits, group, row]
    return out


@pytest.mark.parametrize(("rows", "heads", "page_size", "programs"), CASES)
def test_attention_of_a_mix(rows: list[tuple[int, int]], heads: Heads, page_size: int, programs: int) -> None:
    case = AttentionCase.make(rows, heads, page_size, seed=page_size)
    work = plan(case, programs)
    assert (work.slots > 0) == (programs >= 20)
    actual = torch.from_numpy(emulate(case, work, programs)).double()
    for tokens, truth in case.truth():
        error = (actual[tokens] - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert error.max() < 1e-5


def test_no_work_is_no_deadlock() -> None:
    case = AttentionCase.make([(0, 3)], Heads(4, 1, 128), 64)
    work = plan(case, 2)
    nothing = AttentionWork(work.items[:0], 0)
    assert np.isnan(emulate(case, nothing, 2)).all()


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "_triton_release", lambda: (3, 6))
    hopper = (9, 0)
    for heads in (LLAMA_8B, Heads(64, 8, 128), Heads(8, 8, 128), Heads(64, 1, 128)):
        assert all(supports(heads, torch.bfloat16, page_size, hopper) for page_size in (64, 128, 256))
    assert supports(LLAMA_8B, torch.float16, 64, hopper)
    assert not supports(LLAMA_8B, torch.float32, 64, hopper)
    assert not any(supports(LLAMA_8B, torch.bfloat16, 64, other) for other in ((8, 0), (8, 9), (10, 0)))
    assert not any(supports(LLAMA_8B, torch.bfloat16, page_size, hopper) for page_size in (16, 48))
    assert not any(supports(heads, torch.bfloat16, 64, hopper) for heads in (Heads(32, 8, 64), Heads(24, 8, 128)))
    monkeypatch.setattr(hopper_prefill, "_triton_release", lambda: (3, 9))
    assert not supports(LLAMA_8B, torch.bfloat16, 64, hopper)


@pytest.fixture(scope="module")
def _empty_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize(("element", "page_size"), [("bf16", 64), ("fp16", 128)])
def test_compiles_for_hopper(element: str, page_size: int) -> None:
    triton = pytest.importorskip("triton")
    if hopper_prefill._triton_release() not in COMPILES:
        pytest.skip(f"Gluon of Triton {triton.__version__} is not one that the kernel is written for")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from corellm.kernels import gluon_prefill as kernels

    kernel = kernels.prefill_attention_kernel
    group, kv_box = LLAMA_8B.group, [min(page_size, TILE.block_n), 128]
    boxes = {"q": ([TILE.block_m // 2 // group, group, 128], kernels.Q_LAYOUT)}
    boxes |= {"k": (kv_box, kernels.KV_LAYOUT), "v": (kv_box, kernels.KV_LAYOUT)}
    sizes = {"HEADS": LLAMA_8B.count, "KV_HEADS": LLAMA_8B.kv, "PAGE": page_size}
    signature = {name: f"tensordesc<{element}{box},{layout!r}>" for name, (box, layout) in boxes.items()}
    signature |= {"out": f"*{element}", "partials": "*fp32", "stats": "*fp32", "items": "*i32", "count": "*i32"}
    signature |= {"table": "*i32", "table_stride": "i32", "scale": "fp32"} | dict.fromkeys(sizes, "constexpr")
    assert list(signature) == list(kernel.arg_names)
    names = list(signature)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = GluonASTSource(kernel, signature, {(names.index(k),): v for k, v in sizes.items()}, aligned)
    options = {"num_warps": TILE.warps, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY
    # Triton 3.6 can take a value that only bounds inner loops for one that the outer loop never changes. So what is
    # read of the first item must be read of each next one.
    consumer = compiled.asm["ttgir"].split("partition0(")[1].split("partition1(")[0]
    assert consumer.count("tt.load") == 2 * 6
