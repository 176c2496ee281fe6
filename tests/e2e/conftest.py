"""The demo model served once for every module that only sends requests to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve_process import ServeProcess, serving


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[ServeProcess]:
    """Its engine is called e2e, and a request may have 2048 tokens."""
    folder = tmp_path_factory.mktemp("demo-server")
    with serving(folder, "demo", "--name", "e2e", "--max-model-len", "2048") as process:
        yield process
