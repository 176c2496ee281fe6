"""Lines and rows of a batch's input: what is a line, what is a row, and the reason of each line that is none."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corellm.batch.lines import Line, Source, read_lines
from corellm.batch.rows import Row, RowError, parse_row, read_rows
from corellm.batch.unique import UniqueIds
from corellm.comms.messages import Progress
from corellm.errors import BatchError
from corellm.openai_api.fields import Endpoint


def lines_of(data: bytes, limit: int = 1 << 20) -> list[tuple[int, bytes | None]]:
    return [(line.number, line.data) for line in read_lines(io.BytesIO(data), limit)]


def parsed(text: str | bytes) -> Row | RowError:
    data = text.encode() if isinstance(text, str) else text
    return parse_row(Line(7, data, zlib.crc32(data), len(data)))


def test_lines_split_at_newlines_alone() -> None:
    # A JSON string may hold U+2028 and U+0085, and a bare \r is white space between JSON tokens.
    data = "a\u2028b\u0085c\rd\n\n  \ne\r\nf".encode()
    assert lines_of(data) == [(1, "a\u2028b\u0085c\rd".encode()), (4, b"e"), (5, b"f")]


def test_a_byte_order_mark_is_dropped_at_the_start_alone() -> None:
    assert lines_of(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n") == [(1, b"a"), (2, b"\xef\xbb\xbfb")]


@pytest.mark.parametrize("last", [b"\n", b""])
def test_a_line_over_the_limit_is_told_without_its_data(last: bytes) -> None:
    data = b"1234\n12345" + b"x" * 3_000_000 + last
    long = list(read_lines(io.BytesIO(data), 4))[1]
    assert (long.number, long.data, long.size) == (2, None, 3_000_005)
    assert long.crc == zlib.crc32(b"12345" + b"x" * 3_000_000)
    assert lines_of(data + (b"ok" if last else b""), 4)[-1] == ((3, b"ok") if last else (2, None))


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")), max_size=20))
def test_any_lines_come_back_with_their_numbers(lines: list[bytes]) -> None:
    expected = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    found = [(number, data) for number, data in lines_of(b"x" + b"\n".join([b"", *lines]))[1:]]
    assert found == [(number + 1, line) for number, line in expected]


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))
    assert [line.data for line in Source(str(path)).lines()] == [b"a", b"b"]
    reports: list[Progress] = []
    survey = Source(str(path)).survey(reports.append)
    assert survey is not None
    assert (survey.rows, survey.size) == (2, path.stat().st_size)
    assert survey.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [(told.done, told.total, told.unit) for told in reports] == [(survey.size, survey.size, "B"), (2, 0, "rows")]


def test_a_damaged_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(os.urandom(5000).hex().encode())
    path.write_bytes(whole[:3000])
    with pytest.raises(BatchError, match=r"the gzip input .* is damaged"):
        list(Source(str(path)).lines())


def test_a_missing_input_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="is not there"):
        Source(str(tmp_path / "none.jsonl"))
    with pytest.raises(BatchError, match="is a folder"):
        Source(str(tmp_path))


def test_standard_input_can_be_spooled_and_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "typed"
    path.write_bytes(gzip.compress(b"a\nb\n"))
    with open(path) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        source = Source("-")
        assert source.survey() is None
        source.spool()
        source.spool()
        for _ in range(2):
            assert [line.data for line in source.lines()] == [b"a", b"b"]
        source.close()


def test_the_three_forms_of_a_row() -> None:
    body: dict[str, Any] = {"model": "gpt-4o", "messages": [{"role": "user", "content": "é"}], "n": 2}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    data = json.dumps(line).encode()
    assert parsed(data) == Row(7, zlib.crc32(data), "c", Endpoint.CHAT, body)
    short = parsed('{"prompt": "p", "temperature": 0}')
    assert isinstance(short, Row)
    assert (short.custom_id, short.named, short.endpoint, short.body) == (
        "row-7",
        False,
        Endpoint.COMPLETIONS,
        {"prompt": "p", "temperature": 0},
    )
    chat = parsed('{"custom_id": "x", "messages": []}')
    assert isinstance(chat, Row)
    assert (chat.custom_id, chat.endpoint, chat.body) == ("x", Endpoint.CHAT, {"messages": []})


BAD_LINES = [
    (b"{", None, "not JSON: it is cut off"),
    (b'{"prompt": "\xff"}', None, "not UTF-8"),
    (b'{"prompt": "\\ud800 alone"}', None, "not JSON"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'{"prompt": NaN}', None, "not JSON: it goes wrong at byte 11"),
    (b'{"custom_id": "c", "method": "POST", "url": null, "body": {}}', "c", "url is null"),
    (b'{"custom_id": true, "prompt": "a"}', None, "custom_id is true"),
    (b'{"prompt": "a"} {"prompt": "b"}', None, "not JSON"),
    (b"[1]", None, "a list with 1 entry;"),
    (b"null", None, "holds null"),
    (b"{}", "row-7", "none of body, prompt and messages"),
    (b'{"custom_id": 5, "prompt": "a"}', None, "custom_id is 5"),
    (b'{"prompt": "a", "messages": []}', "row-7", "both prompt and messages"),
    (
        b'{"custom_id": "c", "method": "GET", "url": "/v1/completions", "body": {}}',
        "c",
        'method is "GET"; it must be "POST"',
    ),
    (b'{"custom_id": "c", "url": "/v1/completions", "body": {}}', "c", "method is missing"),
    (b'{"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {}}', "c", 'url is "/v1/embeddings"'),
    (b'{"custom_id": "c", "method": "POST", "url": ["x"], "body": {}}', "c", "url is a list"),
    (b'{"custom_id": "c", "method": "POST", "url": "/v1/completions"}', "c", "body is missing"),
    (b'{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": []}', "c", "body is an empty list"),
    (b'{"method": "POST", "url": "/v1/completions", "body": {}, "n": 2}', "row-7", '"n" is not a field'),
]


@pytest.mark.parametrize(("line", "custom_id", "reason"), BAD_LINES, ids=[reason for _, _, reason in BAD_LINES])
def test_a_line_that_is_no_row_says_why(line: bytes, custom_id: str | None, reason: str) -> None:
    row = parsed(line)
    assert isinstance(row, RowError)
    assert (row.line, row.custom_id, row.code) == (7, custom_id, "row_invalid")
    assert reason in row.message
    assert "\n" not in row.message


def kinds(*rows: object) -> list[str]:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    found = list(read_rows(read_lines(io.BytesIO(data))))
    return [row.code if isinstance(row, RowError) else "shared" if row.shared else "ok" for row in found]


def test_the_second_row_of_an_id_is_an_error_and_the_first_runs() -> None:
    a, b = {"custom_id": "a", "prompt": "1"}, {"custom_id": "b", "prompt": "2"}
    assert kinds(a, a, b, a) == ["ok", "duplicate_custom_id", "ok", "duplicate_custom_id"]


def test_an_id_counts_also_where_its_row_is_no_request() -> None:
    bad, good = {"custom_id": "a"}, {"custom_id": "a", "prompt": "1"}
    assert kinds(bad, good) == ["row_invalid", "duplicate_custom_id"]
    assert kinds(good, bad) == ["ok", "row_invalid"]


def test_an_id_made_from_a_line_number_makes_no_row_a_duplicate_and_is_marked() -> None:
    without = {"prompt": "1"}
    assert kinds(without, {"custom_id": "row-1", "prompt": "2"}) == ["ok", "shared"]
    assert kinds({"custom_id": "row-2", "prompt": "1"}, without) == ["ok", "shared"]
    assert kinds({}, {"custom_id": "row-1", "prompt": "2"}) == ["row_invalid", "shared"]
    assert kinds(without, {"custom_id": "row-3", "prompt": "2"}) == ["ok", "ok"]
    assert kinds({"custom_id": None, "prompt": "1"}, without) == ["ok", "ok"]


@given(st.lists(st.text(max_size=3)))
def test_unique_ids_are_a_set(texts: list[str]) -> None:
    seen: set[str] = set()
    ids = UniqueIds()
    for text in texts:
        assert ids.add(text) == (text not in seen)
        seen.add(text)
        assert text in ids
        assert f"{text}-" not in ids or f"{text}-" in seen
    assert len(ids) == len(seen)


def test_unique_ids_survive_growth() -> None:
    ids = UniqueIds()
    assert all(ids.add(f"id-{index}") for index in range(20_000))
    assert not any(ids.add(f"id-{index}") for index in range(20_000))
    assert ids.add("id-20000")
