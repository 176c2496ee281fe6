"""Sampling operations, of any backend on any device, against formulas in numpy's float64 and Python's integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corellm.kernels import reference_sampling

WRAP = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
SLACK = 1e-5  # what float32 may be off, as a share


class Operations(NamedTuple):
    sample: Callable[..., tuple[Tensor, Tensor]]
    mask_unlikely: Callable[..., Tensor]
    penalize: Callable[..., Tensor]
    apply_bitmask: Callable[..., Tensor]

    @classmethod
    def reference(cls) -> Operations:
        ops = reference_sampling
        return cls(ops.sample, ops.mask_unlikely, ops.penalize, ops.apply_bitmask)

    @classmethod
    def triton(cls) -> Operations:
        from corellm.kernels import triton_logits, triton_sampling, triton_truncation

        edits = triton_logits.penalize, triton_logits.apply_bitmask
        return cls(triton_sampling.sample, triton_truncation.mask_unlikely, *edits)


def noise(seed: int, position: int, vocab: int) -> NDArray[np.float64]:
    """The formula of `reference_sampling.gumbel` in integers of 64 bits and double precision: [vocab]."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B & WRAP
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & WRAP
        return x ^ (x >> 16)

    low, high = seed & WRAP, (seed >> 32) & WRAP
    k0 = mix((mix(mix((low + GOLDEN) & WRAP) ^ high) + position * GOLDEN) & WRAP)
    k1 = mix((k0 + GOLDEN) & WRAP)
    mask = np.uint64(WRAP)
    x = (np.arange(vocab, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(k0)) & mask
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B) + np.uint64(k1)) & mask
    x = (x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35) & mask
    x = (x ^ (x >> np.uint64(16))) & np.uint64(0x7FFFFFFF)
    u = np.minimum((x.astype(np.float64) + 0.5) / 2**31, 1 - 2**-24)
    return -np.log(-np.log1p(-u))


class Rows(NamedTuple):
    """Arguments of `sample`."""

    logits: Tensor
    temperatures: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def make(cls, count: int, vocab: int, dtype: torch.dtype, device: str = "cpu", padding: int = 0) -> Rows:
        """Rows of every kind of temperature and seed, `padding` columns of NaN apart."""
        generator = torch.Generator().manual_seed(count + vocab)
        wide = torch.full((count, vocab + padding), torch.nan)
        wide[:, :vocab] = 3 * torch.randn(count, vocab, generator=generator)
        temperatures = torch.tensor([0.0, 9e-6, 2e-5, 0.1, 0.6, 1.0, 1.7, 30.0]).repeat(-(-count // 8))[:count]
        seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        positions = torch.randint(2**17, (count,), generator=generator)
        moved = (t.to(device) for t in (wide.to(dtype), temperatures, seeds, positions))
        rows = cls(*moved)
        return rows._replace(logits=rows.logits[:, :vocab])


def check_sample(ops: Operations, rows: Rows) -> None:
    """Each token is the argmax in float64, or so close to it that float32 cannot tell."""
    tokens, failed = ops.sample(*rows)
    assert (tokens.dtype, failed.dtype) == (torch.int64, torch.bool)
    assert not failed.any()
    logits = rows.logits.double().cpu().numpy()
    temperatures, seeds, positions = (column.tolist() for column in rows[1:])
    for row, token in enumerate(tokens.tolist()):
        if temperatures[row] < 1e-5:
            assert token == logits[row].argmax()
        else:
            scores = logits[row] / temperatures[row] + noise(seeds[row], positions[row], logits.shape[1])
            assert scores[token] > scores.max() - 1e-6 * max(10, scores.max())
    warm = torch.tensor(temperatures) >= 0.6
    assert len(tokens.cpu()[warm].unique()) > warm.sum() / 2


def check_noise(ops: Operations, sign: int, device: str = "cpu") -> None:
    """Of two tokens, one made likelier than the other by just a little more or less than their noises differ."""
    seeds = torch.arange(1 << 17)
    noises = reference_sampling.gumbel(seeds, torch.zeros_like(seeds), 2)
    order = noises[:, 0].argsort()
    chosen = torch.cat((order[:15], order[-15:], order[:: 1 << 13]))  # both sides of the switch to a series, and ends
    gap = (noises[chosen, 1] - noises[chosen, 0]).double()
    first = gap + sign * 1e-5 * gap.abs().clamp(min=1)
    logits = torch.stack((first, torch.zeros_like(first)), dim=1).float()
    rows = Rows(logits, torch.ones(len(chosen)), seeds[chosen], torch.zeros_like(chosen))
    tokens, _ = ops.sample(*(argument.to(device) for argument in rows))
    assert (tokens == (0 if sign > 0 else 1)).all()


def check_ties(ops: Operations, vocab: int, device: str = "cpu") -> None:
    """The lowest id of equals, in one block or in two; what is -inf is not taken unless there is nothing else."""
    logits = torch.full((4, vocab), -torch.inf, device=device)
    logits[0, [vocab - 1, 5, vocab // 2, 6]] = 1.0
    logits[1] = 0.25
    logits[2, vocab - 1] = -1e4
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    cold, failed = ops.sample(logits, torch.full((4,), 9e-6, device=device), zeros, zeros)
    assert cold.tolist()[:3] == [5, 0, vocab - 1]
    assert failed.tolist() == [True, False, True, True]
    warm, _ = ops.sample(logits, torch.ones(4, device=device), zeros, zeros)
    assert warm[0].item() in (5, 6, vocab // 2, vocab - 1)
    assert warm[2] == vocab - 1
    assert ((cold >= 0) & (cold < vocab) & (warm >= 0) & (warm < vocab)).all()


def check_faults(ops: Operations, rows: Rows) -> None:
    """NaN or infinity anywhere fails its row alone; only after NaN and +inf there is no token."""
    vocab = rows.logits.shape[1]
    good, _ = ops.sample(*rows)
    spoils = [(torch.nan, 0), (torch.inf, vocab - 1), (-torch.inf, vocab // 2), (torch.nan, vocab - 1), (-torch.inf, 0)]
    for row, (value, column) in enumerate(spoils, start=1):
        rows.logits[row, column] = value
    tokens, failed = ops.sample(*rows)
    assert failed.nonzero().flatten().tolist() == [1, 2, 3, 4, 5]
    expected = good.tolist()
    for row in (1, 2, 4):
        expected[row] = 0
    assert expected[3] != vocab // 2
    assert expected[5] != 0
    assert tokens.tolist() == expected
    rows.logits[6] = torch.nan
    assert ops.sample(*rows)[0][6] == 0


def likely_from(logits: NDArray[np.float64], top_k: int, top_p: float, min_p: float) -> float:
    """The least logit kept, by sorting: min-p, then top-k, then the smallest likeliest set of at least top-p."""
    ordered = np.sort(logits[logits > -np.inf])[::-1]
    weights = np.exp(ordered - ordered[0])
    ordered = ordered[weights >= min(min_p, 1.0)][: top_k or None]
    weights = weights[: len(ordered)]
    if top_p >= 1:
        return float(ordered[-1])
    before = np.concatenate(([0.0], weights.cumsum()[:-1]))
    return float(ordered[before < max(top_p, 1e-30) * weights.sum()][-1])


def truncation_rows(vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Logits [vocab] that are hard to truncate, by what makes them so."""
    normal = torch.randn(vocab, generator=generator)
    spike = 1e-30 * normal
    spike[vocab // 3] = 9.0
    groups = normal.clone()
    groups[:60] += 20
    holes = 2 * normal
    holes[torch.rand(vocab, generator=generator) < 0.9] = -torch.inf
    crossing = normal.abs().log() * 4
    one = torch.full((vocab,), -torch.inf)
    one[7] = -3.0
    return {
        "normal": normal,
        "peaked": 6 * normal,
        "wide": 1000 * normal,
        "negative": normal - 50,
        "ties": (2 * normal).round() / 2,
        "equal": torch.full((vocab,), 0.3),
        "zeros": torch.where(normal > 0, 0.0, -0.0),
        "spike": spike,
        "groups": groups,
        "holes": holes,
        "crossing": crossing,
        "one": one,
    }


LIMITS = [(k, p, m) for k in (0, 1, 5, 60, 10**6) for p in (1.0, 0.95, 0.5, 0.01) for m in (0.0, 0.03, 1.0)]


def check_truncation(ops: Operations, vocab: int, device: str = "cpu", share: int = 1) -> None:
    """Every limit, or one in `share`, on every kind of row: what is kept is all from the right threshold on."""
    kinds = truncation_rows(vocab, torch.Generator().manual_seed(vocab))
    for index, (name, row) in enumerate(kinds.items()):
        asked = LIMITS[index % share :: share]
        limits = [torch.tensor(column, device=device) for column in zip(*asked, strict=True)]
        kept = ops.mask_unlikely(row.repeat(len(asked), 1).to(device), *limits).cpu()
        wide = row.double().numpy()
        for (k, p, m), out in zip(asked, kept, strict=True):
            least = out[out > -torch.inf].min().item()
            assert torch.equal(out, row.masked_fill(row < least, -torch.inf)), (name, k, p, m)
            looser, tighter = (p, p) if p == 1 else (p * (1 + SLACK), p * (1 - SLACK))
            assert likely_from(wide, k, looser, m * (1 - SLACK)) <= least, (name, k, p, m)
            assert least <= likely_from(wide, k, tighter, m * (1 + SLACK)), (name, k, p, m)


def check_penalties(ops: Operations, vocab: int, longest: int, device: str = "cpu") -> None:
    """Rows in any slots; what lies in the table past a row's length is no token of it, nor even of the vocabulary."""
    generator = torch.Generator().manual_seed(longest)
    lengths = torch.tensor([longest, 1, longest // 2, 7, longest // 3, 0])
    prompts = torch.tensor([longest // 2, 1, 0, 3, longest // 3, 0])
    penalties = torch.tensor(
        [[1.3, 0.5, 1.0, 1.0, 2.0, 1.5], [0.4, 1.0, -0.7, 0.0, 0.0, 1.0], [0.2, 0.0, 1.5, 0.0, 1.0, 1.0]]
    )
    rows = len(lengths)
    logits = torch.randn(rows, vocab, generator=generator)
    slots = torch.randperm(rows + 3, generator=generator)[:rows]
    table = torch.randint(-(2**31), 2**31 - 1, (rows + 3, longest), generator=generator, dtype=torch.int32)
    common = torch.randint(0, vocab, (12,), generator=generator, dtype=torch.int32)
    expected = logits.double().clone()
    for row in range(rows):
        length = int(lengths[row])
        ids = torch.randint(0, vocab, (length,), generator=generator, dtype=torch.int32)
        often = torch.rand(length, generator=generator) < 0.5
        ids[often] = common[torch.randint(0, 12, (int(often.sum()),), generator=generator)]
        table[slots[row], :length] = ids
        repetition, presence, frequency = penalties[:, row].tolist()
        outputs = ids[prompts[row] :].tolist()
        for token in set(ids.tolist()):
            value = expected[row, token].item()
            expected[row, token] = value / repetition if value > 0 else value * repetition
        for token in set(outputs):
            expected[row, token] -= presence + frequency * outputs.count(token)
    arguments = (argument.to(device) for argument in (table, slots, lengths, prompts, penalties))
    actual = ops.penalize(logits.clone().to(device), *arguments).cpu()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual[[3, 5]], logits[[3, 5]])


def check_bitmask(ops: Operations, vocab: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(vocab)
    allowed = torch.rand(3, vocab, generator=generator) < torch.tensor([[0.02], [0.5], [1.0]])
    words = math.ceil(vocab / 32)
    bits = np.zeros((3, words * 32), dtype=bool)
    bits[:, :vocab] = allowed.numpy()
    mask = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view("<i4").copy())
    logits = torch.randn(3, vocab, generator=generator)
    masked = ops.apply_bitmask(logits.clone().to(device), mask.to(device)).cpu()
    assert torch.equal(masked, torch.where(allowed, logits, -torch.inf))


def check_top_logprobs(vocab: int, dtype: torch.dtype, device: str = "cpu") -> None:
    logits = (3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(0))).to(dtype)
    tokens = torch.tensor([0, vocab - 1, 3, vocab // 2])
    arguments = logits.to(device), tokens.to(device)
    sampled, ids, values = (result.cpu() for result in reference_sampling.top_logprobs(*arguments, 20))
    truth = logits.double().softmax(-1).log()
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(sampled.double(), truth[torch.arange(4), tokens], **close)
    torch.testing.assert_close(values.double(), truth.sort(descending=True).values[:, :20], **close)
    torch.testing.assert_close(truth.gather(1, ids), values.double(), **close)
    assert reference_sampling.top_logprobs(*arguments, 0)[1].shape == (4, 0)
