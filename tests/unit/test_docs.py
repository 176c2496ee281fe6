"""Documentation that a machine can check: paths, links, commands, options, exit codes and examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from corellm.batch.lines import Source
from corellm.batch.prepare import Preparer, RefusedRow
from corellm.batch.rows import Row, parse_row, read_rows
from corellm.openai_api.fields import TABLES, Endpoint
from corellm.openai_api.prompts import ModelLimits
from corellm.openai_api.requests import parse_request
from corellm_cli.exit_codes import ExitCode
from corellm_cli.main import app
from tests.support.fake_text_engine import FakeTextEngine

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
GROUP = typer.main.get_command(app)


def code_blocks(text: str, language: str) -> str:
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    paths = re.findall(r"`((?:corellm|cli|tui|tests|docs|examples)/[\w/.-]*)`", text)
    missing = [target for target in links if not (page.parent / target).exists()]
    missing += [target for target in paths if not (ROOT / target).exists()]
    assert missing == []


def test_architecture_has_a_room_for_every_package() -> None:
    rooms = set(re.findall(r"^\| `([\w/]+)/` \|", (ROOT / "docs/architecture.md").read_text(), flags=re.MULTILINE))
    packages = {"corellm", "cli", "tui"} | {
        f"corellm/{path.parent.name}" for path in (ROOT / "corellm").glob("*/__init__.py")
    }
    assert rooms == packages


def test_the_readme_runs_only_commands_and_options_that_exist() -> None:
    shell = code_blocks(README, "sh")
    used = re.findall(r"corellm (\w+)([^\n#]*)", shell)
    assert used
    for name, rest in used:
        options = {option for parameter in GROUP.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
        assert set(re.findall(r"(?<=\s)--?[a-z][\w-]*", rest)) <= options
    prose_options = set(re.findall(r"`(--[a-z][\w-]*)", README))
    known = {option for command in GROUP.commands.values() for parameter in command.params for option in parameter.opts}  # type: ignore[attr-defined]
    assert prose_options <= known | {"--help"}


def test_the_readme_names_only_targets_that_make_has() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", code_blocks(README, "sh"))) <= targets


def test_the_readme_lists_every_exit_code() -> None:
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)] == [int(c) for c in ExitCode]


def _rows(path: Path) -> list[Row]:
    rows = list(read_rows(Source(str(path)).lines()))
    assert rows
    bad = [row for row in rows if not isinstance(row, Row)]
    assert bad == []
    return [row for row in rows if isinstance(row, Row)]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.jsonl")), ids=lambda path: path.name)
def test_every_example_row_is_a_request(path: Path) -> None:
    for row in _rows(path):
        parse_request(row.endpoint, row.body, {})


def test_the_demo_shows_every_form_of_row() -> None:
    lines = (ROOT / "examples/demo.jsonl").read_text().splitlines()
    rows = [parse_row(line) for line in Source(str(ROOT / "examples/demo.jsonl")).lines()]
    assert {row.endpoint for row in rows if isinstance(row, Row)} == set(Endpoint)
    assert {line[: line.index('"', 2)] for line in lines} >= {'{"custom_id', '{"messages', '{"prompt'}


def test_the_readmes_input_rows_are_requests(tmp_path: Path) -> None:
    inputs, _output = re.findall(r"```json\n(.*?)```", README, flags=re.DOTALL)
    path = tmp_path / "rows.jsonl"
    path.write_text(inputs)
    for row in _rows(path):
        parse_request(row.endpoint, row.body, {})


def test_the_readme_names_fields_that_are_refused() -> None:
    (sentence,) = re.findall(r"Refused so far are (.*?), unless", README, flags=re.DOTALL)
    names = re.findall(r"`(\w+)`", sentence)
    assert len(names) >= 6
    for name in names:
        endpoint = next(endpoint for endpoint in Endpoint if name in TABLES[endpoint])
        body: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", name: True}
        body.pop("prompt" if endpoint is Endpoint.CHAT else "messages")
        preparer = Preparer(FakeTextEngine(), ModelLimits(200, 256), {})
        outcome = preparer.prepare(Row(1, 0, "a", endpoint, body))
        assert isinstance(outcome, RefusedRow)
        assert outcome.error.param == name
