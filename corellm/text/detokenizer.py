"""Token ids to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from corellm.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one stream of ids. Whatever the chunks, the pieces joined are `Tokenizer.decode` of all ids.

    It keeps nothing but the bytes of one unfinished character, at most three.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; a character whose bytes are not all there is held back."""
        return self._decoder.decode(self._tokenizer.to_bytes(ids, skip_special_tokens=self._skip_special_tokens))

    def flush(self) -> str:
        """End the stream: an unfinished character comes out as U+FFFD."""
        return self._decoder.decode(b"", final=True)
