"""The demo model served once for every module that only sends requests to it, and what several modules start with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.serve_process import ServeProcess, serving
from tests.support.tiny_llama import make_tiny_llama


@pytest.fixture
def run_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run folders of this test's engines are, and no others."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "corellm"


@pytest.fixture(scope="session")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a small random model whose answers may be long: a request of it is open for seconds."""
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, max_positions=4096)
    write_byte_tokenizer(path)
    return str(path)


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[ServeProcess]:
    """Its engine is called e2e, and a request may have 2048 tokens."""
    folder = tmp_path_factory.mktemp("demo-server")
    with serving(folder, "demo", "--name", "e2e", "--max-model-len", "2048") as process:
        yield process
