"""Greedy ids equal transformers' `generate` for every cache, chunking, memory and tensor-parallel size.

`CORELLM_EXACT_PROMPTS=200` makes it as long as the promise; by default fewer prompts run. Each case
prints how many outputs parted at a near-tie of the reference's own logits, and how many preemptions happened.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from corellm import EngineNode, SamplingParams
from corellm.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.idle import idle_stats
from tests.support.reference import Greedy, count_ties, generate_greedy
from tests.support.tiny_llama import make_tiny_llama, tiny_prompts

PROMPTS = int(os.environ.get("CORELLM_EXACT_PROMPTS", "28"))
NEW_TOKENS = 16
CORPUS = Path(__file__).parents[2] / "LICENSE"
CHUNKS = {"whole": 4096, "tiny": 40}
# Blocks and tokens in one. Few are small, so that sequences often need one; the longest request takes 208.
BLOCKS = {"ample": (None, 4), "few": (215, 2)}


def mixed_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Text of 1 to 400 tokens from the middle of English prose, some of it with a common beginning."""
    rng = random.Random(0)
    text = CORPUS.read_text(encoding="utf-8")
    ids = tokenizer.encode(" ".join(text.split()))
    prompts = []
    for number in range(count):
        length = int(400 ** rng.random())
        start = 0 if number % 5 == 0 else rng.randrange(len(ids) - length)
        prompts.append(ids[start : start + length])
    return prompts


@pytest.fixture(scope="module")
def demo_case(demo_model: Path) -> tuple[Path, list[list[int]], list[Greedy]]:
    prompts = mixed_prompts(Tokenizer.from_folder(demo_model), PROMPTS)
    return demo_model, prompts, generate_greedy(demo_model, prompts, NEW_TOKENS)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_demo_model_equals_transformers(
    demo_case: tuple[Path, list[list[int]], list[Greedy]], cache: str, chunks: str, blocks: str
) -> None:
    path, prompts, truth = demo_case
    run(path, prompts, truth, cache=cache, chunks=chunks, blocks=blocks, tp=1)


@pytest.fixture(scope="module")
def tiny_case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[Greedy]]:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, heads=8, kv_heads=4, vocab=515, max_positions=1024)
    write_byte_tokenizer(path)
    prompts = tiny_prompts(PROMPTS, 515)
    return path, prompts, generate_greedy(path, prompts, NEW_TOKENS)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_tensor_parallel_equals_transformers(
    tiny_case: tuple[Path, list[list[int]], list[Greedy]], cache: str, chunks: str, blocks: str, tp: int
) -> None:
    path, prompts, truth = tiny_case
    run(path, prompts, truth, cache=cache, chunks=chunks, blocks=blocks, tp=tp)


@pytest.mark.parametrize("tp", [4, 8])
def test_many_ranks_equal_transformers(tmp_path: Path, tp: int) -> None:
    """As many as there are KV heads; neither 4 nor 8 divides the vocabulary."""
    make_tiny_llama(tmp_path, heads=16, kv_heads=8, vocab=515, max_positions=1024)
    write_byte_tokenizer(tmp_path)
    prompts = tiny_prompts(PROMPTS, 515)
    truth = generate_greedy(tmp_path, prompts, NEW_TOKENS)
    run(tmp_path, prompts, truth, cache="radix", chunks="tiny", blocks="few", tp=tp)


def run(
    path: Path, prompts: list[list[int]], truth: list[Greedy], *, cache: str, chunks: str, blocks: str, tp: int
) -> None:
    count, page_size = BLOCKS[blocks]
    with EngineNode(
        str(path),
        device="cpu",
        kv_cache=cache,
        max_batch_tokens=CHUNKS[chunks],
        kv_blocks=count,
        page_size=page_size,
        max_model_len=700,
        max_seqs=32,
        tp=tp,
    ) as engine:
        found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        stats = idle_stats(engine)
    ties = count_ties([completion.token_ids for completion in found], truth)
    print(
        f"{cache} {chunks} {blocks} tp {tp}: {len(prompts)} prompts, {ties} near-ties, "
        f"{stats.preemptions} preemptions, {stats.kv.hit_tokens} tokens from the cache, {stats.kv.evictions} evictions"
    )
    assert stats.kv.free + stats.kv.cached == stats.kv.total
    assert (stats.preemptions > 0) == (blocks == "few")
    assert (stats.kv.hit_tokens > 0) == (cache == "radix")
