"""docs/serving.md against the code: paths, options, statuses, deadlines, metrics."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from corellm.openai_api.schema import openapi
from corellm.openai_server.metrics import Metrics
from corellm.openai_server.options import Deadlines
from corellm_cli.exit_codes import ExitCode
from corellm_cli.main import app
from tests.support.serving import STATS

TEXT = (Path(__file__).parents[2] / "docs/serving.md").read_text()


def test_every_path_is_documented() -> None:
    told = set(re.findall(r"`(?:GET|POST) (/[\w/{}]*)`", TEXT)) | set(re.findall(r"`GET (/[\w.]+)`", TEXT))
    assert {path.replace("{id}", "{model}") for path in told} == set(openapi("1")["paths"])


def test_every_option_is_real() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {option for name in ("serve", "batch") for parameter in commands[name].params for option in parameter.opts}
    used = set(re.findall(r"(--[a-z][a-z-]*)", TEXT))
    assert used <= known
    assert len(used) > 10


def test_deadlines_are_the_real_ones() -> None:
    times = Deadlines()
    assert f"{times.header_s:g} s for the head" in TEXT
    assert f"{times.body_s:g} s for its body" in TEXT
    assert f"{times.write_s:g} s for a reader" in TEXT


def test_exit_codes_exist() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \| ", TEXT[TEXT.index("| exit code |") :], flags=re.MULTILINE)}
    assert told == {ExitCode.OK, ExitCode.FAILURE, ExitCode.USAGE, ExitCode.INTERRUPTED}


def test_every_metric_is_documented_and_real() -> None:
    metrics = Metrics(lambda: STATS, lambda: "m")
    names = set(re.findall(r"^# TYPE corellm:(\w+) ", metrics.render().decode(), flags=re.MULTILINE))
    names = {name for name in names if not name.endswith("_created")}
    told = set(re.findall(r"`(\w+)`", TEXT[TEXT.index("| metric, under") :])) - {
        "finished_reason", "method", "handler", "status",
    }  # fmt: skip
    assert told <= names
    assert names - told == {"kv_cache_blocks"}
