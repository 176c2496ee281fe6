"""Which model an output was made with: its name, the settings that change its answers, and a digest of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from corellm.comms.settings import Settings
from corellm.errors import CheckpointError

_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def model_identity(settings: Settings) -> dict[str, Any]:
    """What of a model shapes the rows of an output, for its fingerprint."""
    dummy = settings.load_format == "dummy"
    return {
        "model": settings.model,
        "dtype": settings.dtype,
        "load_format": "dummy" if dummy else "safetensors",
        "weights_seed": settings.seed if dummy else None,
        "max_model_len": settings.max_model_len,
        "kv_blocks": settings.kv_blocks,
        "page_size": None if settings.kv_blocks is None else settings.page_size,  # they bound a request together
        "checkpoint_sha256": checkpoint_digest(Path(settings.model_path), weights=not dummy),
    }


def checkpoint_digest(folder: Path, *, weights: bool) -> str:
    """A digest that costs milliseconds: the small files whole; of each weight file its name, size and header.

    Two fine-tunes that differ in nothing but the values of their tensors have the same. Raises `CheckpointError`.
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


def _add(digest: hashlib._Hash, name: str, size: int, content: bytes) -> None:
    digest.update(f"{name}\0{size}\0".encode())
    digest.update(content)


def _header(file: Path) -> bytes:
    """The header of a safetensors file: an 8-byte little-endian length, and so many bytes of JSON."""
    with file.open("rb") as stream:
        length = stream.read(8)
        return length + stream.read(int.from_bytes(length, "little"))
