"""What an engine is started with, and what it makes of that: two small files in its run folder."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from corellm.comms import run_folder
from corellm.comms.run_folder import RunFolder
from corellm.config import EngineOptions
from corellm.errors import OptionError

LEAVING_S = 1.0  # for an engine whose front end was killed an instant ago


class Launch(msgspec.Struct, frozen=True):
    """`options.json`, from the front end that starts an engine: its options, and the folder that the model is in.

    `shared` says that the engine is there for other front ends too, which then find it by themselves.
    """

    options: EngineOptions
    model_path: str
    shared: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`settings.json`, from the engine to its workers: nothing is left open but what only memory can tell."""

    model: str
    model_path: str
    name: str
    tp: int
    device: str  # cuda or cpu
    dtype: str
    max_model_len: int
    max_batch_tokens: int
    max_seqs: int | None  # None: as many as the GPU is large enough for
    kv_cache: str
    page_size: int
    kv_blocks: int | None  # None: as many as the memory budget holds
    gpu_memory: float
    load_format: str
    seed: int
    log_level: str
    threads: int  # of one worker on a CPU


def write_launch(folder: RunFolder, launch: Launch) -> None:
    folder.write(folder.options, msgspec.json.encode(launch))


def read_launch(folder: RunFolder) -> Launch:
    return msgspec.json.decode(folder.options.read_bytes(), type=Launch)


def check_name(name: str | None) -> None:
    """Raise `OptionError` when an engine that runs, or starts, has this name: nobody could tell the two apart."""
    if name is None:
        return
    deadline = time.monotonic() + LEAVING_S
    while name in _names():
        if time.monotonic() > deadline:
            raise OptionError(f"--name is {name!r}, which a running engine has; choose another, or end that one")
        time.sleep(0.1)


def _names() -> set[str]:
    found = set()
    for folder in run_folder.living():
        with suppress(OSError, msgspec.DecodeError):  # it ends, or another version of CoreLLM runs it
            found.add(read_launch(folder).options.name or read_settings(folder).name)
    return found


def write_settings(folder: RunFolder, settings: Settings) -> None:
    folder.write(folder.settings, msgspec.json.encode(settings))


def read_settings(folder: RunFolder) -> Settings:
    return msgspec.json.decode(folder.settings.read_bytes(), type=Settings)
