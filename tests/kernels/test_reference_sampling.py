"""Sampling kernels against naive Python and against the distributions they are to draw from."""

from __future__ import annotations

import math

import pytest
import torch

from corellm.kernels import reference_sampling as kernels
from tests.support import sampling_checks as checks
from tests.support.sampling_checks import Operations, Rows

OPS = Operations.reference()


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 1), (-1, 7), (2**63 - 1, 131071), (-(2**63), 3)])
def test_noise_is_the_documented_function(seed: int, position: int) -> None:
    noise = kernels.gumbel(torch.tensor([seed]), torch.tensor([position]), 2000)[0]
    expected = torch.from_numpy(checks.noise(seed, position, 2000))
    torch.testing.assert_close(noise.double(), expected, rtol=1e-4, atol=1e-4)


def test_noise_is_standard_gumbel_and_finite() -> None:
    noise = kernels.gumbel(torch.arange(64), torch.full((64,), 9), 16384).double().flatten()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    ordered = noise.sort().values
    cumulative = torch.exp(-torch.exp(-ordered))
    distance = (cumulative - (torch.arange(len(ordered)) + 0.5) / len(ordered)).abs().max().item()
    assert distance < 1.63 / math.sqrt(len(ordered))  # Kolmogorov-Smirnov at 1 %


@pytest.mark.parametrize("vary", ["seed", "seed_high", "position"])
def test_draws_follow_softmax_over_seeds_and_positions(vary: str) -> None:
    draws, vocab = 20_000, 12
    logits = torch.linspace(-2, 2, vocab)
    steps, fixed = torch.arange(draws), torch.full((draws,), 5)
    seeds = {"seed": steps, "seed_high": steps << 32, "position": fixed}[vary]
    tokens, _ = kernels.sample(
        logits.expand(draws, -1), torch.ones(draws), seeds, steps if vary == "position" else fixed
    )
    expected = logits.double().softmax(0) * draws
    chi_square = ((tokens.bincount(minlength=vocab) - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.3  # 11 degrees of freedom, 0.1 %


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbouring_draws_are_independent(vary: str) -> None:
    draws, vocab = 32_000, 4
    steps, fixed = torch.arange(draws), torch.full((draws,), 11)
    seeds, positions = (steps, fixed) if vary == "seed" else (fixed, steps)
    tokens, _ = kernels.sample(torch.zeros(draws, vocab), torch.ones(draws), seeds, positions)
    pairs = (tokens[:-1] * vocab + tokens[1:]).bincount(minlength=vocab**2).double()
    expected = (draws - 1) / vocab**2
    assert ((pairs - expected) ** 2 / expected).sum().item() < 37.7  # 15 degrees of freedom, 0.1 %


def test_draws_do_not_depend_on_how_rows_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(5))
    seeds, positions = torch.arange(9) * 31, torch.arange(9) % 3
    temperatures = torch.linspace(0.5, 2, 9)
    expected = (logits / temperatures[:, None] + kernels.gumbel(seeds, positions, 40)).argmax(-1)
    for block in (1, 80, 1000):
        monkeypatch.setattr(kernels, "NOISE_BLOCK", block)
        assert torch.equal(kernels.sample(logits, temperatures, seeds, positions)[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_the_argmax_with_noise(dtype: torch.dtype) -> None:
    checks.check_sample(OPS, Rows.make(40, 3000, dtype, padding=24))


def test_ties_and_excluded_tokens() -> None:
    checks.check_ties(OPS, 3000)


def test_a_broken_row_fails_alone() -> None:
    checks.check_faults(OPS, Rows.make(16, 3000, torch.float32, padding=8))


def naive_kept(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Min-p, then top-k, then the smallest likeliest set of at least top-p, by plain sorting."""
    peak = max(logits)
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = [i for i in order if math.exp(logits[i] - peak) >= min_p]
    order = order[:top_k] if top_k > 0 else order
    total = sum(math.exp(logits[i] - peak) for i in order)
    kept, mass = set(), 0.0
    for i in order:
        if kept and mass >= top_p:
            break
        kept.add(i)
        mass += math.exp(logits[i] - peak) / total
    return kept


@pytest.mark.parametrize("candidates", [1024, 16])
def test_filters_keep_what_the_naive_version_keeps(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 candidates of 200, some rows find their threshold among them and some need the whole vocabulary."""
    monkeypatch.setattr(kernels, "CANDIDATES", candidates)
    generator = torch.Generator().manual_seed(1)
    cases = [(k, p, m) for k in (0, 1, 3, 40, 500) for p in (1.0, 0.95, 0.3, 0.001) for m in (0.0, 0.02, 0.5, 1.0)]
    logits = torch.randn(len(cases), 200, generator=generator) * 2
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cases, strict=True))
    filtered = kernels.mask_unlikely(logits.clone(), top_k, top_p, min_p)
    for row, case in enumerate(cases):
        kept = set(torch.isfinite(filtered[row]).nonzero().flatten().tolist())
        assert kept == naive_kept(logits[row].double().tolist(), *case), case
        assert torch.equal(filtered[row, list(kept)], logits[row, list(kept)])


def test_filters_on_rows_that_are_hard_to_truncate() -> None:
    checks.check_truncation(OPS, 3000)


@pytest.mark.parametrize("top_k", [2000, 5000])
def test_top_p_is_a_share_of_all_that_top_k_leaves(top_k: int) -> None:
    """More than the candidates looked at first, and more than there are."""
    logits = 0.01 * torch.randn(1, 3000, generator=torch.Generator().manual_seed(4))
    filtered = kernels.mask_unlikely(logits.clone(), torch.tensor([top_k]), torch.tensor([0.3]), torch.tensor([0.0]))
    least = checks.likely_from(logits[0].double().numpy(), top_k, 0.3, 0.0)
    assert filtered.isfinite().sum() == (logits >= least).sum()


def test_rows_without_limits_stay_as_they_are() -> None:
    """The second has a tail that rounding might cut off."""
    logits = torch.cat((torch.randn(1, 1000), torch.cat((torch.tensor([[40.0]]), torch.zeros(1, 999)), dim=1)))
    off = torch.tensor([0, 0, 3]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.0])
    filtered = kernels.mask_unlikely(torch.cat((logits, logits[:1])), *off)
    assert torch.equal(filtered[:2], logits)
    assert filtered[2].isfinite().sum() == 3


def test_penalties_are_the_naive_ones() -> None:
    checks.check_penalties(OPS, 50, 40)


@pytest.mark.parametrize("vocab", [64, 70, 1])
def test_bitmask(vocab: int) -> None:
    checks.check_bitmask(OPS, vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_logprobs_are_of_the_softmax(dtype: torch.dtype) -> None:
    checks.check_top_logprobs(500, dtype)
