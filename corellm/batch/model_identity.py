"""Which model an output was made with: its name, the settings that change its answers, and a digest of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from corellm.comms.settings import Settings
from corellm.config import EngineOptions
from corellm.errors import CheckpointError

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


MODEL_NAME = "model"  # as the user wrote it: told, not compared, since one model has many names
CHECKPOINT_DIGEST = "checkpoint_sha256"
WEIGHTS_DIGEST = "weights_sample_sha256"
MODEL_FILES = (CHECKPOINT_DIGEST, WEIGHTS_DIGEST)

_SAMPLES = 64  # of a weight file
_SAMPLE_BYTES = 1 << 12


def model_identity(settings: Settings, *, asked: EngineOptions) -> dict[str, Any]:
    """What of a model shapes the rows of an output, for its fingerprint.

    Of dtype and context length it holds what the user asked for, if anything. What an engine makes of that is not in
    here, nor how much its cache holds: a run may go on with another engine, and rows that do not fit that one become
    error rows. Raises `CheckpointError`.
    """
    dummy = settings.load_format == "dummy"
    folder = Path(settings.model_path)
    return {
        MODEL_NAME: settings.model,
        "dtype": None if asked.dtype == "auto" else asked.dtype,
        "load_format": "dummy" if dummy else "safetensors",
        "weights_seed": settings.seed if dummy else None,
        "max_model_len": asked.max_model_len,
        CHECKPOINT_DIGEST: checkpoint_digest(folder, weights=not dummy),
        WEIGHTS_DIGEST: None if dummy else weights_digest(folder),
    }


def checkpoint_digest(folder: Path, *, weights: bool) -> str:
    """A digest that costs milliseconds: the small files whole; of each weight file its name, size and header.

    Two fine-tunes that differ in nothing but the values of their tensors have the same: `weights_digest` tells them
    apart. Raises `CheckpointError`.
    """
    digest = hashlib.sha256()
    try:
        for file in (folder / name for name in _SMALL_FILES):
            if file.is_file():
                _add(digest, file.name, file.stat().st_size, file.read_bytes())
        for file in sorted(folder.glob("*.safetensors")) if weights else ():
            _add(digest, file.name, file.stat().st_size, _header(file))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def weights_digest(folder: Path) -> str:
    """A digest of 64 samples of each weight file, 4 KiB each and evenly spread, since reading all takes minutes.

    A fine-tune changes most values of the tensors that it trains, so it shows unless these are a hundredth of all.
    Raises `CheckpointError`.
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(folder.glob("*.safetensors")):
            size = file.stat().st_size
            with file.open("rb", buffering=0) as stream:
                for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                    stream.seek(start)
                    digest.update(stream.read(_SAMPLE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, size: int, content: bytes) -> None:
    digest.update(f"{name}\0{size}\0".encode())
    digest.update(content)


def _header(file: Path) -> bytes:
    """The header of a safetensors file: an 8-byte little-endian length, and so many bytes of JSON."""
    with file.open("rb") as stream:
        length = stream.read(8)
        return length + stream.read(int.from_bytes(length, "little"))
