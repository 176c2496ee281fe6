"""What `corellm batch` makes of its options and variables, and what it says of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from corellm import found_model
from corellm.config import EngineOptions, env_name, flag_name
from corellm_cli.batch import default_output
from corellm_cli.exit_codes import ExitCode
from corellm_cli.main import run
from tests.support.launched_engine import PROMPTS, Launched, write_rows


def test_without_a_model_and_a_gpu_the_demo_is_used_and_named(started: list[EngineOptions], capsys: Any) -> None:
    run(["batch", write_rows(*PROMPTS)])
    assert started[0].model == "demo"
    assert "no --model given and no GPU here: using the demo model" in capsys.readouterr().err


def test_without_a_model_on_a_gpu_machine_one_is_asked_for(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(found_model, "gpu_count", lambda: 1)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.USAGE
    assert "--model is not given" in capsys.readouterr().err
    assert started == []


def test_every_engine_option_has_a_flag_and_a_variable(
    started: list[EngineOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "model": "m", "tp": 2, "device": "cpu", "dtype": "float16", "max_model_len": 70, "max_batch_tokens": 80,
        "max_seqs": 9, "kv_cache": "naive", "page_size": 8, "gpu_memory": 0.5, "kv_blocks": 11, "load_format": "dummy",
        "seed": 5, "name": "alpha", "log_level": "error",
    }  # fmt: skip
    expected = EngineOptions(**values)  # type: ignore[arg-type]
    flags = [word for name, value in values.items() for word in (flag_name(name), str(value))]
    rows = write_rows(*PROMPTS)
    assert run(["batch", rows, "-o", "a.jsonl", *flags]) == ExitCode.OK
    for name, value in values.items():
        monkeypatch.setenv(env_name(name), str(value))
    assert run(["batch", rows, "-o", "b.jsonl"]) == ExitCode.OK
    assert started == [expected, expected]


def test_sampling_options_hold_where_a_row_does_not_say(started: list[EngineOptions], engine: Launched) -> None:
    rows = write_rows({"prompt": "silent"}, {"prompt": "says", "temperature": 0.5, "max_tokens": 3})
    flags = ["--temperature=0", "--max-tokens=7", "--top-p=0.5", "--top-k=3", "--min-p=0.1", "--seed=9"]
    assert run(["batch", rows, *flags, "--stop", "A", "--stop", "B"]) == ExitCode.OK
    params = {text: params for text, params, _, _ in engine.calls}
    silent, says = params["silent"], params["says"]
    assert (silent.temperature, silent.max_tokens, says.temperature, says.max_tokens) == (0, 7, 0.5, 3)
    assert (silent.top_p, silent.top_k, silent.min_p, silent.stop, silent.seed) == (0.5, 3, 0.1, ("A", "B"), 9)


def test_a_seed_that_is_not_given_is_not_set(started: list[EngineOptions], engine: Launched) -> None:
    run(["batch", write_rows(*PROMPTS)])
    assert {params.seed for _, params, _, _ in engine.calls} == {None}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp", "0"], "--tp is 0; it must be an integer from 1 to 64"),
        (["--tp", "two"], "--tp is 'two'; it must be an integer from 1 to 64"),
        (["--gpu-memory", "nan"], "--gpu-memory is nan; it must be a number from 0.05 to 1"),
        (["--dtype", "int8"], "--dtype is 'int8'; choose one of auto, bfloat16, float16, float32"),
        (["--temperature", "3"], "--temperature is 3; it must be a number from 0 to 2"),
        (["--temperature", "abc"], "--temperature is 'abc'; it must be a number from 0 to 2"),
        (["--max-tokens", "1.5"], "--max-tokens is '1.5'; it must be an integer from 1 to"),
        (["--stop", ""], "--stop holds ''; each entry must be a non-empty string"),
        (["--min-tokens", "5", "--max-tokens", "4"], "--min-tokens is 5, above max_tokens 4"),
        (["--order", "foo"], "--order is 'foo'; choose one of completion, input"),
        (["--limit", "0"], "--limit is '0'; it must be an integer of at least 1"),
        (["--limit", "x"], "--limit is 'x'; it must be an integer of at least 1"),
        (["--restart", "--retry-errors"], "--restart and --retry-errors contradict each other"),
        (["--restart", "-o", "-"], "--restart needs an output"),
        (["--retry-errors", "-o", "-"], "--retry-errors needs an output"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_2(flags: list[str], says: str, capsys: Any) -> None:
    assert run(["batch", write_rows(*PROMPTS), *flags]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert "nvalid value" not in err


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CORELLM_TP", "x", "CORELLM_TP is 'x'; it must be an integer from 1 to 64"),
        ("CORELLM_DTYPE", "int8", "CORELLM_DTYPE is 'int8'; choose one of auto, "),
        ("CORELLM_MAX_SEQS", "0", "CORELLM_MAX_SEQS is 0; it must be an integer from 1 to 4096"),
    ],
)
def test_a_wrong_variable_is_named(
    name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(name, value)
    assert run(["batch", write_rows(*PROMPTS)]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("arguments", "says"), [(["batch"], "corellm batch --help"), (["bogus"], "(see corellm --help)")]
)
def test_usage_errors_lead_to_the_right_help(arguments: list[str], says: str, capsys: Any) -> None:
    assert run(arguments) == ExitCode.USAGE
    assert says in capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: Any) -> None:
    assert run([]) == ExitCode.USAGE
    assert "batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("input", "output"),
    [("a/in.jsonl", "a/in.out.jsonl"), ("in.jsonl.gz", "in.out.jsonl"), ("in.txt", "in.txt.out.jsonl"), ("-", "-")],
)
def test_default_output(input: str, output: str) -> None:
    assert default_output(input) == output
