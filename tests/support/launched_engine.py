"""A fake engine as a launch of `corellm batch` gets it, the model found for it, and rows to run on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from corellm.comms.settings import Settings
from corellm.config import EngineOptions
from corellm.errors import CoreLLMError
from tests.support.fake_text_engine import FakeTextEngine

PROMPTS = [{"prompt": f"prompt {number}", "max_tokens": 4} for number in range(3)]


class Launched(FakeTextEngine):
    """The fake as `TextEngine.start` would return it."""

    closed = False

    def behave(
        self,
        *,
        delay: Callable[[str], float] = lambda text: 0.0,
        failure: Callable[[str], CoreLLMError | None] = lambda text: None,
    ) -> None:
        """From now on: the seconds that a prompt takes, the error that it ends in."""
        self._delay, self._failure = delay, failure

    def latest_stats(self) -> None:
        return None

    async def close(self) -> None:
        self.closed = True


def settings(given: EngineOptions, folder: Path) -> Settings:
    """What the options come to on a model in `folder`."""
    known = {name: value for name, value in asdict(given).items() if name in Settings.__struct_fields__}
    decided = {"model_path": str(folder), "name": "n", "dtype": "float32", "device": "cpu", "threads": 1}
    decided |= {"page_size": 16, "max_seqs": 4, "max_batch_tokens": 64, "max_model_len": given.max_model_len or 200}
    return Settings(**{**known, **decided})


def found(given: EngineOptions, folder: Path, engine: Launched) -> Any:
    """The model in `folder` as `running_engines.find` would return it, of which `engine` is the engine."""
    return SimpleNamespace(
        options=given,
        launch=SimpleNamespace(model_path=str(folder)),
        settings=settings(given, folder),
        max_request_tokens=engine.info.max_request_tokens,
        vocab=engine.info.vocab,
        encode_prompt=engine.encode_prompt,
        encode_chat=engine.encode_chat,
    )


def write_rows(*rows: object) -> str:
    """Write `in.jsonl` here, a string as the line that it is, and return its name."""
    Path("in.jsonl").write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return "in.jsonl"


def answers(path: str = "in.out.jsonl") -> list[dict[str, Any]]:
    """The rows of an output."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
