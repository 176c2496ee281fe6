"""The rows of a batch: OpenAI batch lines and the two short forms, checked as far as no model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from corellm.batch.lines import Line
from corellm.batch.unique import UniqueIds
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.kinds import shown

ROW_INVALID = "row_invalid"
DUPLICATE_ID = "duplicate_custom_id"

_ENVELOPE = ("custom_id", "method", "url", "body")
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_SHORT_FORMS = {"messages": Endpoint.CHAT, "prompt": Endpoint.COMPLETIONS}


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the input. `crc` is the CRC-32 of its raw line."""

    line: int
    crc: int
    custom_id: str
    endpoint: Endpoint
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowError:
    """A line of the input that is no request: why, and its `custom_id` if it has one."""

    line: int
    crc: int
    custom_id: str | None
    code: str
    message: str


class _Refused(Exception):
    """Why a line is no row."""


def read_rows(lines: Iterator[Line]) -> Iterator[Row | RowError]:
    """Every line as a row or the reason why not, in order. The second row of a `custom_id` is an error."""
    seen = UniqueIds()
    for line in lines:
        row = parse_row(line)
        if isinstance(row, Row) and not seen.add(row.custom_id):
            message = f"custom_id {shown(row.custom_id)} is that of an earlier row; each row needs its own"
            yield RowError(row.line, row.crc, row.custom_id, DUPLICATE_ID, message)
        else:
            yield row


def parse_row(line: Line) -> Row | RowError:
    """One line as a row; never raises for what the line holds."""
    custom_id: str | None = None
    try:
        fields = _object(line)
        custom_id = _custom_id(fields, line.number)
        endpoint, body = _request(fields)
    except _Refused as refused:
        return RowError(line.number, line.crc, custom_id, ROW_INVALID, str(refused))
    return Row(line.number, line.crc, custom_id, endpoint, body)


def _object(line: Line) -> dict[str, Any]:
    if line.data is None:
        raise _Refused(f"the line has {line.size} bytes, more than the {line.limit} allowed; split the row")
    try:
        value = msgspec.json.decode(line.data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Refused(f"the line is not UTF-8 (byte {error.start}: {error.reason})") from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _Refused(f"the line is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Refused(f"the line holds {shown(value)}; it must be a JSON object")
    return value


def _custom_id(fields: dict[str, Any], line: int) -> str:
    value = fields.get("custom_id")
    if value is None:
        return f"row-{line}"
    if not isinstance(value, str):
        raise _Refused(f"custom_id is {shown(value)}; it must be a string")
    return value


def _request(fields: dict[str, Any]) -> tuple[Endpoint, Mapping[str, Any]]:
    if any(name in fields for name in ("method", "url", "body")):
        return _openai_line(fields)
    forms = [name for name in _SHORT_FORMS if name in fields]
    if len(forms) != 1:
        has = "both prompt and messages" if forms else "none of body, prompt and messages"
        raise _Refused(f"the row has {has}; give exactly one of them")
    body = {name: value for name, value in fields.items() if name != "custom_id"}
    return _SHORT_FORMS[forms[0]], body


def _openai_line(fields: dict[str, Any]) -> tuple[Endpoint, Mapping[str, Any]]:
    for name in fields:
        if name not in _ENVELOPE:
            raise _Refused(f"{shown(name)} is not a field of a batch line; put it inside body, or remove it")
    method, url, body = (fields.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise _Refused(f"method is {shown(method)}; it must be 'POST'")
    endpoint = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is None:
        raise _Refused(f"url is {shown(url)}; it must be one of {', '.join(_ENDPOINTS)}")
    if not isinstance(body, dict):
        raise _Refused(f"body is {shown(body)}; it must be an object")
    return endpoint, body
