"""Decode steps captured as CUDA graphs: the ids of transformers, every sampling setting, NaN, and flat memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from corellm.comms.messages import Sampling
from corellm.worker.cuda_graphs import DecodeGraphs, widths
from corellm.worker.executor import Executor
from tests.support.executor_models import Driver, greedy, greedy_truth, make_executor, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

GPU = torch.device("cuda", 0)
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 130, size).tolist() for size in (1, 4, 5, 11, 23, 38, 2, 16, 90, 7, 64)]
COUNT = 20
MIXED = [
    greedy(),
    greedy(repetition_penalty=1.3, logprobs=3),
    Sampling(max_tokens=99, temperature=0.8, seed=5),
    Sampling(max_tokens=99, temperature=1.0, top_p=0.7, seed=6),
    Sampling(max_tokens=99, temperature=1.3, top_k=5, min_p=0.02, seed=-7, logprobs=0),
    Sampling(max_tokens=99, temperature=0.9, presence_penalty=0.4, frequency_penalty=0.3, seed=8),
    greedy(bias_ids=(3, 9), bias_values=(-50.0, 2.0)),
    Sampling(max_tokens=99, temperature=0.7, stop_ids=(5, 6, 7), min_tokens=15, seed=9),
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(head_dim=16)


def on_gpu(model: LlamaForCausalLM, **options: object) -> Executor:
    executor = make_executor(model, device=GPU, page_size=16, num_blocks=200, max_seqs=11, **options)
    executor.warm_up(lambda _: None)
    return executor


def drive(executor: Executor, settings: list[Sampling], chunk: int = 1000) -> list[list[int]]:
    """Sequences enter in twos and leave when they are done, so that widths and row orders change all the time."""
    driver = Driver(executor, page_size=16, num_blocks=200)
    waiting, slots, outputs = list(range(len(PROMPTS))), {}, {}
    while waiting or slots:
        for slot in [slot for slot in (10, 3, 0, 7, 5, 1, 2, 9, 4) if slot not in slots][:2]:
            if waiting:
                slots[slot] = waiting.pop(0)
                driver.open(slot, PROMPTS[slots[slot]], settings[slots[slot] % len(settings)])
        order = driver.rng.permutation(list(slots)).tolist()
        driver.run([(s, min(chunk, driver.running[s].known - driver.running[s].computed)) for s in order])
        for slot in order:
            if len(driver.running[slot].outputs) == COUNT:
                outputs[slots.pop(slot)] = driver.running[slot].outputs
                driver.close(slot)
    return [outputs[i] for i in range(len(PROMPTS))]


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Widths of the graphs that ran."""
    ran: list[int] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(
        DecodeGraphs, "run", lambda self, layout, words: (ran.append(layout.tokens), run(self, layout, words))[1]
    )
    return ran


@pytest.mark.parametrize("chunk", [3, 1000])
def test_ids_of_transformers(model: LlamaForCausalLM, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = count_runs(monkeypatch)
    assert drive(on_gpu(model), [greedy()], chunk) == [greedy_truth(model, prompt, COUNT) for prompt in PROMPTS]
    assert len(ran) >= COUNT
    assert len(set(ran)) > (chunk > 3)


def test_any_settings_give_what_they_give_without_graphs(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = count_runs(monkeypatch)
    captured = drive(on_gpu(model), MIXED)
    assert ran
    monkeypatch.setattr(DecodeGraphs, "layout", lambda self, rows: None)
    assert drive(on_gpu(model), MIXED) == captured
    assert drive(make_executor(model, page_size=16, num_blocks=200, max_seqs=11), MIXED) == captured  # on the CPU


def test_a_nan_row_fails_alone(model: LlamaForCausalLM) -> None:
    broken = tiny_llama(head_dim=16)
    broken.load_state_dict(model.state_dict())
    broken.model.embed_tokens.weight.data[130] = torch.nan
    driver = Driver(on_gpu(broken), page_size=16, num_blocks=200)
    truth = [greedy_truth(model, PROMPTS[i], 6) for i in (3, 4)]
    for slot, prompt in ((0, PROMPTS[3]), (1, [3, 9]), (2, PROMPTS[4])):
        driver.open(slot, prompt, greedy(bias_ids=(130,), bias_values=(1000.0,)) if slot == 1 else greedy())
    driver.run([(slot, driver.running[slot].known) for slot in range(3)])
    failed = [driver.run([(2, 1), (1, 1), (0, 1)]).failed.tolist() for _ in range(5)]
    assert failed == [[1]] * 5  # the row that drew token 130
    assert [driver.running[slot].outputs for slot in (0, 2)] == truth


def test_nothing_synchronises(model: LlamaForCausalLM) -> None:
    executor = on_gpu(model)
    driver = Driver(executor, page_size=16, num_blocks=200)
    for slot, settings in enumerate(MIXED):
        driver.open(slot, PROMPTS[slot], settings)
    driver.run([(slot, driver.running[slot].known) for slot in driver.running])
    execute = executor.execute

    def watched(plan: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    executor.execute = watched
    for _ in range(4):
        driver.run([(slot, 1) for slot in driver.running])
    driver.open(9, PROMPTS[8], MIXED[4])
    driver.run([(9, 30), *((slot, 1) for slot in range(len(MIXED)))])


def test_memory_is_flat_over_ten_thousand_steps(model: LlamaForCausalLM) -> None:
    driver = Driver(on_gpu(model), page_size=16, num_blocks=200)
    used = []
    for turn in range(100):
        for slot in range(4):
            driver.open(slot, PROMPTS[(slot + turn) % len(PROMPTS)][:30], MIXED[(slot + turn) % len(MIXED)])
        driver.run([(slot, driver.running[slot].known) for slot in range(4)])
        for _ in range(99):
            driver.run([(slot, 1) for slot in range(4)])
        for slot in range(4):
            driver.close(slot)
        used.append((torch.cuda.memory_reserved(), torch.cuda.memory_allocated()))
    assert driver.step == 10_000
    assert used[-1] == used[10]


def test_widths() -> None:
    assert widths(1) == [1]
    assert widths(11) == [1, 2, 4, 8, 11]
    assert widths(10_000)[-3:] == [448, 480, 512]
