"""Llama 3.1's real tokenizer and 8B's real config.json, with dummy weights and fewer layers, start and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from corellm import EngineNode, SamplingParams
from tests.unit.test_llama_spec import LLAMA_8B

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def test_llama_31_8b_with_two_layers_of_dummy_weights(tmp_path: Path, llama31_tokenizer_folder: Path) -> None:
    config = {**LLAMA_8B, "num_hidden_layers": 2, "eos_token_id": [128001, 128008, 128009]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama31_tokenizer_folder / file, tmp_path)
    with EngineNode(str(tmp_path), device="cpu", dtype="bfloat16", load_format="dummy", kv_blocks=64) as engine:
        (answer,) = engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
        assert engine.info.vocab == 128256
        assert 1 <= answer.output_tokens <= 4
        assert answer.prompt_tokens > 30  # headers, the date block, the question
        assert (
            engine.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0].text == answer.text
        )


def test_without_a_tokenizer_prompts_are_token_ids(tmp_path: Path) -> None:
    config = {**LLAMA_8B, "num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with EngineNode(str(tmp_path), device="cpu", load_format="dummy", kv_blocks=64, tp=2) as engine:
        (answer,) = engine.generate([[1, 2, 3]], GREEDY)
        assert answer.output_tokens == 4
        assert answer.text == ""
