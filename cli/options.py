"""Command-line options made from dataclasses, so that each option is described in one place.

`expand(engine=EngineOptions)` turns a command's one `engine` parameter into an option for every field of the class.
Typer hands on text alone: the classes check it, and their messages say what is allowed and where the value came from.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any

import typer

from corellm.config import EngineOptions, env_name, flag_name, parse_option
from corellm.errors import InvalidRequestError, OptionError
from corellm.sampling_params import SamplingParams

Command = Callable[..., None]
Parser = Callable[[typer.Context, str | None], Any]
AttachTo = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="Use the running engine of this name.", rich_help_panel="Engine"),
]
NewEngine = Annotated[
    bool,
    typer.Option("--new-engine", help="Start one, even if one runs that serves the model.", rich_help_panel="Engine"),
]


def check_attach(attach_to: str | None, new_engine: bool) -> None:
    """Raise `OptionError` when a command is to use a running engine and a new one."""
    if attach_to is not None and new_engine:
        raise OptionError("--engine and --new-engine contradict each other; give one of them")


def is_set(context: typer.Context, name: str) -> bool:
    """Whether the option was given, on the command line or by its variable."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _sampling(help: str) -> Any:
    return field(default=None, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling settings for rows that do not say; None leaves a field to the row, then to the API's own default."""

    max_tokens: int | None = _sampling("Longest output, in tokens.")
    min_tokens: int | None = _sampling("Do not stop before this many tokens.")
    temperature: float | None = _sampling("0 is greedy.")
    top_p: float | None = _sampling("Sample from the likeliest tokens that together reach this probability.")
    top_k: int | None = _sampling("Sample from this many likeliest tokens; 0 is off.")
    min_p: float | None = _sampling("Drop tokens below this fraction of the likeliest one's probability.")
    presence_penalty: float | None = _sampling("Penalty on tokens that the output has already.")
    frequency_penalty: float | None = _sampling("The same, for each time that it has them.")
    repetition_penalty: float | None = _sampling("Divides the scores of tokens in prompt or output; 1 is off.")
    stop: list[str] | None = field(
        default=None, metadata={"help": "End the output before this text; may be given several times."}
    )

    def given(self) -> dict[str, Any]:
        """The fields that were set.

        Raises `OptionError`, naming the option, when two values contradict each other.
        """
        values = {name: value for name in _names(self) if (value := getattr(self, name)) not in (None, [])}
        _check_sampling(values)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(SamplingDefaults):
    """Sampling settings of a chat; None leaves a field to the session, then to the defaults of chat."""


def _check_sampling(values: Mapping[str, Any]) -> None:
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        name = error.param or ""
        raise OptionError(flag_name(name) + error.message.removeprefix(name)) from None


# The class that a parameter expands into, and how its options are presented.
_PANELS: Mapping[type, str] = {
    EngineOptions: "Engine",
    SamplingDefaults: "Sampling, for rows that do not say",
    ChatSampling: "Sampling",
}
_FROM_ENVIRONMENT = frozenset({EngineOptions})


def expand(**groups: type) -> Callable[[Command], Command]:
    """Replace each parameter named in `groups` by one option for every field of its dataclass.

    The command receives an instance of the class. `--no-color` comes with it, since every command draws.
    """

    def decorate(command: Command) -> Command:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in groups]
        expanded = [_parameter(cls, spec) for cls in groups.values() for spec in fields(cls)]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            values.pop(_NO_COLOR.name)
            for name, cls in groups.items():
                values[name] = cls(**{key: values.pop(key) for key in _names(cls)})
            command(**values)

        parameters = [*own, *expanded, _NO_COLOR]
        # Typer reads both: the signature for defaults, the annotations for types.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _names(dataclass_or_instance: Any) -> list[str]:
    return [spec.name for spec in fields(dataclass_or_instance)]


def _parameter(cls: type, spec: Field[Any]) -> inspect.Parameter:
    rule = spec.metadata
    several = spec.name == "stop"
    option = typer.Option(
        flag_name(spec.name),
        help=rule["help"],
        metavar=_metavar(spec),
        envvar=env_name(spec.name) if cls in _FROM_ENVIRONMENT else None,
        show_envvar=False,
        rich_help_panel=_PANELS[cls],
        callback=None if several else _PARSERS[cls](spec),
    )
    return _keyword(spec.name, Annotated[list[str] | None if several else str | None, option], spec.default)


def _engine_parser(spec: Field[Any]) -> Parser:
    def parse(context: typer.Context, text: str | None) -> Any:
        if text is None:
            return None
        source = context.get_parameter_source(spec.name)
        from_environment = source is not None and source.name == "ENVIRONMENT"
        return parse_option(spec, text, (env_name if from_environment else flag_name)(spec.name))

    return parse


def _sampling_parser(spec: Field[Any]) -> Parser:
    def parse(context: typer.Context, text: str | None) -> Any:
        if text is None:
            return None
        value: Any = text
        with suppress(ValueError):  # what is no number stays text, which the check refuses by name
            value = (int if "int" in str(spec.type) else float)(text)
        _check_sampling({spec.name: value})
        return value

    return parse


_PARSERS: Mapping[type, Callable[[Field[Any]], Parser]] = {
    EngineOptions: _engine_parser,
    SamplingDefaults: _sampling_parser,
    ChatSampling: _sampling_parser,
}


def _metavar(spec: Field[Any]) -> str:
    """What the help says of an option's values."""
    rule = spec.metadata
    if rule.get("choices"):
        return "|".join(rule["choices"])
    low, high = rule.get("low"), rule.get("high")
    if low is not None:
        return f"{low:.10g}.." if high is None else f"{low:.10g}..{high:.10g}"
    kind = str(spec.type).removesuffix(" | None")
    return {"int": "N", "float": "X"}.get(kind, "TEXT")


def counted(flag: str) -> Callable[[str], int]:
    """The parser of a command's own option that counts something; it raises `OptionError`."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdecimal() and (value := int(text)) > 0:
            return value
        raise OptionError(f"{flag} is {text!r}; it must be an integer of at least 1")

    return parse


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _disable_color(value: bool) -> bool:
    # NO_COLOR reaches everything that draws, child processes among them, so the flag is only another way to set it.
    if value:
        os.environ["NO_COLOR"] = "1"
    return value


_NO_COLOR = _keyword(
    "no_color",
    Annotated[bool, typer.Option("--no-color", help="The same as NO_COLOR=1.", callback=_disable_color, is_eager=True)],
    False,
)
