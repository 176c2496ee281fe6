"""Sampling in torch, vectorised over rows. `Backend` says what each function is given and returns.

On a CPU it costs nothing to look at values first, and to leave out what no row asks for.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLDEST = 1e-5  # a lower temperature is greedy: dividing by it would leave the range of float32
CANDIDATES = 1024  # likeliest tokens looked at before the whole vocabulary is sorted
NOISE_BLOCK = 1 << 16  # numbers; a dozen passes over one block stay in a core's cache, over all rows they do not
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio, odd: consecutive ids land far apart
MIX_A, MIX_B = 0x85EBCA6B, 0xC2B2AE35  # multipliers of MurmurHash3's 32-bit finaliser


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `Backend.sample`: the argmax of a cold row, else of logits / temperature + `gumbel`, in float32.

    The token of a row that holds NaN or +inf is 0. One that holds -inf fails too, but is sampled all the same and never
    at -inf, so that logits in which ids were excluded can be sampled and the flag ignored.
    """
    logits = logits.float()
    low, high = logits.aminmax(dim=-1)  # both are NaN if any element is
    broken = ~(high < torch.inf)
    warm = temperatures >= COLDEST
    if not warm.any():
        tokens = logits.argmax(-1)
    elif warm.all():
        tokens = _draw(logits, temperatures, seeds, positions)
    else:
        tokens = logits.argmax(-1)
        tokens[warm] = _draw(logits[warm], temperatures[warm], seeds[warm], positions[warm])
    return tokens.masked_fill_(broken, 0), broken | (low == -torch.inf)


def _draw(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    vocab = logits.shape[1]
    rows = max(1, NOISE_BLOCK // vocab)
    blocks = [slice(start, start + rows) for start in range(0, len(logits), rows)]
    return torch.cat(
        [
            (logits[at] / temperatures[at, None]).add_(gumbel(seeds[at], positions[at], vocab)).argmax(-1)
            for at in blocks
        ]
    )


def mask_unlikely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See `Backend.mask_unlikely`. The logits are overwritten; each limit is a threshold on them.

    Min-p comes first, then top-k, then top-p over what is left, as in vLLM. The threshold is nearly always among the
    likeliest few, which are found without sorting the vocabulary.
    """
    asked = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if not asked.any():
        return logits
    if not asked.all():
        limits = (limit[asked] for limit in (top_k, top_p, min_p))
        logits[asked] = mask_unlikely(logits[asked], *limits)
        return logits
    vocab = logits.shape[1]
    top_k = top_k.masked_fill(top_k >= vocab, 0)
    enough = max(CANDIDATES, int(top_k.max()) + 1)  # top-p is a share of all that top-k leaves
    for count in (min(enough, vocab), vocab):
        ordered = logits.topk(count, dim=-1).values
        kept = _kept(logits, ordered, top_k, top_p, min_p)
        if not kept[:, -1].any():
            break
    threshold = ordered.gather(1, kept.sum(-1, keepdim=True) - 1)
    return logits.masked_fill_(logits < threshold, -torch.inf)


def _kept(logits: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of the likeliest logits, `ordered` [s, c], are kept: bool [s, c], for each row a run from the first on."""
    largest = ordered[:, :1]
    floor = largest + min_p.log()[:, None]
    rank = torch.arange(ordered.shape[1], device=logits.device)
    allowed = (ordered >= floor) & ((rank < top_k[:, None]) | (top_k <= 0)[:, None])
    weights = (ordered - largest).exp_().masked_fill_(allowed.logical_not(), 0)
    everything = (logits - largest).exp_().masked_fill_(logits < floor, 0).sum(-1)
    total = torch.where(top_k > 0, weights.sum(-1), everything)
    mass = (top_p * total).masked_fill_(top_p >= 1, torch.inf)  # rounding may carry the sum past it too early
    kept = (weights.cumsum(-1) - weights < mass[:, None]) & allowed
    kept[:, 0] = True
    return kept


def penalize(
    logits: Tensor, table: Tensor, slots: Tensor, lengths: Tensor, prompt_lengths: Tensor, penalties: Tensor
) -> Tensor:
    """See `Backend.penalize`. The logits may be overwritten.

    Repetition divides positive and multiplies negative logits of every token seen, in prompt or output; presence is
    subtracted once and frequency once per occurrence from those in the output.
    """
    tokens = table[slots, : int(lengths.max())] if len(slots) else table[slots]
    span = torch.arange(tokens.shape[1], device=tokens.device)
    known = span < lengths[:, None]
    ids = tokens.long().masked_fill_(~known, 0)
    counts = torch.zeros_like(logits)
    seen = counts.scatter_add(1, ids, known.float()) > 0
    outputs = counts.scatter_add_(1, ids, (known & (span >= prompt_lengths[:, None])).float())
    repetition, presence, frequency = penalties[:, :, None].unbind()
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - frequency * outputs - presence * (outputs > 0)


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """See `Backend.apply_bitmask`. The logits are overwritten."""
    bits = mask[:, :, None].bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def top_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.top_logprobs`. Nothing here waits for the device, so that GPUs need no version of their own."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    top = logprobs.topk(k, dim=-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], top.indices, top.values


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, float32 [s, vocab], as a pure function of (seed, position, id).

    In 32-bit arithmetic that wraps, `>>` filling with zeros, every backend computes:

        mix(x):  x ^= x >> 16; x *= MIX_A; x ^= x >> 13; x *= MIX_B; x ^= x >> 16
        k0 = mix(mix(mix(seed_low + GOLDEN) ^ seed_high) + position * GOLDEN)
        k1 = mix(k0 + GOLDEN)
        x  = id * GOLDEN + k0
        x ^= x >> 16; x *= MIX_A; x += k1; x ^= x >> 13; x *= MIX_B; x ^= x >> 16
        u  = min(((x & 0x7fffffff) + 0.5) * 2^-31, 1 - 2^-24)       in float32
        noise = -log(-log1p(-u))

    The second key enters in the middle, so that two rows whose first keys lie a multiple of GOLDEN apart do not see
    the same noise shifted. log1p near u = 0 keeps the large values of the noise, the ones that decide a draw, fine
    down to probabilities of 2^-32.
    """
    low = _signed(seeds & 0xFFFFFFFF)
    high = _signed((seeds >> 32) & 0xFFFFFFFF)
    golden, mix_a, mix_b = (_constant(value) for value in (GOLDEN, MIX_A, MIX_B))
    k0 = _mix(_mix(_mix(low + golden) ^ high) + positions.to(torch.int32) * golden)[:, None]
    k1 = _mix(k0 + golden)
    x = torch.arange(vocab, dtype=torch.int32, device=seeds.device).mul_(golden) + k0
    x = (x ^ _shift(x, 16)).mul_(mix_a).add_(k1)
    x = x.bitwise_xor_(_shift(x, 13)).mul_(mix_b)
    x = x.bitwise_xor_(_shift(x, 16)).bitwise_and_(0x7FFFFFFF)
    u = x.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * _constant(MIX_A)
    x = (x ^ _shift(x, 13)) * _constant(MIX_B)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _constant(value: int) -> int:
    """A 32-bit pattern as the int32 that holds it."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _signed(pattern: Tensor) -> Tensor:
    """int64 values in 0..2^32-1 as the int32 of the same bits."""
    return torch.where(pattern >= 1 << 31, pattern - (1 << 32), pattern).to(torch.int32)
