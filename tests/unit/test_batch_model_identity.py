"""Which changes of a model's files an output's fingerprint tells, and that it does not read the weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corellm.batch.model_identity import checkpoint_digest, weights_digest
from corellm.errors import CheckpointError

HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    write_weights(tmp_path / "model.safetensors")
    return tmp_path


def write_weights(file: Path, header: bytes = HEADER, data: bytes = b"1234") -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"],
)
def test_each_small_file_counts(folder: Path, name: str) -> None:
    before = checkpoint_digest(folder, weights=True)
    (folder / name).write_text('{"a": 1}')
    changed = checkpoint_digest(folder, weights=True)
    assert before != changed


def test_of_weights_name_size_and_header_count(folder: Path) -> None:
    file = folder / "model.safetensors"
    seen = [checkpoint_digest(folder, weights=True)]
    write_weights(file, HEADER.replace(b"F32", b"I32"))
    seen.append(checkpoint_digest(folder, weights=True))
    write_weights(file, data=b"12345")
    seen.append(checkpoint_digest(folder, weights=True))
    write_weights(file)
    file.rename(folder / "other.safetensors")
    seen.append(checkpoint_digest(folder, weights=True))
    assert len(set(seen)) == 4


def test_times_and_foreign_files_do_not_count(folder: Path) -> None:
    before = checkpoint_digest(folder, weights=True)
    os.utime(folder / "config.json", (1, 1))
    os.utime(folder / "model.safetensors", (1, 1))
    (folder / "README.md").write_text("hello")
    assert checkpoint_digest(folder, weights=True) == before


def test_dummy_weights_have_no_files(folder: Path) -> None:
    before = checkpoint_digest(folder, weights=False)
    (folder / "model.safetensors").unlink()
    assert checkpoint_digest(folder, weights=False) == before


def test_a_huge_file_is_not_read(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading it would take minutes
    checkpoint_digest(folder, weights=True)
    weights_digest(folder)


@pytest.mark.parametrize("size", [4, 5000, 1_000_003])
def test_other_values_of_the_same_tensors_show(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    write_weights(file, data=bytes(size))
    before = checkpoint_digest(folder, weights=True), weights_digest(folder)
    changed = size // 2, size - size // 10  # a tensor of 40 % of the file
    write_weights(file, data=bytes(changed[0]) + b"\1" * (changed[1] - changed[0]) + bytes(size - changed[1]))
    after = checkpoint_digest(folder, weights=True), weights_digest(folder)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_an_unreadable_file_is_said(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        checkpoint_digest(folder, weights=True)
