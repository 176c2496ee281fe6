"""Server-sent events, as far as OpenAI's API uses them: the data of each event, from chunks of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from corellm.errors import UpstreamError

_MAX_EVENT = 2**20  # bytes; no event of a chat comes near it
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a `\r` that ends a chunk may be half of `\r\n`


class EventParser:
    """Push chunks as they arrive; each push yields the data of the events that it completes."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def push(self, chunk: bytes) -> Iterator[str]:
        """Raises `UpstreamError` for an event that is too long to be one."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        if len(self._rest) > _MAX_EVENT:
            raise UpstreamError(f"the server sent an event of more than {_MAX_EVENT} bytes; is the URL right?")
        for line in lines:
            if not line and self._data:
                data, self._data = "\n".join(self._data), []
                yield data
            field, _, value = line.partition(b":")
            if field == b"data":
                self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
