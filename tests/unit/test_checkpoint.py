"""Opening checkpoints: files written by the safetensors package open; damaged ones are refused in one typed line."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from corellm.checkpoint import open_checkpoint, read_header, weights_present
from corellm.errors import CheckpointError, UnsupportedModelError
from tests.support.out_of_reach import put_out_of_reach

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "eos_token_id": 9,
}
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}


def tensors(dtype: str = "float16") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def write(folder: Path, weights: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """Write a checkpoint of one file; return that file."""
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    file = folder / "model.safetensors"
    save_file(tensors() if weights is None else weights, file)
    return file


def write_raw(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_refs_point_at_the_bytes_that_safetensors_reads(tmp_path: Path, dtype: str) -> None:
    file = write(tmp_path, tensors(dtype))
    found = open_checkpoint(tmp_path, "auto").tensors
    assert found.keys() == SHAPES.keys()
    data = file.read_bytes()
    with safe_open(file, "np") as truth:
        for name, ref in found.items():
            array = np.frombuffer(data[ref.start : ref.stop], dtype).reshape(ref.shape)
            np.testing.assert_array_equal(array, truth.get_tensor(name))


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path)
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_checkpoint(tmp_path, "auto")
    file.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="added to"):
        open_checkpoint(tmp_path, "auto")


def test_a_damaged_header_is_refused_or_means_the_same(tmp_path: Path) -> None:
    file = write(tmp_path)
    whole = file.read_bytes()
    truth = open_checkpoint(tmp_path, "auto").tensors
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(1)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(header_end)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            # White space may turn into other white space, and a byte into itself.
            assert open_checkpoint(tmp_path, "auto").tensors == truth
        except CheckpointError:
            refused += 1
    assert refused > 1900


F16 = {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("header", "data", "match"),
    [
        ({"a": F16, "b": F16 | {"data_offsets": [2, 6]}}, 6, "overlap"),
        ({"a": F16, "b": F16 | {"data_offsets": [6, 10]}}, 10, "gap"),
        ({"a": F16 | {"data_offsets": [4, 8]}}, 8, "gap"),
        ({"a": F16}, 6, "added to"),
        ({"a": F16}, 2, "cut off"),
        ({"a": F16 | {"shape": [3]}}, 4, "takes 4 bytes"),
        ({"a": F16 | {"data_offsets": [4, 0]}}, 4, "takes -4 bytes"),
        ({"a": F16 | {"data_offsets": [-4, 0]}}, 4, "malformed"),
        ({"a": F16 | {"data_offsets": [0, 4.0]}}, 4, "malformed"),
        ({"a": F16 | {"data_offsets": [0]}}, 4, "malformed"),
        ({"a": F16 | {"shape": [True, 2]}}, 4, "malformed"),
        ({"a": F16 | {"shape": [-1, -2]}}, 4, "malformed"),
        ({"a": F16 | {"more": 1}}, 4, "malformed"),
        ({"a": 7}, 4, "malformed"),
        ({"a": F16 | {"dtype": "F8_E4M3", "data_offsets": [0, 2]}}, 2, "F8_E4M3"),
        ({"a": F16 | {"dtype": "I16"}}, 4, "I16"),
        ([F16], 4, "not a JSON object"),
        (b'{"a": 1, "a": 2}', 0, "twice"),
        (b"[" * 200_000, 0, "not valid JSON"),
        (b'{"\xff": 1}', 0, "not valid JSON"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, data: int, match: str) -> None:
    file = write_raw(tmp_path / "x.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=match):
        read_header(file)


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, "a": F16}, bytes(4))
    assert list(read_header(file)) == ["a"]


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    missing = tensors()
    del missing["model.norm.weight"]
    write(tmp_path, missing)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing"):
        open_checkpoint(tmp_path, "auto")

    write(tmp_path, tensors() | {"model.layers.1.mlp.up_proj.weight": np.ones((12, 8), "float16")})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is left over"):
        open_checkpoint(tmp_path, "auto")

    write(tmp_path, num_hidden_layers=10**15)
    with pytest.raises(CheckpointError, match="asks for 1000000000000000 layers, but there are 12 tensors"):
        open_checkpoint(tmp_path, "auto")

    write(tmp_path, num_key_value_heads=2)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \[4, 8\], expected \[8, 8\]"):
        open_checkpoint(tmp_path, "auto")


def test_rotary_frequencies_and_a_tied_head_are_tolerated(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, "float32")}
    write(tmp_path, tensors() | extra, tie_word_embeddings=True)
    assert open_checkpoint(tmp_path, "auto").spec.tied

    write(tmp_path, tensors() | {"lm_head.weight": np.ones((9, 8), "float16")}, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape"):
        open_checkpoint(tmp_path, "auto")


def write_shards(folder: Path, change: Callable[[dict[str, str]], None] = lambda weight_map: None) -> None:
    write(folder).unlink()
    names = list(SHAPES)
    weight_map = {name: f"model-0000{1 + (i >= 5)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: value for name, value in tensors().items() if weight_map[name] == file}, folder / file)
    change(weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_joined(tmp_path: Path) -> None:
    write_shards(tmp_path)
    found = open_checkpoint(tmp_path, "auto").tensors
    assert {name: ref.shape for name, ref in found.items()} == SHAPES
    assert len({ref.file for ref in found.values()}) == 2
    assert weights_present(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.update({"model.norm.weight": "model-00003-of-00002.safetensors"}), "not there"),
        (lambda m: m.update({"model.norm.weight": "model-00001-of-00002.safetensors"}), r"model\.norm\.weight is in"),
        (lambda m: m.update({"model.norm.weight": "../x.safetensors"}), "same folder"),
        (lambda m: m.update({"model.norm.weight": 3}), "weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, change: Callable[[dict[str, str]], None], match: str) -> None:
    write_shards(tmp_path, change)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path, "auto")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file({name: tensors()[name] for name in [*list(SHAPES)[:5], "model.norm.weight"]}, shard)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in both"):
        open_checkpoint(tmp_path, "auto")


def test_weights_in_other_formats_are_named(tmp_path: Path) -> None:
    write(tmp_path).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read"):
        open_checkpoint(tmp_path, "auto")
    assert not weights_present(tmp_path)


def test_dummy_needs_the_configuration_alone(tmp_path: Path) -> None:
    write(tmp_path).unlink()
    checkpoint = open_checkpoint(tmp_path, "dummy")
    assert checkpoint.tensors == {}
    assert checkpoint.spec.hidden == 8


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(9, None, (9,)), (9, [7, 8], (7, 8, 9)), ([3, 9], 3, (3, 9)), (None, 5, (5,)), (None, None, ())],
)
def test_stop_ids_are_the_union_of_both_files(
    tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    write(tmp_path, eos_token_id=config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_checkpoint(tmp_path, "auto").eos_ids == expected


@pytest.mark.parametrize("value", ["9", True, -1, [1.5], {}])
def test_stop_ids_that_are_no_ids_are_refused(tmp_path: Path, value: object) -> None:
    write(tmp_path, eos_token_id=value)
    with pytest.raises(CheckpointError, match="eos_token_id"):
        open_checkpoint(tmp_path, "auto")


def test_a_stop_id_that_the_model_does_not_have_is_passed_over_beside_others(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[3, 10, 2**40])
    assert open_checkpoint(tmp_path, "auto").eos_ids == (3,)


@pytest.mark.parametrize("value", [10, [10, 2**40]])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_model_that_could_not_stop_is_refused(tmp_path: Path, name: str, value: int | list[int]) -> None:
    write(tmp_path)
    config = json.loads((tmp_path / name).read_text()) if name == "config.json" else {}
    (tmp_path / name).write_text(json.dumps(config | {"eos_token_id": value}))
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path, "dummy")
    worst = 10 if value == 10 else 2**40
    assert refused.value.message.startswith(
        f"{tmp_path / name}: eos_token_id holds {worst}, but the model's ids are 0 to 9;"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 200_000, '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_bad_config_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        open_checkpoint(tmp_path, "auto")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"torch_dtype": "float8"}, "dtype float8 is not supported"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_a_refused_config_names_its_folder(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path, **change)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as refused:
        open_checkpoint(tmp_path, "auto")
    assert refused.value.message.startswith(f"{tmp_path}: {words}")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path, "auto")


FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "shard.safetensors",
)


@pytest.mark.parametrize("name", FILES)
def test_a_file_out_of_reach_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As a link into a folder that may not be entered."""
    weights = write(tmp_path)
    if name.startswith(("model.safetensors.index", "shard")):
        shard = weights.rename(tmp_path / "shard.safetensors")
        index = {"weight_map": dict.fromkeys(read_header(shard), shard.name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    put_out_of_reach(monkeypatch, tmp_path / name)
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(tmp_path, "auto")
    assert refused.value.message == f"{tmp_path / name}: cannot be read: Permission denied"
    weights_present(tmp_path)


def test_a_pipe_is_no_file_to_wait_for(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path, "auto")
