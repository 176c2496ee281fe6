"""Sampling kernels against naive Python and against the distributions they are to draw from."""

from __future__ import annotations

import math

import pytest
import torch

from corellm.kernels import reference_sampling as kernels

WRAP = 0xFFFFFFFF


def naive_noise(seed: int, position: int, token: int) -> float:
    """The formula of `kernels.gumbel` in Python's integers and double precision."""

    def mix(x: int, key: int = 0) -> int:
        x ^= x >> 16
        x = (x * 0x85EBCA6B + key) & WRAP
        x ^= x >> 13
        x = (x * 0xC2B2AE35) & WRAP
        return x ^ (x >> 16)

    golden = 0x9E3779B9
    low, high = seed & WRAP, (seed >> 32) & WRAP
    k0 = mix((mix(mix((low + golden) & WRAP) ^ high) + position * golden) & WRAP)
    k1 = mix((k0 + golden) & WRAP)
    x = mix((token * golden + k0) & WRAP, key=k1)
    u = min(((x & 0x7FFFFFFF) + 0.5) / 2**31, 1 - 2**-24)
    return -math.log(-math.log1p(-u))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 1), (-1, 7), (2**63 - 1, 131071), (-(2**63), 3)])
def test_noise_is_the_documented_function(seed: int, position: int) -> None:
    noise = kernels.gumbel(torch.tensor([seed]), torch.tensor([position]), 2000)[0]
    expected = torch.tensor([naive_noise(seed, position, token) for token in range(2000)])
    torch.testing.assert_close(noise, expected, rtol=1e-4, atol=1e-4)


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
    tokens = kernels.draw(logits.expand(draws, -1), seeds, steps if vary == "position" else fixed)
    expected = logits.double().softmax(0) * draws
    chi_square = ((tokens.bincount(minlength=vocab) - expected) ** 2 / expected).sum().item()
    assert chi_square < 31.3  # 11 degrees of freedom, 0.1 %


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_neighbouring_draws_are_independent(vary: str) -> None:
    draws, vocab = 32_000, 4
    steps, fixed = torch.arange(draws), torch.full((draws,), 11)
    seeds, positions = (steps, fixed) if vary == "seed" else (fixed, steps)
    tokens = kernels.draw(torch.zeros(draws, vocab), seeds, positions)
    pairs = (tokens[:-1] * vocab + tokens[1:]).bincount(minlength=vocab**2).double()
    expected = (draws - 1) / vocab**2
    assert ((pairs - expected) ** 2 / expected).sum().item() < 37.7  # 15 degrees of freedom, 0.1 %


def test_draws_do_not_depend_on_how_rows_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(5))
    seeds, positions = torch.arange(9) * 31, torch.arange(9) % 3
    expected = (logits + kernels.gumbel(seeds, positions, 40)).argmax(-1)
    for block in (1, 80, 1000):
        monkeypatch.setattr(kernels, "NOISE_BLOCK", block)
        assert torch.equal(kernels.draw(logits, seeds, positions), expected)


def test_draw_never_takes_an_excluded_token() -> None:
    logits = torch.full((500, 50), -torch.inf)
    logits[:, 17] = -1e4
    assert (kernels.draw(logits, torch.arange(500), torch.arange(500)) == 17).all()


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
    filtered = kernels.mask_unlikely(logits, top_k, top_p, min_p)
    for row, case in enumerate(cases):
        kept = set(torch.isfinite(filtered[row]).nonzero().flatten().tolist())
        assert kept == naive_kept(logits[row].double().tolist(), *case), case
        assert torch.equal(filtered[row, list(kept)], logits[row, list(kept)])


def test_top_p_of_one_keeps_the_whole_tail() -> None:
    logits = torch.cat((torch.full((1, 1), 40.0), torch.zeros(1, 999)), dim=1)
    off = torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0])
    assert torch.equal(kernels.mask_unlikely(logits, *off), logits)


def test_penalties_are_the_naive_ones() -> None:
    generator = torch.Generator().manual_seed(2)
    vocab, lengths, prompts = 20, [9, 1, 6, 4], [4, 1, 0, 4]
    penalties = torch.tensor([[1.3, 0.5, 1.0, 2.0], [0.4, 1.0, -0.7, 0.0], [0.2, 0.0, 1.5, 1.0]])
    logits = torch.randn(4, vocab, generator=generator)
    tokens = torch.randint(0, 6, (4, 9), generator=generator, dtype=torch.int32)
    expected = logits.double().clone()
    for row in range(4):
        repetition, presence, frequency = penalties[:, row].tolist()
        known = tokens[row, : lengths[row]].tolist()
        outputs = known[prompts[row] :]
        for token in set(known):
            value = expected[row, token].item()
            expected[row, token] = value / repetition if value > 0 else value * repetition
        for token in set(outputs):
            expected[row, token] -= presence + frequency * outputs.count(token)
    actual = kernels.penalize(logits, tokens, torch.tensor(lengths), torch.tensor(prompts), penalties)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_rows_are_found(bad: float) -> None:
    logits = torch.randn(3, 1000)
    logits[1, 777] = bad
    assert kernels.non_finite(logits).tolist() == [False, True, False]
