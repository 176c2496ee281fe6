"""Which running engine a command joins: by name, by model, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from corellm import running_engines
from corellm.comms import run_folder
from corellm.comms.settings import Launch, check_name, write_launch
from corellm.config import EngineOptions
from corellm.errors import OptionError
from corellm.running_engines import by_name, choose, differences
from tests.support.fake_text_engine import engine_info


class Engines:
    """Folders that look like those of running engines."""

    def __init__(self, models: Path) -> None:
        self.models = models
        self.locks: list[int] = []

    def start(
        self,
        name: str,
        model: str = "a",
        *,
        shared: bool = True,
        ready: bool = True,
        alive: bool = True,
        asked_name: str | None = None,
        **options: Any,
    ) -> None:
        folder = run_folder.create()
        launch = Launch(EngineOptions(model=model, name=asked_name, **options), str(self.models / model), shared)
        write_launch(folder, launch)
        if ready:
            changes = {key: value for key, value in options.items() if key in ("dtype", "max_model_len")}
            info = msgspec.structs.replace(engine_info(), name=name, model=model, device="CPU", **changes)
            folder.registration.write_bytes(msgspec.json.encode(info))
        lock = folder.lock()
        if alive:
            self.locks.append(lock)
        else:
            os.close(lock)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engines]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Engines(tmp_path / "models")
    for model in ("a", "b", "demo"):
        (made.models / model).mkdir(parents=True)

    def found(options: EngineOptions, report: Any) -> Any:
        return SimpleNamespace(launch=Launch(options, str(made.models / str(options.model))))

    monkeypatch.setattr(running_engines, "find", found)
    monkeypatch.setattr(running_engines, "find_model", lambda name, report: made.models / name)
    monkeypatch.setattr(running_engines, "load", lambda launch: SimpleNamespace(launch=launch))
    monkeypatch.setattr(running_engines, "model_name", lambda options: options.model or "demo")
    yield made
    for lock in made.locks:
        os.close(lock)


def joined(model: str | None = None, *, name: str | None = None, new: bool = False, **options: Any) -> str | None:
    """The name of the engine that is joined; None when one is started."""
    choice = choose(EngineOptions(model=model, **options), lambda _: None, name=name, new=new)
    return None if choice.running is None else choice.running.info.name


def test_the_engine_that_serves_the_model_is_joined(engines: Engines) -> None:
    assert joined("a") is None
    engines.start("one", "a")
    engines.start("two", "b")
    assert [joined("a"), joined("b"), joined("demo")] == ["one", "two", None]
    assert joined("a", new=True) is None


def test_the_dead_the_starting_and_the_unreadable_are_passed_over(engines: Engines) -> None:
    engines.start("dead", alive=False)
    engines.start("starting", ready=False)
    engines.start("other version")
    (folder,) = [e.folder for e in running_engines.running_engines()]
    folder.registration.write_bytes(b'{"name": "x"}')
    assert running_engines.running_engines() == []
    assert joined("a") is None


def test_a_private_engine_is_joined_only_by_name(engines: Engines) -> None:
    engines.start("private", shared=False)
    assert joined("a") is None
    assert joined() is None
    assert joined("a", name="private") == "private"


def test_without_a_model_the_one_shared_engine_is_taken(engines: Engines) -> None:
    assert joined() is None
    engines.start("one", "a")
    assert joined() == "one"
    engines.start("two", "b")
    with pytest.raises(OptionError, match="one, two"):
        joined()
    assert joined(name="two") == "two"


def test_a_name_must_be_that_of_one_engine(engines: Engines) -> None:
    with pytest.raises(OptionError, match="no engine runs"):
        joined(name="one")
    engines.start("one")
    with pytest.raises(OptionError, match="running are: one"):
        joined(name="two")
    engines.start("one", "b")
    with pytest.raises(OptionError, match="2 engines"):
        joined(name="one")


def test_a_new_engine_must_not_take_the_name_of_a_living_one(engines: Engines) -> None:
    engines.start("registered", asked_name="chosen")
    engines.start("starting", ready=False, asked_name="early")
    engines.start("gone", alive=False, asked_name="free")
    for name in ("chosen", "early"):
        with pytest.raises(OptionError, match=f"--name is '{name}', which a running engine has"):
            check_name(name)
    for name in ("free", "registered", None):
        check_name(name)


@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({}, []),
        ({"dtype": "float32", "device": "cpu", "max_seqs": 4, "kv_blocks": 1000, "tp": 1}, []),
        ({"gpu_memory": 0.5, "log_level": "debug", "seed": 9}, []),
        ({"dtype": "bfloat16"}, ["--dtype"]),
        ({"device": "cuda"}, ["--device"]),
        ({"tp": 2, "kv_cache": "naive"}, ["--tp", "--kv-cache"]),
        ({"max_model_len": 100}, ["--max-model-len"]),
        ({"load_format": "dummy"}, ["--load-format"]),
    ],
)
def test_options_that_contradict_the_engine_are_named(
    engines: Engines, asked: dict[str, Any], flags: list[str]
) -> None:
    engines.start("one")
    (engine,) = running_engines.running_engines()
    assert differences(EngineOptions(**asked), engine) == flags
    assert joined("a", **asked) == (None if flags else "one")
    if flags:
        with pytest.raises(OptionError, match=flags[0]):
            joined(name="one", **asked)


def test_dummy_weights_are_the_same_only_under_the_same_seed(engines: Engines) -> None:
    engines.start("one", load_format="dummy", seed=3)
    assert joined("a", load_format="dummy", seed=3) == "one"
    assert joined("a", load_format="dummy") is None
    assert joined("a") is None


def test_a_name_with_another_model_is_a_contradiction(engines: Engines) -> None:
    engines.start("one", "a")
    with pytest.raises(OptionError, match="--model"):
        joined("b", name="one")


def test_the_model_keeps_the_name_that_it_was_asked_for_by(engines: Engines) -> None:
    engines.start("one", "a", max_model_len=150)
    os.symlink(engines.models / "a", engines.models / "alias")
    choice = choose(EngineOptions(model="alias"), lambda _: None)
    assert choice.running is not None
    options = choice.model.launch.options
    assert (options.model, options.max_model_len) == ("alias", 150)
    (engine,) = running_engines.running_engines()
    assert by_name("one", [engine]) is engine
