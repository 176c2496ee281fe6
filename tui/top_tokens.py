"""What a token id says, from the model's own tokenizer, which is read in the background when first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from corellm.comms.messages import EngineInfo
from corellm.errors import CoreLLMError


class TokenTexts:
    """The text of a token of the engine that is watched; empty until the tokenizer is there, or if it has none."""

    def __init__(self, info: Callable[[], EngineInfo | None]) -> None:
        self._info = info
        self._asked: str | None = None  # the model folder whose tokenizer is read or being read
        self._decode: Callable[[list[int]], str] | None = None

    def __call__(self, token: int) -> str:
        info = self._info()
        if info is None:
            return ""
        if info.model_path != self._asked:
            self._asked, self._decode = info.model_path, None
            threading.Thread(target=self._read, args=(info.model_path,), daemon=True).start()
        return "" if self._decode is None else self._decode([token])

    def _read(self, path: str) -> None:
        from corellm.text.tokenizer import Tokenizer

        try:
            tokenizer = Tokenizer.from_folder(Path(path))
        except (CoreLLMError, OSError):
            return
        if path == self._asked:
            self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
