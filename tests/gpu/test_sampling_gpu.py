"""Sampling on a GPU against float64, without waiting for the device, and captured in a CUDA graph."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from corellm.kernels import reference_sampling
from tests.support import sampling_checks as checks
from tests.support.sampling_checks import Operations, Rows

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

VOCAB = 128256
LONGEST = 700


@pytest.fixture(scope="module")
def ops() -> Operations:
    return Operations.triton()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab", "padding"), [(VOCAB, 0), (VOCAB, 64), (49153, 7)])
def test_tokens_are_the_argmax_with_noise(ops: Operations, vocab: int, padding: int, dtype: torch.dtype) -> None:
    checks.check_sample(ops, Rows.make(40, vocab, dtype, "cuda", padding))
    checks.check_faults(ops, Rows.make(16, vocab, dtype, "cuda", padding))


def test_tokens_are_the_reference_s(ops: Operations) -> None:
    rows = Rows.make(256, VOCAB, torch.float32, "cuda")
    differ = ops.sample(*rows)[0] != reference_sampling.sample(*rows)[0]
    assert differ.sum() <= 1  # noise that differs in its last bits may turn a near-tie


@pytest.mark.parametrize("sign", [-1, 1])
def test_noise_is_the_reference_s_down_to_the_rarest(ops: Operations, sign: int) -> None:
    checks.check_noise(ops, sign, "cuda")


@pytest.mark.parametrize("vocab", [VOCAB, 5001, 40])
def test_ties_truncation_penalties_masks_and_logprobs(ops: Operations, vocab: int) -> None:
    checks.check_ties(ops, vocab, "cuda")
    checks.check_truncation(ops, vocab, "cuda", share=5 if vocab == VOCAB else 1)
    checks.check_penalties(ops, vocab, 40, "cuda")
    checks.check_penalties(ops, vocab, 5000, "cuda")
    checks.check_bitmask(ops, vocab, "cuda")
    checks.check_top_logprobs(vocab, torch.bfloat16, "cuda")


class Inputs(NamedTuple):
    """What a step of s rows gives the sampler. The tail of `wide` is padding."""

    wide: Tensor
    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    table: Tensor
    slots: Tensor
    prompt_lengths: Tensor
    penalties: Tensor
    mask: Tensor

    @classmethod
    def make(cls, rows: int, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)

        def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.randint(low, high, shape, generator=generator, device="cuda", dtype=dtype)

        def pick(*values: float) -> Tensor:
            return torch.tensor(values, device="cuda")[integers(0, len(values), rows)]

        return cls(
            wide=(3 * torch.randn(rows, VOCAB + 64, generator=generator, device="cuda")).bfloat16(),
            temperatures=pick(0.0, 0.6, 1.0),
            seeds=integers(0, 2**62, rows),
            positions=integers(1, LONGEST, rows),
            top_k=pick(0, 0, 1, 50, 3000).long(),
            top_p=pick(1.0, 0.9, 0.99),
            min_p=pick(0.0, 0.0, 0.05),
            table=integers(0, VOCAB, rows + 5, LONGEST, dtype=torch.int32),
            slots=torch.randperm(rows + 5, generator=generator, device="cuda")[:rows],
            prompt_lengths=integers(0, 20, rows),
            penalties=torch.stack((pick(1.0, 1.2), pick(0.0, 0.5), pick(0.0, 0.5))),
            mask=integers(-(2**31), 2**31 - 1, rows, VOCAB // 32, dtype=torch.int32),
        )


def run_all(ops: Operations, given: Inputs) -> tuple[Tensor, ...]:
    """Every operation, in a sampler's order."""
    raw = given.wide[:, :VOCAB]
    draws = given.seeds, given.positions
    plain, failed = ops.sample(raw, given.temperatures, *draws)
    logits = raw.float()
    lengths = given.positions
    logits = ops.penalize(logits, given.table, given.slots, lengths, given.prompt_lengths, given.penalties)
    logits = ops.apply_bitmask(logits, given.mask)
    scaled = logits / given.temperatures.clamp(min=0.5)[:, None]
    truncated = ops.mask_unlikely(scaled, given.top_k, given.top_p, given.min_p)
    edited, _ = ops.sample(truncated, torch.ones_like(given.temperatures), *draws)
    sampled, _, values = reference_sampling.top_logprobs(raw, edited, 20)  # which of equal ids come first is open
    return plain, failed, truncated, edited, sampled, values


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_nothing_waits_for_the_device(ops: Operations, rows: int) -> None:
    given = Inputs.make(rows, seed=rows)
    expected = run_all(ops, given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run_all(ops, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, before in zip(found, expected, strict=True):
        assert torch.equal(ours, before)


@pytest.mark.parametrize("rows", [1, 17, 256])
def test_one_graph_serves_other_inputs(ops: Operations, rows: int) -> None:
    static = Inputs.make(rows, seed=0)
    run_all(ops, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run_all(ops, static)
    for seed in (1, 2, 3):
        given = Inputs.make(rows, seed)
        for to, source in zip(static, given, strict=True):
            to.copy_(source)
        graph.replay()
        for replayed, eager in zip(outputs, run_all(ops, given), strict=True):
            assert torch.equal(replayed, eager)


def test_other_sizes_and_places_compile_nothing(ops: Operations) -> None:
    from corellm.kernels import triton_logits, triton_sampling, triton_truncation

    def compiled() -> int:
        kernels = (
            triton_sampling.best_of_block_kernel,
            triton_sampling.best_of_row_kernel,
            triton_truncation.summarize_kernel,
            triton_truncation.threshold_kernel,
            triton_truncation.mask_kernel,
            triton_logits.penalize_kernel,
            triton_logits.apply_bitmask_kernel,
        )
        return sum(len(kernel.device_caches[0][0]) for kernel in kernels)

    run_all(ops, Inputs.make(2, seed=0))
    before = compiled()
    assert before >= 8
    for rows in (1, 5, 16, 31):
        run_all(ops, Inputs.make(rows, seed=rows))
        longer = Inputs.make(rows + 1, seed=rows)
        shifted = Inputs(*(field[1:] for field in longer))._replace(penalties=longer.penalties[:, 1:].contiguous())
        run_all(ops, shifted)
    assert compiled() == before
