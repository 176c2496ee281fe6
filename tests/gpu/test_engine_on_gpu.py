"""The whole engine on NVIDIA GPUs: greedy ids of transformers, every cache and chunking, one rank and two."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
import torch

from corellm import EngineNode, SamplingParams
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.idle import idle_stats
from tests.support.reference import Greedy, count_ties, generate_greedy
from tests.support.tiny_llama import make_tiny_llama, tiny_prompts
from tests.unit.test_llama_spec import LLAMA_8B

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

NEW_TOKENS = 16
CONTEXT_BYTES = 1 << 30  # what this process takes of the GPU, which the engine does not know
RANKS = [tp for tp in (1, 2) if tp <= max(1, torch.cuda.device_count())]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[Greedy]]:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, heads=8, kv_heads=4, vocab=515, max_positions=1024)
    write_byte_tokenizer(path)
    prompts = tiny_prompts(60, 515)
    return path, prompts, generate_greedy(path, prompts, NEW_TOKENS)


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize(("cache", "tokens", "blocks", "page"), [("naive", 4096, None, 16), ("radix", 40, 215, 2)])
def test_greedy_ids_equal_transformers(
    case: tuple[Path, list[list[int]], list[Greedy]], cache: str, tokens: int, blocks: int | None, page: int, tp: int
) -> None:
    path, prompts, truth = case
    options = {"kv_cache": cache, "max_batch_tokens": tokens, "kv_blocks": blocks, "page_size": page, "tp": tp}
    with EngineNode(str(path), device="cuda", dtype="float32", max_model_len=700, max_seqs=32, **options) as engine:
        found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
        stats = idle_stats(engine)
    ties = count_ties([completion.token_ids for completion in found], truth)
    print(
        f"{cache} {tokens} {blocks} tp {tp}: {len(prompts)} prompts, {ties} near-ties, {stats.preemptions} preemptions"
    )
    assert (stats.preemptions > 0) == (blocks is not None)


@pytest.mark.parametrize("tp", RANKS)
def test_llama_31_8b_with_dummy_weights(tmp_path: Path, tp: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    began = time.monotonic()
    with EngineNode(str(tmp_path), device="cuda", load_format="dummy", max_model_len=16384, tp=tp) as engine:
        ready = time.monotonic() - began
        prompts = [[random.Random(n).randrange(128000) for _ in range(300)] for n in range(64)]
        params = SamplingParams(temperature=0.6, max_tokens=64, ignore_eos=True, seed=1)
        began = time.monotonic()
        found = engine.generate(prompts, params)
        seconds = time.monotonic() - began
        info = engine.info
        free, total = torch.cuda.mem_get_info()
    print(
        f"8B tp {tp} on {info.device}: ready in {ready:.1f} s, {info.kv_blocks} blocks of {info.page_size}, "
        f"{64 * 64 / seconds:.0f} out tok/s at 64 sequences, {(before - free) / 2**30:.1f} GiB of memory in use"
    )
    assert before - free < 0.9 * total + CONTEXT_BYTES
    assert all(completion.output_tokens == 64 for completion in found)
