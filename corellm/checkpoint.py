"""Open a Llama checkpoint folder: configuration, stop ids, and where each tensor lies in its safetensors file.

No tensor is read here. Whatever is wrong with the files is found here, before any memory is taken: the format is
parsed strictly, and every tensor that the weight table asks for must be there with exactly the shape that config.json
implies.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from corellm.errors import CheckpointError, UnsupportedModelError
from corellm.models.llama.spec import LlamaSpec, weight_table

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor in a file: row-major little-endian elements at bytes `start:stop`, counted from the file's start."""

    file: Path
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened folder. `tensors` is empty for load format dummy; `eos_ids` are sorted and may be empty."""

    path: Path
    config: dict[str, Any]
    spec: LlamaSpec
    tensors: dict[str, TensorRef]
    eos_ids: tuple[int, ...]


_Size = Annotated[int, msgspec.Meta(ge=0)]


class _TensorHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value of a safetensors header; offsets are bytes from the end of the header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


class _Index(msgspec.Struct, frozen=True):
    """`model.safetensors.index.json`: tensor name -> name of the file that holds it."""

    weight_map: dict[str, str]


def open_checkpoint(path: Path, load_format: str) -> Checkpoint:
    """Read `path`'s configuration and, unless `load_format` is "dummy", locate and check every tensor.

    Raises `CheckpointError` for files that are missing or contradict themselves or each other, and
    `UnsupportedModelError` for another architecture.
    """
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    with naming(path):
        spec = LlamaSpec.from_config(config)
    eos = _eos_ids(path / "config.json", config, spec.vocab)
    if is_there(generation):
        eos |= _eos_ids(generation, _read_json(generation), spec.vocab)
    tensors: dict[str, TensorRef] = {}
    if load_format != "dummy":
        tensors = _read_tensors(path)
        _check_tensors(path, spec, tensors)
    return Checkpoint(path, config, spec, tensors, tuple(sorted(eos)))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put `path` in front of what a part that does not know it says of a model."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{path}: {error.message}") from None


def weights_present(folder: Path) -> bool:
    """Whether `folder` holds config.json and every weight file that it names; their contents are not looked at."""
    if not os.path.isfile(folder / "config.json"):
        return False
    if os.path.isfile(folder / SINGLE_FILE):
        return True
    if not os.path.isfile(folder / INDEX_FILE):
        return False
    return all(os.path.isfile(folder / name) for name in set(_read_index(folder / INDEX_FILE).values()))


def is_there(file: Path) -> bool:
    """Whether `file` is a file, or a link to one. Raises `CheckpointError` where that cannot be told."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


def read_header(file: Path) -> dict[str, TensorRef]:
    """Parse the header of one safetensors file.

    The file is an 8-byte little-endian header length, that many bytes of JSON, then the tensors back to back. Raises
    `CheckpointError` unless the tensors' byte ranges match their dtypes and shapes and tile the rest of the file.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                _refuse(file, f"a header of {length} bytes does not fit a file of {size} bytes; it is cut off or torn")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    data = 8 + length
    refs = [_tensor_ref(file, name, raw, data) for name, raw in _parse_header(file, text).items()]
    end = data
    for name, ref in sorted(refs, key=lambda item: (item[1].start, item[1].stop)):
        if ref.start != end:
            _refuse(file, f"tensor {name} starts at byte {ref.start}, expected {end}; tensors overlap or leave a gap")
        end = ref.stop
    if end != size:
        _refuse(file, f"the tensors end at byte {end}, the file at {size}; it is cut off or was added to")
    return dict(refs)


def _refuse(file: Path, reason: str) -> NoReturn:
    raise CheckpointError(f"{file}: {reason}; fetch the file again")


def _parse_header(file: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"the header is not valid JSON: {error}")
    if not isinstance(header, dict):
        _refuse(file, "the header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _tensor_ref(file: Path, name: str, raw: object, data: int) -> tuple[str, TensorRef]:
    try:
        entry = msgspec.convert(raw, _TensorHeader)
    except msgspec.ValidationError as error:
        _refuse(file, f"the header of tensor {name!r} is malformed: {error}")
    itemsize = DTYPE_BYTES.get(entry.dtype)
    if itemsize is None:
        allowed = ", ".join(DTYPE_BYTES)
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {entry.dtype}; CoreLLM reads {allowed}; use an unquantised checkpoint"
        )
    start, stop = entry.data_offsets
    nbytes = math.prod(entry.shape) * itemsize
    if stop - start != nbytes:
        _refuse(file, f"tensor {name!r} takes {stop - start} bytes, but {entry.dtype}{list(entry.shape)} is {nbytes}")
    return name, TensorRef(file, entry.dtype, entry.shape, data + start, data + stop)


def _read_tensors(path: Path) -> dict[str, TensorRef]:
    if is_there(path / SINGLE_FILE):
        return read_header(path / SINGLE_FILE)
    if is_there(path / INDEX_FILE):
        return _read_shards(path)
    try:
        others = sorted(name for name in os.listdir(path) if name.endswith((".bin", ".pt", ".pth", ".gguf")))
    except OSError:
        others = []  # they are a hint only
    hint = f"; {others[0]} is not read, convert it to safetensors" if others else ""
    raise CheckpointError(f"{path}: neither {SINGLE_FILE} nor {INDEX_FILE} is there{hint}")


def _read_shards(path: Path) -> dict[str, TensorRef]:
    index = path / INDEX_FILE
    weight_map = _read_index(index)
    tensors: dict[str, TensorRef] = {}
    for name in sorted(set(weight_map.values())):
        if not is_there(path / name):
            raise CheckpointError(f"{index}: names {name}, which is not there; fetch the missing file")
        for tensor, ref in read_header(path / name).items():
            if tensor in tensors:
                raise CheckpointError(f"{path}: tensor {tensor} is in both {tensors[tensor].file.name} and {name}")
            tensors[tensor] = ref
    for tensor, name in weight_map.items():
        if tensor not in tensors or tensors[tensor].file.name != name:
            raise CheckpointError(f"{index}: says tensor {tensor} is in {name}, but it is not; fetch both files again")
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.convert(_read_json(file), _Index).weight_map
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: {error}") from None
    for name in weight_map.values():
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{file}: names the file {name!r}; it must be a *.safetensors file of the same folder"
            )
    return weight_map


def _check_tensors(path: Path, spec: LlamaSpec, tensors: Mapping[str, TensorRef]) -> None:
    if spec.layers > len(tensors):  # before a table of as many entries is made
        raise CheckpointError(
            f"{path}: config.json asks for {spec.layers} layers, but there are {len(tensors)} tensors"
        )
    table = weight_table(spec, DTYPE_BYTES["BF16"])
    expected = {shard.tensor: shard.shape for entry in table.entries for shard in entry.shards}
    # Older exports store the rotary frequencies, which follow from config.json, and some tied models their head, which
    # by their own config is the embedding: both are left unread.
    ignored = {name for name in tensors if name.endswith(".rotary_emb.inv_freq")}
    if spec.tied and "lm_head.weight" in tensors:
        _check_shape(path, "lm_head.weight", tensors, (spec.vocab, spec.hidden))
        ignored.add("lm_head.weight")
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{path}: {_some(expected.keys() - tensors.keys())} missing; config.json asks for it")
        _check_shape(path, name, tensors, shape)
    left_over = tensors.keys() - expected.keys() - ignored
    if left_over:
        raise CheckpointError(f"{path}: {_some(left_over)} left over; config.json does not describe these weights")


def _check_shape(path: Path, name: str, tensors: Mapping[str, TensorRef], expected: tuple[int, ...]) -> None:
    found = tensors[name].shape
    if found != expected:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {list(found)}, expected {list(expected)} by config.json"
        )


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"tensor {first} (and {len(others)} more) is" if others else f"tensor {first} is"


def _read_json(file: Path) -> dict[str, Any]:
    if not is_there(file):
        raise CheckpointError(f"{file.parent}: has no {file.name}; --model must be a checkpoint folder")
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: is not a JSON object")
    return value


def _eos_ids(file: Path, config: Mapping[str, Any], vocab: int) -> set[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise CheckpointError(f"{file}: eos_token_id is {value!r}; it must be a token id or a list of them")
    # One beyond the vocabulary is never sampled. Were there no other, answers would all run on to their last token.
    known = {token for token in ids if token < vocab}
    if ids and not known:
        raise CheckpointError(
            f"{file}: eos_token_id holds {max(ids)}, but the model's ids are 0 to {vocab - 1}; "
            "correct it, or take it out"
        )
    return known
