"""config.json as it may come: every wrong field is one typed error that names it, and the weight table adds up."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corellm.errors import CheckpointError, CoreLLMError, OptionError, UnsupportedModelError
from corellm.models.llama.spec import ALIGN, LlamaSpec, weight_table

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_llama_31_8b_is_what_its_makers_say() -> None:
    spec = LlamaSpec.from_config(LLAMA_8B)
    assert spec.kv_bytes_per_token(itemsize=2) == 128 * 1024
    parameters = sum(entry.nbytes for entry in weight_table(spec, 2).entries) // 2
    assert parameters == 8_030_261_248


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, UnsupportedModelError, "MistralForCausalLM.*LlamaForCausalLM"),
        ({"architectures": 5, "model_type": "bert"}, UnsupportedModelError, "bert"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "gelu"),
        ({"hidden_size": 0}, CheckpointError, "hidden_size is 0"),
        ({"vocab_size": "many"}, CheckpointError, "vocab_size is 'many'"),
        ({"num_key_value_heads": 5}, CheckpointError, "32 is not a multiple of num_key_value_heads 5"),
        ({"head_dim": 7}, CheckpointError, "head_dim 7 is odd"),
        ({"rms_norm_eps": "x"}, CheckpointError, "rms_norm_eps is 'x'"),
        ({"rope_theta": -1}, CheckpointError, "rope_theta is -1"),
        ({"rope_scaling": 3}, CheckpointError, "rope_scaling is 3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, UnsupportedModelError, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, CheckpointError, "low_freq_factor is None"),
        ({"torch_dtype": "int8"}, UnsupportedModelError, "int8"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], error: type[CoreLLMError], words: str) -> None:
    with pytest.raises(error, match=words):
        LlamaSpec.from_config({**LLAMA_8B, **change})


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "type"]), st.text(max_size=3), max_size=3),
)  # fmt: skip


@given(name=st.sampled_from(sorted(LLAMA_8B)), value=JUNK)
def test_junk_in_any_field_is_a_typed_error_or_harmless(name: str, value: object) -> None:
    with contextlib.suppress(CoreLLMError):
        LlamaSpec.from_config({**LLAMA_8B, name: value})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_split_every_tensor_exactly(tp: int) -> None:
    spec = LlamaSpec.from_config(LLAMA_8B)
    covered: dict[str, list[tuple[int, int]]] = {}
    for rank in range(tp):
        end = 0
        for entry in weight_table(spec, 2, tp, rank).entries:
            assert entry.offset % ALIGN == 0
            assert entry.offset >= end
            end = entry.offset + entry.nbytes
            for shard in entry.shards:
                covered.setdefault(shard.tensor, []).append((shard.start, shard.stop))
    for name, parts in covered.items():
        if "norm" not in name:
            assert all(before[1] == after[0] for before, after in itertools.pairwise(parts)), name


def test_tp_that_does_not_divide_the_heads_names_those_that_do() -> None:
    with pytest.raises(OptionError, match="--tp is 3; this model has 8 KV heads, so it can be 1, 2, 4, 8"):
        LlamaSpec.from_config(LLAMA_8B).check_tp(3)
