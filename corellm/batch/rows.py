"""The rows of a batch: OpenAI batch lines and the two short forms, checked as far as no model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from corellm.batch.lines import Line
from corellm.batch.unique import UniqueIds
from corellm.openai_api.fields import Endpoint
from corellm.openai_api.json_object import NotAnObjectError, json_object
from corellm.openai_api.kinds import shown

ROW_INVALID = "row_invalid"
DUPLICATE_ID = "duplicate_custom_id"

_ENVELOPE = ("custom_id", "method", "url", "body")
_ENDPOINTS = {endpoint.value: endpoint for endpoint in Endpoint}
_SHORT_FORMS = {"messages": Endpoint.CHAT, "prompt": Endpoint.COMPLETIONS}


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the input. `crc` is the CRC-32 of its raw line.

    `named` says that `custom_id` is the input's and not made from the line's number. `shared` says that a row which is
    named and one which is not have the same.
    """

    line: int
    crc: int
    custom_id: str
    endpoint: Endpoint
    body: Mapping[str, Any]
    named: bool = True
    shared: bool = False


@dataclass(frozen=True, slots=True)
class RowError:
    """A line of the input that is no request: why, and its `custom_id` if one is known (see `Row`)."""

    line: int
    crc: int
    custom_id: str | None
    code: str
    message: str
    named: bool = True


class _Refused(Exception):
    """Why a line is no row."""


def read_rows(lines: Iterator[Line]) -> Iterator[Row | RowError]:
    """Every line as a row or the reason why not, in order.

    The second row that gives a `custom_id` is an error, also where the first is no request. Ids made from line numbers
    take part in this on neither side; a row that meets one of its own name is only marked as `shared`.
    """
    given, made = UniqueIds(), UniqueIds()
    for line in lines:
        row = parse_row(line)
        if row.custom_id is None:
            yield row
        elif not row.named:
            made.add(row.custom_id)
            yield replace(row, shared=True) if isinstance(row, Row) and row.custom_id in given else row
        elif not given.add(row.custom_id):
            yield _duplicate(row, row.custom_id)
        else:
            yield replace(row, shared=True) if isinstance(row, Row) and row.custom_id in made else row


def _duplicate(row: Row | RowError, custom_id: str) -> RowError:
    if isinstance(row, RowError):
        return row
    message = f"custom_id {shown(custom_id)} is that of an earlier row; each row needs its own"
    return RowError(row.line, row.crc, custom_id, DUPLICATE_ID, message)


def parse_row(line: Line) -> Row | RowError:
    """One line as a row; never raises for what the line holds."""
    custom_id: str | None = None
    named = True
    try:
        fields = _object(line)
        custom_id = _custom_id(fields, line.number)
        named = fields.get("custom_id") is not None
        endpoint, body = _request(fields)
    except _Refused as refused:
        return RowError(line.number, line.crc, custom_id, ROW_INVALID, str(refused), named)
    return Row(line.number, line.crc, custom_id, endpoint, body, named)


def _object(line: Line) -> dict[str, Any]:
    if line.data is None:
        raise _Refused(f"the line has {line.size} bytes, more than the {line.limit} allowed; split the row")
    try:
        return json_object(line.data, "the line")
    except NotAnObjectError as error:
        raise _Refused(str(error)) from None


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
        raise _Refused(f'method is {_found(fields, "method")}; it must be "POST"')
    endpoint = _ENDPOINTS.get(url) if isinstance(url, str) else None
    if endpoint is None:
        raise _Refused(f"url is {_found(fields, 'url')}; it must be one of {', '.join(_ENDPOINTS)}")
    if not isinstance(body, dict):
        raise _Refused(f"body is {_found(fields, 'body')}; it must be an object")
    return endpoint, body


def _found(fields: dict[str, Any], name: str) -> str:
    return shown(fields[name]) if name in fields else "missing"
