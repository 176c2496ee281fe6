"""What an output was made from: kept beside it, compared before a run goes on with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from corellm.batch.lines import Survey
from corellm.batch.model_identity import MODEL_FILES, MODEL_NAME, WEIGHTS_DIGEST
from corellm.errors import BatchError

FORMAT = 2
_FIRST_FORMAT = 1
STREAM = "stream"  # stands for the digest of an input that cannot be read twice
_MISSING = "none"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The input, the model and every setting that shapes the rows of an output."""

    version: int = FORMAT
    input_sha256: str
    input_size: int | None  # bytes; None for a stream
    model: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def of(cls, survey: Survey | None, *, model: Mapping[str, Any], settings: Mapping[str, Any]) -> Fingerprint:
        """The fingerprint of a run. `model` is `model_identity`'s; both mappings may hold what JSON can."""
        return cls(
            input_sha256=survey.sha256 if survey else STREAM,
            input_size=survey.size if survey else None,
            model=msgspec.json.decode(msgspec.json.encode(model)),
            settings=msgspec.json.decode(msgspec.json.encode(settings)),
        )

    def differences(self, other: Fingerprint) -> list[tuple[str, str, str]]:
        """The fields that differ, as (name, own value, the other's value).

        A model goes by its files: how it is called differs only where they do.
        """
        mine, theirs = _flat(self), _flat(other)
        names = sorted(mine.keys() | theirs.keys())
        pairs = [(name, mine.get(name, _MISSING), theirs.get(name, _MISSING)) for name in names]
        found = [pair for pair in pairs if pair[1] != pair[2]]
        if not any(name in MODEL_FILES for name, _, _ in found):
            found = [pair for pair in found if pair[0] != MODEL_NAME]
        return found


def _flat(fingerprint: Fingerprint) -> dict[str, str]:
    fields = msgspec.structs.asdict(fingerprint)
    flat = {**fields.pop("model"), **{f"settings.{name}": value for name, value in fields.pop("settings").items()}}
    return {name: str(value) for name, value in {**fields, **flat}.items() if value is not None}


def _upgraded(saved: Fingerprint, new: Fingerprint) -> Fingerprint:
    """A fingerprint of the first format as today's.

    That one held what the engine had (dtype, context length, blocks), which nobody need have asked for, the order of
    the rows, and nothing of the values of weights, for which the model's name must do.
    """
    if saved.version != _FIRST_FORMAT:
        return saved
    model = {name: value for name, value in saved.model.items() if name not in ("kv_blocks", "page_size")}
    model |= {name: None for name in ("dtype", "max_model_len") if new.model.get(name) is None}
    if model.get(MODEL_NAME) == new.model.get(MODEL_NAME):
        model[WEIGHTS_DIGEST] = new.model.get(WEIGHTS_DIGEST)
    settings = {name: value for name, value in saved.settings.items() if name != "order"}
    return msgspec.structs.replace(saved, version=FORMAT, model=model, settings=settings)


def sidecar(output: Path) -> Path:
    """Where the fingerprint of an output lies."""
    return output.with_name(f"{output.name}.run.json")


def save(fingerprint: Fingerprint, output: Path) -> None:
    """Write the fingerprint atomically."""
    path = sidecar(output)
    draft = path.with_name(path.name + ".tmp")
    with open(draft, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(fingerprint)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def check(fingerprint: Fingerprint, output: Path) -> None:
    """Raises `BatchError`, naming each differing field, unless the output was made by a run like this one."""
    ways_out = "--restart to begin anew (its rows are lost), or -o to write elsewhere"
    path = sidecar(output)
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Fingerprint)
    except FileNotFoundError:
        raise BatchError(f"{output} exists, but no {path.name} says how it was made; use {ways_out}") from None
    except msgspec.DecodeError as error:
        raise BatchError(f"{path} is damaged: {error}; use {ways_out}") from None
    found = [f"{name} was {old}, is {new}" for name, old, new in _upgraded(saved, fingerprint).differences(fingerprint)]
    if found:
        raise BatchError(f"{output} is of another run: {'; '.join(found)}; use the same, or {ways_out}")
