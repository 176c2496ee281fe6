"""The output of a batch run: append, lock, fingerprint, recovery."""

from __future__ import annotations

import errno
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
MODEL = {
    "model": "m",
    "dtype": "float32",
    "load_format": "safetensors",
    "weights_seed": None,
    "max_model_len": None,
    "checkpoint_sha256": "12" * 32,
    "weights_sample_sha256": "34" * 32,
}
FINGERPRINT = Fingerprint.of(SURVEY, model=MODEL, settings={"seed": 1})


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


@pytest.mark.parametrize("torn", [b"\0" * 50, b"\0" * 50 + b"\n", row(2)[:40] + b"\0" * 9 + b"\n", b"{", row(2)])
def test_what_a_crash_leaves_of_a_last_line_goes(tmp_path: Path, torn: bytes) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    whole = output.read_bytes()
    output.write_bytes(whole + torn)
    opened(output).close()
    assert output.read_bytes() == whole


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize(
    "foreign", [b'{"hello":1}', b"some notes", b'{"id":"other","response":null,"error":null}', b"[]"]
)
@pytest.mark.parametrize("options", [{}, {"retry_errors": True}])
def test_a_last_line_that_is_not_ours_is_refused_and_kept(
    tmp_path: Path, foreign: bytes, end: bytes, options: dict[str, Any]
) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), row(2, 400))
    whole = output.read_bytes() + foreign + end
    output.write_bytes(whole)
    with pytest.raises(BatchError, match=r"is damaged at line 3 .*; repair that line, or use --restart"):
        opened(output, **options)
    assert output.read_bytes() == whole
    assert not (tmp_path / "out.jsonl.lock").exists()


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
    for number, rows in enumerate([(row(1), row(2), row(1)), (row(1), row(1, 400)), [row(1, 400)] * 3]):
        output = filled(tmp_path / f"{number}.jsonl", *rows)
        with pytest.raises(BatchError, match="two rows for line 1"):
            opened(output)


OTHER_MODEL = {**MODEL, "model": "other", "checkpoint_sha256": "78" * 32}
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("input_sha256", {"survey": replace(SURVEY, sha256="cd" * 32)}),
    ("input_size", {"survey": replace(SURVEY, size=101)}),
    ("input_sha256", {"survey": None}),
    ("checkpoint_sha256 was .*; model was m, is other", {"model": OTHER_MODEL}),
    ("weights_sample_sha256 was", {"model": {**MODEL, "weights_sample_sha256": "56" * 32}}),
    ("max_model_len was none, is 256", {"model": {**MODEL, "max_model_len": 256}}),
    ("dtype was float32, is bfloat16", {"model": {**MODEL, "dtype": "bfloat16"}}),
    ("weights_seed was none, is 5", {"model": {**MODEL, "load_format": "dummy", "weights_seed": 5}}),
    ("settings.seed was 1, is none", {"settings": {}}),
    ("settings.top_p was none, is 0.5", {"settings": {"seed": 1, "top_p": 0.5}}),
]


@pytest.mark.parametrize(("field", "change"), CHANGES)
def test_another_fingerprint_is_refused_by_the_field_that_differs(
    tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    whole = output.read_bytes()
    base = {"survey": SURVEY, "model": MODEL, "settings": {"seed": 1}}
    given = {**base, **change}
    other = Fingerprint.of(given.pop("survey"), **given)
    with pytest.raises(BatchError, match=f"{field}.*--restart.* -o"):
        opened(output, other)
    assert output.read_bytes() == whole
    with opened(output, other, restart=True) as journal:
        assert journal.finished.count == 0
    assert output.read_bytes() == b""
    opened(output, other).close()


def test_one_model_under_another_name_goes_on(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    with opened(output, Fingerprint.of(SURVEY, model={**MODEL, "model": "./m"}, settings={"seed": 1})) as journal:
        assert journal.finished.count == 1


FIRST_FORMAT = {
    "version": 1,
    "input_sha256": SURVEY.sha256,
    "input_size": SURVEY.size,
    "model": {
        **{name: value for name, value in MODEL.items() if name != "weights_sample_sha256"},
        "max_model_len": 512,  # what the engine had
        "kv_blocks": 40,
        "page_size": 16,
    },
    "settings": {"order": "input", "seed": 1},
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"max_model_len": 512}, None),
        ({"max_model_len": 256}, "max_model_len was 512, is 256"),
        ({"dtype": "bfloat16"}, "dtype was float32, is bfloat16"),
        ({"model": "other"}, "model was m, is other"),  # it knew nothing of weights but whose they are
    ],
)
def test_the_first_format_goes_on_unless_what_was_asked_for_differs(
    tmp_path: Path, change: dict[str, Any], says: str | None
) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    (tmp_path / "out.jsonl.run.json").write_text(json.dumps(FIRST_FORMAT))
    asked = Fingerprint.of(SURVEY, model={**MODEL, **change}, settings={"seed": 1})
    if says is None:
        with opened(output, asked) as journal:
            assert journal.finished.count == 1
    else:
        with pytest.raises(BatchError, match=says):
            opened(output, asked)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1))
    with pytest.raises(BatchError, match="version was 2, is 3"):
        opened(output, msgspec.structs.replace(FINGERPRINT, version=3))


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


FAILED = [row(2, 400), error_row(3, 3, None, "row_invalid", "x"), row(5, 500)]


def lines(*rows: bytes) -> bytes:
    return b"".join(row + b"\n" for row in rows)


def test_a_retried_row_replaces_the_failed_one_when_it_is_there(tmp_path: Path) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), *FAILED, row(4))
    before = output.read_bytes()
    with opened(output, retry_errors=True) as journal:
        assert [line for line in range(9) if line in journal.finished] == [1, 4]
        assert journal.finished.count == 2
        assert output.read_bytes() == before
        journal.append(row(2))
        journal.append(row(5, 503))
        assert output.read_bytes() == before + lines(row(2), row(5, 503))
    assert output.read_bytes() == lines(row(1), FAILED[1], row(4), row(2), row(5, 503))
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.run.json"]


@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_killed_retry_has_an_old_or_a_new_row_for_each(tmp_path: Path, retry_errors: bool) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), *FAILED, row(4))
    before = output.read_bytes()
    with opened(output, retry_errors=True) as journal:
        journal.append(row(2))
        journal.append(row(5, 503))
        killed = output.read_bytes()
    for size in range(len(before), len(killed) + 1):
        output.write_bytes(killed[:size])
        second = size >= len(before) + len(row(2)) + 1
        third = size == len(killed)
        with opened(output, retry_errors=retry_errors) as journal:
            assert (2 in journal.finished) == (second or not retry_errors)
            assert (5 in journal.finished) == (not retry_errors)
        kept = [row(1), *([] if second else FAILED[:1]), FAILED[1], *([] if third else FAILED[2:]), row(4)]
        new = [*([row(2)] if second else []), *([row(5, 503)] if third else [])]
        assert output.read_bytes() == lines(*kept, *new)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_replaced_rows_cannot_be_dropped_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = filled(tmp_path / "out.jsonl", row(1), row(2, 400))
    journal = opened(output, retry_errors=True)
    journal.append(row(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_space)
        with pytest.raises(BatchError, match="no space left"):
            journal.close()
    assert output.read_bytes() == lines(row(1), row(2, 400), row(2))
    assert not (tmp_path / "out.jsonl.lock").exists()
    opened(output).close()
    assert output.read_bytes() == lines(row(1), row(2))


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
