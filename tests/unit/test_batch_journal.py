"""The output of a batch run: append, lock, fingerprint, recovery."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corellm.batch.fingerprint import Fingerprint
from corellm.batch.journal import Journal, answer_row, error_row, open_journal
from corellm.batch.lines import Survey
from corellm.errors import BatchError

SURVEY = Survey("ab" * 32, 100, 3)
MODEL = {"model": "m", "dtype": "float32", "load_format": "safetensors", "weights_seed": None}
FINGERPRINT = Fingerprint.of(SURVEY, model=MODEL, settings={"order": "completion", "seed": 1})


def opened(output: Path, fingerprint: Fingerprint = FINGERPRINT, **options: Any) -> Journal:
    return open_journal(str(output), fingerprint, source=str(output.with_name("in.jsonl")), **options)


def row(line: int, status: int = 200) -> bytes:
    return answer_row(line, line * 1000, f"c{line}", status, "req", {"text": "é\n\u2028"})


def filled(output: Path, *rows: bytes) -> Path:
    with opened(output) as journal:
        for data in rows:
            journal.append(data)
    return output


def test_rows_are_single_lines_of_openai_shape(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), error_row(2, 0xABC, None, "row_invalid", "bad"))
    first, second = output.read_bytes().removesuffix(b"\n").split(b"\n")
    assert json.loads(first) == {
        "id": "batch_req_1_000003e8",
        "custom_id": "c1",
        "response": {"status_code": 200, "request_id": "req", "body": {"text": "é\n\u2028"}},
        "error": None,
    }
    assert json.loads(second) == {
        "id": "batch_req_2_00000abc",
        "custom_id": None,
        "response": None,
        "error": {"code": "row_invalid", "message": "line 2: bad", "line": 2},
    }


def test_an_appended_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    with opened(tmp_path / "out.jsonl") as journal:
        journal.append(row(1))
        assert (tmp_path / "out.jsonl").read_bytes() == row(1) + b"\n"


def test_reopening_knows_the_finished_rows(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(3), row(5000, 400), error_row(1, 7, None, "row_invalid", "bad"))
    with opened(output) as journal:
        finished = journal.finished
    assert [line for line in range(6000) if line in finished] == [1, 3, 5000]
    assert (finished.crc(1), finished.crc(3), finished.crc(5000)) == (7, 3000, 5_000_000)
    assert finished.count == 3
    assert [finished.failed(line) for line in (1, 3, 5000)] == [True, False, True]


def test_a_torn_last_line_goes_whatever_its_length(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), row(2))
    whole = output.read_bytes()
    first = len(row(1)) + 1
    for size in range(first, len(whole)):
        output.write_bytes(whole[:size])
        with opened(output) as journal:
            assert (1 in journal.finished, 2 in journal.finished) == (True, False)
        assert output.read_bytes() == whole[:first]


def test_a_damaged_last_line_goes_although_it_ends(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    whole = output.read_bytes()
    output.write_bytes(whole + b"\0" * 50 + b"\n")
    opened(output).close()
    assert output.read_bytes() == whole


@pytest.mark.parametrize("damage", [b"{\n", b"\n", b'{"id":"other","response":null,"error":null}\n', b'{"a":1}\n'])
def test_damage_before_the_last_line_is_refused_and_kept(tmp_path: Path, damage: bytes) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), row(2))
    whole = output.read_bytes()
    output.write_bytes(damage + whole)
    with pytest.raises(BatchError, match="is damaged at line 1"):
        opened(output)
    assert output.read_bytes() == damage + whole
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_two_rows_for_one_line_are_refused(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), row(2), row(1))
    with pytest.raises(BatchError, match="two rows for line 1"):
        opened(output)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("input_sha256", {"survey": replace(SURVEY, sha256="cd" * 32)}),
    ("input_size", {"survey": replace(SURVEY, size=101)}),
    ("input_sha256", {"survey": None}),
    ("model was m, is other", {"model": {**MODEL, "model": "other"}}),
    ("dtype was float32, is bfloat16", {"model": {**MODEL, "dtype": "bfloat16"}}),
    ("weights_seed was none, is 5", {"model": {**MODEL, "load_format": "dummy", "weights_seed": 5}}),
    ("settings.order", {"settings": {"order": "input", "seed": 1}}),
    ("settings.seed was 1, is none", {"settings": {"order": "completion"}}),
    ("settings.top_p was none, is 0.5", {"settings": {"order": "completion", "seed": 1, "top_p": 0.5}}),
]


@pytest.mark.parametrize(("field", "change"), CHANGES)
def test_another_fingerprint_is_refused_by_the_field_that_differs(
    tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    whole = output.read_bytes()
    base = {"survey": SURVEY, "model": MODEL, "settings": {"order": "completion", "seed": 1}}
    given = {**base, **change}
    other = Fingerprint.of(given.pop("survey"), **given)
    with pytest.raises(BatchError, match=f"{field}.*--restart.* -o"):
        opened(output, other)
    assert output.read_bytes() == whole
    with opened(output, other, restart=True) as journal:
        assert journal.finished.count == 0
    assert output.read_bytes() == b""
    opened(output, other).close()


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    with pytest.raises(BatchError, match="version was 1, is 2"):
        opened(output, msgspec.structs.replace(FINGERPRINT, version=2))


def test_a_foreign_file_is_never_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"precious\n")
    with pytest.raises(BatchError, match=r"exists, but no out\.jsonl\.run\.json says how it was made"):
        opened(output)
    (tmp_path / "out.jsonl.run.json").write_bytes(b"{")
    with pytest.raises(BatchError, match=r"run\.json is damaged"):
        opened(output)
    assert output.read_bytes() == b"precious\n"


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"precious\n")
    link = tmp_path / "link"
    link.symlink_to(source)
    for name in (source, link):
        with pytest.raises(BatchError, match="is the input itself"):
            open_journal(str(name), FINGERPRINT, source=str(source), restart=True)
    assert source.read_bytes() == b"precious\n"


def test_outputs_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="is a folder"):
        opened(tmp_path)
    with pytest.raises(BatchError, match="cannot be opened: No such file or directory"):
        opened(tmp_path / "no" / "out.jsonl")


def test_retrying_drops_the_failed_rows_alone(tmp_path: Path) -> None:
    output = filled(
        tmp_path / "out.jsonl", row(1), row(2, 400), error_row(3, 3, None, "row_invalid", "x"), row(4), row(5, 500)
    )
    with opened(output, retry_errors=True) as journal:
        assert [line for line in range(9) if line in journal.finished] == [1, 4]
        journal.append(row(2))
    assert output.read_bytes() == b"\n".join([row(1), row(4), row(2), b""])


def test_a_second_run_is_refused_by_the_first_ones_process(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    code = (
        "import sys; sys.path.insert(0, '.'); from tests.unit.test_batch_journal import *\n"
        "try: opened(Path(sys.argv[1]))\nexcept BatchError as error: print(error)"
    )
    with opened(output) as journal:
        journal.append(row(1))
        for name in (output, link):
            told = subprocess.run([sys.executable, "-c", code, str(name)], capture_output=True, text=True, check=True)
            assert f"is in use by another run (process {os.getpid()})" in told.stdout
    assert not (tmp_path / "out.jsonl.lock").exists()
    opened(output).close()


def test_the_lock_of_a_dead_run_is_free(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.lock").write_text("999999\n")
    opened(tmp_path / "out.jsonl").close()


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_leaves_whole_rows_and_a_message_of_its_own(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with opened(output) as journal:
        journal.append(row(1))
        # Room for half a row: the write is cut short, then refused.
        with file_size_limit(len(row(1)) * 3 // 2), pytest.raises(BatchError, match=r"no space left.*to go on"):
            journal.append(row(2))
        assert output.read_bytes() == row(1) + b"\n"
        journal.append(row(2))
    with opened(output) as journal:
        assert journal.finished.count == 2


def test_a_full_device(tmp_path: Path) -> None:
    with opened(Path("/dev/full")) as journal, pytest.raises(BatchError, match="/dev/full cannot be written: No space"):
        journal.append(row(1))


def test_a_stream_is_written_and_never_resumed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with opened(pipe) as journal:
            journal.append(row(1))
        assert os.read(reader, 1000) == row(1) + b"\n"
    finally:
        os.close(reader)
    assert os.listdir(tmp_path) == ["pipe"]
