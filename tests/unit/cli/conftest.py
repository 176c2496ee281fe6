"""What surrounds a command under test: a folder and an environment of its own, and a fake engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from corellm import found_model, running_engines, text_engine
from corellm.comms.messages import Progress
from corellm.config import EngineOptions, env_name
from tests.support.launched_engine import Launched, found


@pytest.fixture(autouse=True)
def _isolated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """No options from the environment, no GPU, a folder of its own, and logging as it was."""
    for spec in fields(EngineOptions):
        monkeypatch.delenv(env_name(spec.name), raising=False)
    monkeypatch.setenv("NO_COLOR", "1")  # also restores it where a test's --no-color sets it
    monkeypatch.setattr(found_model, "gpu_count", lambda: 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))  # no engine of anyone's to join
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("corellm")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def engine() -> Launched:
    return Launched()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, engine: Launched, tmp_path: Path) -> list[EngineOptions]:
    """The options of every engine that was started; it is the fake."""
    options: list[EngineOptions] = []

    async def start(model: Any, report: Callable[[Progress], None]) -> Launched:
        options.append(model.options)
        report(Progress(stage="warm up"))
        return engine

    def find(given: EngineOptions, report: Callable[[Progress], None]) -> Any:
        report(Progress(stage="resolve model", detail=str(given.model)))
        return found(given, tmp_path, engine)

    monkeypatch.setattr(running_engines, "find", find)
    monkeypatch.setattr(text_engine.TextEngine, "start", start)
    return options
