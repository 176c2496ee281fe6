"""The sampler: which rows get which treatment, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from corellm.comms.codec import i32
from corellm.comms.messages import Sampling, SlotOpen, StepPlan, TopLogprobs
from corellm.kernels import load_backend
from corellm.worker.batch_inputs import StepRows
from corellm.worker.sampler import StepSampling
from corellm.worker.slots import SlotTables, write
from tests.support.executor_models import CPU

VOCAB = 32
EMPTY = i32([])


@dataclass
class Sampled:
    tokens: torch.Tensor
    failed: torch.Tensor
    logprobs: TopLogprobs | None


def sample(
    logits: torch.Tensor, rows: dict[int, Sampling], known: list[int] | None = None, prompt: int = 2,
    masks: dict[int, list[int]] | None = None,
) -> Sampled:  # fmt: skip
    """Sample row i of logits for the i-th slot of `rows`, each knowing the tokens `known`, as the executor does."""
    known = known or [1, 2]
    tables = SlotTables(max_seqs=16, max_model_len=16, num_blocks=64, page_size=4, vocab=VOCAB, device=CPU)
    opens = [
        SlotOpen(slot=slot, tokens=i32(known), prompt_len=prompt, computed=0, blocks=i32([slot]), sampling=sampling)
        for slot, sampling in rows.items()
    ]
    plan = StepPlan(
        step=1,
        closes=EMPTY,
        opens=opens,
        append_slots=EMPTY,
        append_blocks=EMPTY,
        row_slots=i32(list(rows)),
        row_tokens=i32([len(known)] * len(rows)),
        row_samples=i32([1] * len(rows)),
        mask_rows=i32(list(masks or {})),
        masks=i32([word for ids in (masks or {}).values() for word in bitmask(ids)]),
    )
    write(tables.memory, torch.from_numpy(np.concatenate(tables.apply(plan))))
    of_step = StepRows.of(plan, tables)
    sampling = StepSampling(plan, of_step, tables)
    backend = load_backend("reference", CPU, torch.float32)
    inputs = (sampling.temperatures, sampling.seeds, of_step.positions)
    tokens, failed = backend.sample(logits, *(torch.from_numpy(values.copy()) for values in inputs))
    special = torch.from_numpy(sampling.special)
    if len(special):
        tokens[special] = sampling.draw_special(backend, logits).masked_fill(failed[special], 0)
    logprobs = sampling.logprobs(backend, logits, tokens)
    return Sampled(tokens, failed, logprobs.message() if logprobs else None)


def bitmask(ids: list[int]) -> list[int]:
    """The words in which just these ids are allowed."""
    word = sum(1 << i for i in ids)
    return [word - (1 << 32) if word >> 31 else word]


def settings(**changes: object) -> Sampling:
    return Sampling(max_tokens=8, **({"temperature": 0.0} | changes))


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 9, 30]] = 1
    assert sample(logits, {0: settings()}).tokens.tolist() == [5]


def test_each_row_gets_its_own_settings() -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, 7], logits[:, 8], logits[:, 1] = 3, 2, 2.5
    rows = {
        3: settings(),
        9: settings(bias_ids=(8, 8, VOCAB + 5), bias_values=(0.6, 0.6, 99.0)),
        0: settings(stop_ids=(7, 10**6), min_tokens=1),
        5: settings(temperature=1.0, top_k=1, seed=4),
        2: settings(repetition_penalty=1.5, bias_ids=(7,), bias_values=(-2.0,)),
        1: settings(presence_penalty=2.0, frequency_penalty=2.0),
    }
    assert sample(logits, rows).tokens.tolist() == [7, 8, 1, 7, 8, 7]


def test_presence_and_frequency_count_outputs_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 7] = 2, 1.5
    penalised = {0: settings(presence_penalty=1.0)}
    assert sample(logits, penalised, known=[1, 2], prompt=2).tokens.tolist() == [1]
    assert sample(logits, penalised, known=[2, 1], prompt=1).tokens.tolist() == [7]


@pytest.mark.parametrize(("outputs", "expected"), [(0, 6), (1, 6), (2, 7)])
def test_stop_ids_wait_for_min_tokens(outputs: int, expected: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 6] = 3, 2
    rows = {0: settings(stop_ids=(7,), min_tokens=2)}
    assert sample(logits, rows, known=[1, 2] + [3] * outputs).tokens.tolist() == [expected]


def test_masked_rows_draw_what_is_allowed() -> None:
    logits = random_logits(4)
    logits[:, 31] = 1.5
    rows = {
        0: settings(temperature=1.0, seed=1),
        5: settings(),
        2: settings(temperature=9.0, top_p=0.9, seed=3),
        7: settings(logprobs=0, bias_ids=(3,), bias_values=(100.0,)),
    }
    free = sample(logits, rows)
    masked = sample(logits, rows, masks={1: [4], 2: [9, 31], 3: [2, 31]})
    assert masked.tokens[[0, 1, 3]].tolist() == [free.tokens[0], 4, 31]
    assert masked.tokens[2] in (9, 31)
    assert masked.logprobs is not None  # of the raw logits, which no mask has changed
    assert masked.logprobs.sampled[0] == pytest.approx(logits[3].double().log_softmax(-1)[31].item(), abs=1e-5)


def test_temperature_comes_before_the_filters() -> None:
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, :2] = torch.tensor([0.0, -2.0])  # min-p keeps id 1 when e^(-2 / temperature) >= 0.3
    cold = {sample(logits, {0: settings(temperature=1.0, min_p=0.3, seed=s)}).tokens.item() for s in range(60)}
    warm = {sample(logits, {0: settings(temperature=4.0, min_p=0.3, seed=s)}).tokens.item() for s in range(60)}
    assert (cold, warm) == ({0}, {0, 1})


def test_a_draw_is_the_same_alone_and_in_a_batch() -> None:
    logits = random_logits(8)
    rows = {slot: settings(temperature=0.9 + slot / 10, seed=slot * 77, top_p=0.9) for slot in range(8)}
    rows[4] = settings()
    together = sample(logits, rows).tokens.tolist()
    for row, slot in enumerate(rows):
        assert sample(logits[row, None], {15 - slot: rows[slot]}).tokens.tolist() == [together[row]]
    assert sample(logits.flip(0), dict(reversed(rows.items()))).tokens.tolist() == together[::-1]


def test_a_broken_row_is_flagged_and_harms_no_other() -> None:
    logits = random_logits(5)
    rows = {slot: settings(temperature=slot % 2, top_p=0.5, logprobs=1) for slot in range(5)}
    good = sample(logits, rows)
    logits[1, 3], logits[4, 0] = torch.nan, torch.inf
    bad = sample(logits, rows)
    assert bad.failed.tolist() == [False, True, False, False, True]
    assert not good.failed.any()
    assert bad.tokens.tolist() == [token if row not in (1, 4) else 0 for row, token in enumerate(good.tokens.tolist())]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    biased = settings(logprobs=3, bias_ids=(4,), bias_values=(100.0,), temperature=0.5, top_k=1)
    sampled = sample(logits, {1: settings(logprobs=0), 2: settings(), 0: biased})
    assert sampled.logprobs is not None
    message = sampled.logprobs
    truth = logits.double().log_softmax(-1)[[0, 2]]
    assert sampled.tokens[2] == 4
    assert message.rows.tolist() == [0, 2]
    assert message.k == 3
    assert message.sampled.tolist() == pytest.approx([truth[0].max().item(), truth[1, 4].item()], abs=1e-5)
    expected = truth.sort(descending=True)
    assert message.ids.reshape(2, 3).tolist() == expected.indices[:, :3].tolist()
    assert message.values.tolist() == pytest.approx(expected.values[:, :3].flatten().tolist(), abs=1e-5)


def test_rows_without_logprobs_cost_none() -> None:
    assert sample(random_logits(1), {0: settings()}).logprobs is None
