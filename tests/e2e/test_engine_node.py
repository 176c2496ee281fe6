"""`EngineNode` on the real demo model, as a user of the Python API meets it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corellm import CoreLLMError, EngineNode, SamplingParams
from corellm.errors import EngineDeadError, InvalidRequestError, PromptTooLongError, RequestAbortedError
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.idle import idle_stats
from tests.support.processes import engine_processes, pid_of, wait_until_gone
from tests.support.tiny_llama import make_tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[EngineNode]:
    with EngineNode(str(demo_model), device="cpu", max_model_len=2048) as node:
        yield node


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path)
    write_byte_tokenizer(path)
    return path


def test_answers_a_question(engine: EngineNode) -> None:
    (answer,) = engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"
    assert answer.output_tokens == len(answer.token_ids) == 8


def test_results_come_in_input_order(engine: EngineNode) -> None:
    prompts = [f"{number} plus {number} is" for number in range(20)]
    together = engine.generate(prompts, GREEDY)
    assert [c.text for c in together[:4]] == [engine.generate(p, GREEDY)[0].text for p in prompts[:4]]


def test_one_params_object_for_each_prompt(engine: EngineNode) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    found = engine.generate(["One", "Two", "Three"], params)
    assert [c.output_tokens for c in found] == [1, 5, 9]
    assert {c.finish_reason for c in found} == {"length"}
    with pytest.raises(InvalidRequestError, match="2 entries for 3 prompts"):
        engine.generate(["One", "Two", "Three"], params[:2])


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(engine: EngineNode) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=16, seed=number) for number in range(64)]
    prompts = [f"Story number {number}: once upon a time" for number in range(64)]
    together = engine.generate(prompts, params)
    for number in (0, 7, 31, 63):
        assert engine.generate(prompts[number], params[number])[0].text == together[number].text
    assert len({c.text for c in together}) > 60


def test_streamed_pieces_are_the_whole(engine: EngineNode) -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    deltas = list(engine.stream("The three primary colours are", params))
    (whole,) = engine.generate("The three primary colours are", params)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert deltas[-1].end is not None
    assert deltas[-1].end.text == whole.text


def test_a_stop_string_ends_the_text_before_it(engine: EngineNode) -> None:
    prompt = "Count in words: one, two, three, four,"
    (free,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24))
    assert "six" in free.text
    (cut,) = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24, stop=("six",)))
    assert cut.text == free.text[: free.text.index("six")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "six")
    assert cut.prompt_tokens == free.prompt_tokens
    assert 0 < cut.output_tokens < free.output_tokens


def test_logprobs_are_those_of_the_tokens(engine: EngineNode) -> None:
    (found,) = engine.generate("The sky is", SamplingParams(temperature=0, max_tokens=5, logprobs=3))
    assert found.logprobs is not None
    assert [entry.token_id for entry in found.logprobs] == list(found.token_ids)
    for entry in found.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert entry.logprob <= 0


def test_a_common_prefix_is_computed_once(engine: EngineNode) -> None:
    before = engine.stats()
    system = "You answer in one word. " * 200
    conversations = [
        [{"role": "system", "content": system}, {"role": "user", "content": f"Name the number {number}."}]
        for number in range(100)
    ]
    found = engine.chat(conversations, SamplingParams(temperature=0, max_tokens=2))
    after = engine.stats()
    shared = len(engine_tokens(engine, system)) // 16 * 16
    assert shared > 1000
    assert sorted(c.cached_tokens for c in found)[1] >= shared
    assert after.prompt_tokens - before.prompt_tokens < shared + 100 * 64


def engine_tokens(engine: EngineNode, text: str) -> list[int]:
    from corellm.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(Path(engine.info.model_path)).encode(text)


def test_over_long_prompts_are_refused_with_both_numbers(engine: EngineNode) -> None:
    with pytest.raises(PromptTooLongError, match=r"2500 .*2048"):
        engine.generate([[5] * 2500], GREEDY)
    with pytest.raises(PromptTooLongError, match=r"2000 .*2048"):
        engine.generate([[5] * 2000], SamplingParams(max_tokens=100))
    with pytest.raises(InvalidRequestError, match="49152"):
        engine.generate([[49152]], GREEDY)


def test_asyncio_and_cancellation(engine: EngineNode) -> None:
    async def work() -> int:
        answers = await engine.agenerate(["One", "Two"], GREEDY)
        task = asyncio.create_task(engine.agenerate("Forever", SamplingParams(max_tokens=1500, ignore_eos=True)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async for _ in engine.astream("Leave early", SamplingParams(max_tokens=1500, ignore_eos=True)):
            break
        return len(answers)

    assert asyncio.run(work()) == 2
    idle_stats(engine)


def test_abort_ends_what_is_open(engine: EngineNode) -> None:
    import threading

    timer = threading.Timer(0.5, engine.abort)
    timer.start()
    with pytest.raises(RequestAbortedError):
        engine.generate(["A", "B"], SamplingParams(max_tokens=1500, ignore_eos=True))
    idle_stats(engine)


def test_outside_of_its_life_it_says_so(demo_model: Path) -> None:
    node = EngineNode(str(demo_model))
    with pytest.raises(EngineDeadError, match="not running"):
        node.generate("hello")
    with pytest.raises(CoreLLMError, match="--tp is 0"):
        EngineNode(tp=0)
    with pytest.raises(TypeError, match="nonsense"):
        EngineNode(nonsense=1)


def test_iterables_of_every_kind_are_prompts_and_params(engine: EngineNode) -> None:
    ids = [504, 3575, 282]
    (truth,) = engine.generate([ids], GREEDY)
    for same in (np.array(ids), iter(ids), [np.array(ids)], [np.int64(token) for token in ids], iter([iter(ids)])):
        (found,) = engine.generate(same, iter([GREEDY]))
        assert found.token_ids == truth.token_ids
    assert [delta.end for delta in engine.stream(np.array(ids), GREEDY)][-1] is not None
    question = {"role": "user", "content": "What is the capital of France?"}
    assert [c.token_ids for c in engine.chat(iter([iter([question]), [question]]), GREEDY)] == [
        engine.chat([question], GREEDY)[0].token_ids
    ] * 2


def test_what_is_no_prompt_is_refused_by_every_method(engine: EngineNode) -> None:
    for call in (engine.generate, engine.chat, lambda given: list(engine.stream(given))):
        for wrong in (None, 5, b"abc", {"a": 1}):
            with pytest.raises(InvalidRequestError, match=r"^(prompts?|conversations) is .*; it must be "):
                call(wrong)  # type: ignore[operator]
    with pytest.raises(InvalidRequestError, match=r"params is {'max_tokens': 2}; it must be SamplingParams"):
        engine.generate("hello", {"max_tokens": 2})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"^date holds .*half of a surrogate pair"):
        engine.chat([{"role": "user", "content": "hello"}], date="\ud800")


def test_after_a_death_every_method_says_so_and_start_begins_anew(tiny: Path, run_root: Path) -> None:
    with EngineNode(tiny, device="cpu") as node:
        os.kill(pid_of(run_root, "corellm.engine"), signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            node.generate([[1]] * 100, SamplingParams(max_tokens=400, ignore_eos=True))
        for call in (node.stats, node.abort, lambda: node.info, lambda: node.generate("a"), lambda: node.chat([])):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                call()  # type: ignore[operator]
        assert node.start() is node
        assert node.start() is node  # one that runs is left alone
        assert node.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))[0].output_tokens == 3
        assert sorted(engine_processes(run_root).values()) == ["corellm.engine", "corellm.worker"]
    wait_until_gone(run_root, 1)


@pytest.mark.parametrize("wait_for", ["corellm.engine", "corellm.worker"])
def test_a_start_that_is_cancelled_leaves_no_engine(
    tiny: Path, run_root: Path, wait_for: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def cancel_while_starting(node: EngineNode) -> None:
        entering = asyncio.create_task(node.__aenter__())
        deadline = time.monotonic() + 30
        while wait_for not in engine_processes(run_root).values():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        wait_until_gone(run_root, 2)  # workers are told by the kernel, a moment after the engine is gone
        with pytest.raises(EngineDeadError, match="not running"):
            node.stats()

    asyncio.run(cancel_while_starting(EngineNode(tiny, device="cpu")))
    gc.collect()
    assert caplog.text == ""  # asyncio would complain of an error that nobody has seen
    assert not list(run_root.iterdir())


def test_a_start_that_is_cancelled_while_the_model_is_sought_starts_none(
    tiny: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*of: object) -> Path:
        time.sleep(0.5)
        return tiny

    monkeypatch.setattr("corellm.found_model.find_model", slow)

    async def cancel_soon(node: EngineNode) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(node.__aenter__(), 0.1)
        await asyncio.sleep(1.0)

    asyncio.run(cancel_soon(EngineNode(tiny, device="cpu")))
    assert engine_processes(run_root) == {}
