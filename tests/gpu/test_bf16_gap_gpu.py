"""Greedy tokens in bfloat16, teacher-forced: they part from transformers only where its two best logits nearly tie.

Two right programs in bfloat16 differ in their logits by roundings. So transformers, in float32 over the same bfloat16
weights, is shown every token that the engine chose, and asked at each how far it lies behind its own favourite.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from corellm import EngineNode, SamplingParams
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.tiny_llama import make_tiny_llama, tiny_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

EPSILON = 0.3  # of the spread of a position's logits; the reference backend in bfloat16 comes to 0.18 on a CPU
NEW_TOKENS = 32
RANKS = [tp for tp in (1, 2) if tp <= max(1, torch.cuda.device_count())]


def behind(model: LlamaForCausalLM, prompt: list[int], output: Sequence[int]) -> list[float]:
    """For each output token, how far its logit lies behind the best, in standard deviations of that position's."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]], device=model.device)).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(list(output), device=model.device)[:, None])[:, 0]
    return ((logits.amax(-1) - chosen) / logits.std(-1)).tolist()


@pytest.mark.parametrize("tp", RANKS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (16, 4)])
def test_greedy_in_bfloat16(tmp_path: Path, heads: int, kv_heads: int, tp: int) -> None:
    model = make_tiny_llama(
        tmp_path, hidden=64 * heads, heads=heads, kv_heads=kv_heads, layers=6, intermediate=96 * heads, vocab=4099,
        max_positions=1024, dtype=torch.bfloat16, spread=(64 * heads) ** -0.5,
    )  # fmt: skip
    write_byte_tokenizer(tmp_path)
    prompts = tiny_prompts(80, 4099)
    options = {"dtype": "bfloat16", "max_batch_tokens": 700, "max_seqs": 48, "tp": tp}
    with EngineNode(str(tmp_path), device="cuda", **options) as engine:
        found = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    truth = model.float().cuda()
    gaps = [gap for prompt, row in zip(prompts, found, strict=True) for gap in behind(truth, prompt, row.token_ids)]
    parted = [gap for gap in gaps if gap > 0]
    print(f"{len(gaps)} tokens, {len(parted)} not the favourite, the farthest {max(parted, default=0.0):.4f} σ behind")
    assert len(gaps) == NEW_TOKENS * len(prompts)
    assert max(gaps) < EPSILON
    assert len(parted) < 0.1 * len(gaps)
