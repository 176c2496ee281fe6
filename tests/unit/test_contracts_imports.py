"""Contracts at run time: what is in `sys.modules` after a plane, or the command line, has been imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"corellm": "corellm", "corellm_cli": "cli", "corellm_tui": "tui"}
COMPUTE = ("corellm.worker", "corellm.layers", "corellm.kernels", "corellm.models.llama.graph")


def _modules() -> list[str]:
    names = []
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


MODULES = _modules()


def loaded_after(code: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter that ran `code`."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_front_ends_and_control_plane_import_without_torch() -> None:
    names = [name for name in MODULES if not name.startswith(COMPUTE)]
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert {"corellm", "corellm_cli", "corellm_tui"} <= loaded
    assert loaded.isdisjoint({"torch", "triton", "transformers", "tensorflow", "jax"})


def test_compute_plane_imports_without_front_ends() -> None:
    names = [name for name in MODULES if name.startswith(COMPUTE)]
    loaded = loaded_after("\n".join(f"import {name}" for name in names))
    assert "torch" in loaded
    assert loaded.isdisjoint({"corellm_cli", "corellm_tui", "typer", "transformers", "tokenizers"})


@pytest.mark.parametrize(
    "arguments", [["--help"], *([command, "--help"] for command in ("batch", "serve", "chat", "top")), ["--version"]]
)
def test_help_and_version_load_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_after(f"from corellm_cli.main import run\nif run({arguments!r}): raise SystemExit(9)")
    heavy = {
        "torch", "transformers", "tokenizers", "aiohttp", "textual", "prompt_toolkit", "zmq", "numpy", "msgspec",
        "huggingface_hub", "jinja2", "asyncio",
    }  # fmt: skip
    assert "typer" in loaded
    assert loaded.isdisjoint(heavy)


def test_the_package_itself_loads_nothing_heavy() -> None:
    assert loaded_after("import corellm").isdisjoint({"torch", "numpy", "zmq", "tokenizers", "asyncio", "rich"})


def test_public_names_are_there() -> None:
    import corellm

    assert {"EngineNode", "SamplingParams", "CoreLLMError"} <= set(corellm.__all__)
    for name in corellm.__all__:
        assert getattr(corellm, name) is not None
