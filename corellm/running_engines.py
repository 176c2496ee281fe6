"""Engines that run already: which there are, and which of them a front end joins instead of starting its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import msgspec

from corellm.comms import run_folder
from corellm.comms.messages import EngineInfo, Progress
from corellm.comms.run_folder import RunFolder
from corellm.comms.settings import Launch, read_launch
from corellm.config import EngineOptions, flag_name
from corellm.errors import OptionError
from corellm.found_model import FoundModel, find, load, model_name
from corellm.model_source import find_model

_CPU = "CPU"  # how an engine names the device that `--device cpu` means

# What `EngineInfo` says of an engine under an option's own name. `model` is compared by its folder, `gpu_memory` shows
# in `kv_blocks`, and the name and the log level do not matter to who joins.
_COMPARED = (
    "tp",
    "dtype",
    "max_model_len",
    "max_batch_tokens",
    "max_seqs",
    "kv_cache",
    "page_size",
    "kv_blocks",
)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A ready engine: where its sockets are, what it says of itself, what it was started with."""

    folder: RunFolder
    info: EngineInfo
    launch: Launch


@dataclass(frozen=True, slots=True)
class Choice:
    """What a front end works with: a model, and the running engine to join; None: start one."""

    model: FoundModel
    running: RunningEngine | None


def choose(
    options: EngineOptions, report: Callable[[Progress], None], *, name: str | None = None, new: bool = False
) -> Choice:
    """The engine to work with: the one called `name`; else, unless `new`, one that is shared and runs what `options`
    ask for; else one of our own.

    Without a model in the options, the one shared engine that runs is taken. Raises `OptionError` when the choice is
    not clear or options contradict the engine, and what `find` raises.
    """
    if new:
        return _own(options, report)
    engines = running_engines()
    if name is not None:
        engine = by_name(name, engines)
        _check_agreement(options, engine, report)
        return _joined(options, engine)
    if options.model is not None:
        model = find(options, report)
        running = serving(Path(model.launch.model_path), options, engines)
        return Choice(model, None) if running is None else _joined(options, running)
    shared = [engine for engine in engines if engine.launch.shared and not differences(options, engine)]
    if not shared:
        return _own(options, report)
    if len(shared) > 1:
        names = ", ".join(engine.info.name for engine in shared)
        raise OptionError(f"--model is not given and several engines run; choose by --engine one of {names}")
    return _joined(options, shared[0])


def _own(options: EngineOptions, report: Callable[[Progress], None]) -> Choice:
    return Choice(find(replace(options, model=model_name(options)), report), None)


def _check_agreement(options: EngineOptions, engine: RunningEngine, report: Callable[[Progress], None]) -> None:
    others = differences(options, engine)
    if options.model not in (None, engine.launch.options.model):
        path = find_model(str(options.model), report)
        if path.resolve() != Path(engine.launch.model_path).resolve():
            others.append(flag_name("model"))
    if others:
        raise OptionError(
            f"engine {engine.info.name} runs with another {', '.join(others)}; leave that out, or start one of your "
            "own by --new-engine"
        )


def _joined(options: EngineOptions, engine: RunningEngine) -> Choice:
    """The engine with its model, which keeps the name that the user gave it here."""
    launched = engine.launch.options
    named = replace(launched, model=options.model or launched.model)
    return Choice(load(msgspec.structs.replace(engine.launch, options=named)), engine)


def running_engines() -> list[RunningEngine]:
    """Every ready engine of this user, the oldest first."""
    return [engine for folder in run_folder.living() if (engine := _read(folder)) is not None]


def by_name(name: str, engines: Sequence[RunningEngine]) -> RunningEngine:
    """The engine that registered as `name`. Raises `OptionError` when there is none, or more than one."""
    found = [engine for engine in engines if engine.info.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise OptionError(f"--engine is {name!r}, and {len(found)} engines run under that name; end all but one")
    names = ", ".join(engine.info.name for engine in engines)
    raise OptionError(f"--engine is {name!r}; {f'running are: {names}' if names else 'no engine runs'}")


def serving(model_path: Path, options: EngineOptions, engines: Sequence[RunningEngine]) -> RunningEngine | None:
    """A shared engine that runs the model as `options` ask for it; None if there is none."""
    for engine in engines:
        same_model = Path(engine.launch.model_path).resolve() == model_path.resolve()
        if engine.launch.shared and same_model and not differences(options, engine):
            return engine
    return None


def differences(options: EngineOptions, engine: RunningEngine) -> list[str]:
    """The options (as flags) that were set to something else than what the engine runs with."""
    found = [
        flag_name(spec.name)
        for spec in fields(options)
        if spec.name in _COMPARED
        and getattr(options, spec.name) != spec.default
        and getattr(options, spec.name) != getattr(engine.info, spec.name)
    ]
    launched = engine.launch.options
    if (options.load_format == "dummy") != (launched.load_format == "dummy"):
        found.append(flag_name("load_format"))
    elif options.load_format == "dummy" and options.seed != launched.seed:
        found.append(flag_name("seed"))
    if options.device != "auto" and (options.device == "cpu") != (engine.info.device == _CPU):
        found.append(flag_name("device"))
    return found


def _read(folder: RunFolder) -> RunningEngine | None:
    """None for one that still starts, that has just ended, or that another version of CoreLLM runs."""
    try:
        info = msgspec.json.decode(folder.registration.read_bytes(), type=EngineInfo)
        return RunningEngine(folder, info, read_launch(folder))
    except (OSError, msgspec.DecodeError):
        return None
