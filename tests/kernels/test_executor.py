"""The executor against transformers' `generate`, float32, greedy, over NaN-poisoned KV memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from corellm.comms.codec import i32
from corellm.comms.messages import AllocateKV, Progress, Sampling
from corellm.errors import ProtocolError
from corellm.worker import scoring
from corellm.worker.collectives import SingleRank, make_collectives
from corellm.worker.kv_memory import kv_cache
from tests.support.executor_models import CPU, Driver, greedy, greedy_truth, make_executor, spec_of, tiny_llama
from tests.support.ranks import run_ranks

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 131, size).tolist() for size in (1, 4, 5, 11, 23, 38, 2, 16)]
COUNT = 12
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def truth(model: LlamaForCausalLM) -> list[list[int]]:
    return [greedy_truth(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("changes", [{"tied": True}, {"head_dim": 16}, {"rope_parameters": DEFAULT_ROPE}])
def test_alone(changes: dict[str, object]) -> None:
    model = tiny_llama(**changes)
    driver = Driver(make_executor(model))
    driver.open(2, PROMPTS[4], greedy())
    assert driver.generate(2, COUNT) == greedy_truth(model, PROMPTS[4], COUNT)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_mixed_batches_with_reused_slots(
    model: LlamaForCausalLM, truth: list[list[int]], page_size: int, chunk: int
) -> None:
    """Sequences enter and leave while others run; slots and blocks are taken again; rows change order each step."""
    blocks = 240 // page_size
    driver = Driver(
        make_executor(model, page_size=page_size, num_blocks=blocks), page_size=page_size, num_blocks=blocks
    )
    waiting = list(range(len(PROMPTS)))
    slots: dict[int, int] = {}
    outputs = {}
    while waiting or slots:
        for slot in (5, 0, 2):
            if waiting and slot not in slots:
                slots[slot] = waiting.pop(0)
                driver.open(slot, PROMPTS[slots[slot]], greedy())
        order = driver.rng.permutation(list(slots)).tolist()
        driver.run([(s, min(chunk, driver.running[s].known - driver.running[s].computed)) for s in order])
        for slot in order:
            if len(driver.running[slot].outputs) == COUNT:
                outputs[slots.pop(slot)] = driver.running[slot].outputs
                driver.close(slot)
    assert [outputs[i] for i in range(len(PROMPTS))] == truth


def test_recompute_after_preemption(model: LlamaForCausalLM, truth: list[list[int]]) -> None:
    driver = Driver(make_executor(model))
    driver.open(1, PROMPTS[3], greedy())
    before = list(driver.generate(1, 5))
    driver.close(1)
    driver.open(6, PROMPTS[3] + before, greedy(), prompt_len=len(PROMPTS[3]))
    assert before + driver.generate(6, COUNT - 5) == truth[3]


def test_cached_prefix_is_read_not_computed(model: LlamaForCausalLM, truth: list[list[int]]) -> None:
    """A slot that opens on another's first blocks with `computed` set gives the same ids from the suffix alone."""
    driver = Driver(make_executor(model))
    driver.open(0, PROMPTS[5], greedy())
    driver.generate(0, 1)
    sequence = driver.open(1, PROMPTS[5], greedy())
    shared = driver.held[0][:4]
    own = driver.held[1][4:]
    driver.held[1] = shared + own
    opened = driver.opens.pop()
    driver.opens.append(msgspec.structs.replace(opened, computed=16, blocks=i32(shared + own)))
    sequence.computed = 16
    assert driver.generate(1, COUNT) == truth[5]


def test_penalised_output_equals_transformers(model: LlamaForCausalLM) -> None:
    driver = Driver(make_executor(model))
    driver.open(0, PROMPTS[4], greedy(repetition_penalty=1.7))
    ids = torch.tensor([PROMPTS[4]])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, repetition_penalty=1.7
        )
    assert driver.generate(0, COUNT) == out[0, len(PROMPTS[4]) :].tolist()


@pytest.mark.parametrize("at_once", [4, 256])
def test_prompts_are_scored_chunk_by_chunk(
    model: LlamaForCausalLM, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows that are not, and up to the prompt's end: in a slot that opens with outputs these are not scored."""
    monkeypatch.setattr(scoring, "AT_ONCE", at_once)
    prompt, count = PROMPTS[4], len(PROMPTS[4])
    with torch.inference_mode():
        truth = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    driver = Driver(make_executor(model))
    driver.open(3, PROMPTS[0], greedy())
    driver.open(1, [*prompt, 7, 9], greedy(prompt_logprobs=3), prompt_len=count)
    position = 1
    for step, chunk in enumerate((1, 14, 6, 3, 1)):
        rows = [(1, chunk)] if step else [(3, 1), (1, chunk)]
        ((row, found),) = driver.run(rows, score=[len(rows) - 1]).prompt_logprobs
        assert (row, found.first, found.k) == (len(rows) - 1, position, 3)
        stop = min(position + chunk, count)
        expected = truth[position - 1 : stop - 1]
        of_tokens = expected[range(stop - position), prompt[position:stop]]
        assert found.logprobs.tolist() == pytest.approx(of_tokens.tolist(), abs=1e-4)
        assert found.ranks.tolist() == (expected >= of_tokens[:, None]).sum(-1).tolist()
        best = expected.topk(3)
        assert found.top_ids.tolist() == best.indices.flatten().tolist()
        assert found.top_logprobs.tolist() == pytest.approx(best.values.flatten().tolist(), abs=1e-4)
        position += chunk
    assert driver.generate(3, COUNT) == greedy_truth(model, PROMPTS[0], COUNT)


def test_seeded_sampling_is_the_same_alone_chunked_and_in_a_batch(model: LlamaForCausalLM) -> None:
    sampling = [Sampling(max_tokens=99, temperature=1.0, top_p=0.95, seed=100 + i) for i in range(len(PROMPTS))]
    alone = []
    for i, prompt in enumerate(PROMPTS):
        driver = Driver(make_executor(model))
        driver.open(i % 3, prompt, sampling[i])
        alone.append(driver.generate(i % 3, COUNT))
    batch = Driver(make_executor(model, num_blocks=128), num_blocks=128, seed=1)
    for i, prompt in enumerate(PROMPTS):
        batch.open(i, prompt, sampling[i])
    while any(len(sequence.outputs) < COUNT for sequence in batch.running.values()):
        batch.run([(s, min(5, q.known - q.computed)) for s, q in batch.running.items()])
    assert [batch.running[i].outputs[:COUNT] for i in range(len(PROMPTS))] == alone
    assert len({tuple(output) for output in alone}) == len(alone)


def test_a_nan_row_fails_alone_and_its_blocks_can_be_used_again(
    model: LlamaForCausalLM, truth: list[list[int]]
) -> None:
    broken = tiny_llama()
    broken.load_state_dict(model.state_dict())
    broken.model.embed_tokens.weight.data[130] = torch.nan
    driver = Driver(make_executor(broken, num_blocks=20), num_blocks=20)
    driver.open(0, [3, 130, 5], greedy())
    driver.open(1, PROMPTS[3], greedy())
    result = driver.run([(0, 3), (1, 11)])
    assert result.failed.tolist() == [0]
    assert result.tokens.tolist() == [0, truth[3][0]]
    driver.close(0)
    assert driver.generate(1, 6) == truth[3][:6]
    driver.free.reverse()  # the poisoned block is taken first
    driver.open(0, PROMPTS[1], greedy())
    assert driver.generate(0, 6) == truth[1][:6]


def test_a_step_without_sampling_rows_and_one_without_rows(model: LlamaForCausalLM) -> None:
    driver = Driver(make_executor(model))
    driver.open(0, PROMPTS[5], greedy(logprobs=2))
    for rows in ([(0, 4)], []):
        result = driver.run(rows)
        assert (result.tokens.tolist(), result.failed.tolist(), result.logprobs) == ([], [], None)
    result = driver.run([(0, 34)])
    assert result.step == 3
    assert result.logprobs is not None
    assert result.logprobs.ids[0] == result.tokens[0]
    assert result.seconds > 0


def test_a_plan_that_overruns_is_refused(model: LlamaForCausalLM) -> None:
    driver = Driver(make_executor(model, max_model_len=12))
    driver.open(0, list(range(8)), greedy())
    driver.open(1, list(range(13)), greedy())
    with pytest.raises(ProtocolError, match="slot 1 opens with 13 tokens"):
        driver.run([])
    driver.opens = []
    driver.open(0, list(range(8)), greedy())
    driver.generate(0, 4)
    with pytest.raises(ProtocolError, match="feeds 1 tokens to slot 0, 12 in all"):
        driver.run([(0, 1)])


def test_warm_up_reports_and_leaves_no_trace(model: LlamaForCausalLM, truth: list[list[int]]) -> None:
    executor = make_executor(model)
    reports: list[Progress] = []
    executor.warm_up(reports.append)
    assert [(report.stage, report.done == report.total) for report in reports] == [
        ("warm up", False),
        ("warm up", True),
    ]
    driver = Driver(executor)
    driver.open(0, PROMPTS[5], greedy())
    assert driver.generate(0, COUNT) == truth[5]


def test_kv_memory_must_hold_the_blocks(model: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="4 KV blocks take"):
        kv_cache(torch.zeros(100, dtype=torch.uint8), spec_of(model), 1, 4, 4, torch.float32)
    with pytest.raises(ValueError, match="65 KV blocks take"):
        make_executor(model).allocate(AllocateKV(num_blocks=65, max_batch_tokens=8, max_seqs=2, max_model_len=8))


def test_one_rank_needs_no_process_group(tmp_path: Path) -> None:
    assert isinstance(make_collectives(tmp_path / "none", 0, 1, CPU), SingleRank)
    assert not (tmp_path / "none").exists()


def test_two_ranks_give_the_ids_of_one(tmp_path: Path, truth: list[list[int]]) -> None:
    """Two processes meet over a file; the vocabulary of 131 does not divide by 2, so the padding shows."""
    outputs = run_ranks("tests.support.tp_rank", 2, str(tmp_path / "rendezvous"), *map(str, PROMPTS[4]))
    assert outputs[0].split() == [str(token) for token in truth[4]]
    assert outputs[1] == ""
