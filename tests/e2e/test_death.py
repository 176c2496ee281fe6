"""Whatever dies, everything ends: every request with an error, every process, every file of the run."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from corellm import EngineNode, SamplingParams
from corellm.errors import CoreLLMError, EngineDeadError, OptionError, OutOfMemoryError, StartupError
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.processes import engine_processes, pid_of, wait_until_gone
from tests.support.tiny_llama import make_tiny_llama

FOREVER = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_tiny_llama(path, heads=4, kv_heads=4, max_positions=1024)
    write_byte_tokenizer(path)
    return path


def after(seconds: float, pid: int, number: signal.Signals) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (pid, number))
    timer.start()
    return timer


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("module", ["corellm.worker", "corellm.engine"])
def test_a_killed_process_ends_every_request(tiny: Path, run_root: Path, module: str, tp: int) -> None:
    with EngineNode(str(tiny), device="cpu", tp=tp) as node:
        assert len(engine_processes(run_root)) == 1 + tp
        after(0.5, pid_of(run_root, module), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            node.generate([[1, 2, 3]] * 100, FOREVER)
        assert time.monotonic() - began < 5
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            node.generate([[1]], FOREVER)
        wait_until_gone(run_root, 8)
    assert not list(run_root.iterdir())


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stopped_worker_ends_everything_within_10_seconds(tiny: Path, run_root: Path, tp: int) -> None:
    with EngineNode(str(tiny), device="cpu", tp=tp) as node:
        after(0.2, pid_of(run_root, "corellm.worker"), signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match="silent"):
            node.generate([[1, 2, 3]] * 200, FOREVER)
        wait_until_gone(run_root, began + 10.2 - time.monotonic())


def test_a_pause_of_everything_hurts_nothing(tiny: Path, run_root: Path) -> None:
    """Ctrl-Z and fg, or a machine that slept: time in which the watcher itself stood still does not count."""
    script = textwrap.dedent(f"""
        from corellm import EngineNode, SamplingParams
        with EngineNode({str(tiny)!r}, device="cpu") as node:
            print("ready", flush=True)
            done = node.generate([[1, 2, 3]] * 300, SamplingParams(max_tokens=200, ignore_eos=True))
            print(sum(c.output_tokens for c in done), flush=True)
    """)
    front_end = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert front_end.stdout is not None
        assert front_end.stdout.readline() == b"ready\n"
        os.killpg(front_end.pid, signal.SIGSTOP)
        time.sleep(11)
        os.killpg(front_end.pid, signal.SIGCONT)
        assert front_end.stdout.readline() == b"60000\n"
        assert front_end.wait(10) == 0
    finally:
        front_end.kill()
        front_end.communicate()


def test_workers_leave_signals_of_the_group_to_the_engine(tiny: Path, run_root: Path) -> None:
    with EngineNode(str(tiny), device="cpu", tp=2) as node:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            for pid, module in engine_processes(run_root).items():
                if module == "corellm.worker":
                    os.kill(pid, number)
        assert node.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))[0].output_tokens == 5


def test_a_host_with_many_open_files(tiny: Path, run_root: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with EngineNode(str(tiny), device="cpu") as node:
            assert node.generate([[1]], SamplingParams(max_tokens=2, ignore_eos=True))[0].output_tokens == 2
    finally:
        for descriptor in files:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    wait_until_gone(run_root, 5)


def test_closing_while_it_starts_and_closing_twice(tiny: Path, run_root: Path) -> None:
    for delay in (0.0, 0.4, 1.2):
        node = EngineNode(str(tiny), device="cpu")
        closer = threading.Timer(delay, node.close)
        closer.start()
        try:
            with contextlib.suppress(EngineDeadError):  # unless it was ready, or not begun, by then
                node.start()
        finally:
            closer.join()
            node.close()
            node.close()
        assert not engine_processes(run_root)
        assert not list(run_root.iterdir())


def test_a_display_that_fails_does_not_hang_the_start(tiny: Path, run_root: Path) -> None:
    def report(progress: object) -> None:
        if getattr(progress, "stage", "") == "read weights":
            raise BrokenPipeError("nobody reads")

    with pytest.raises(EngineDeadError, match="nobody reads"):
        EngineNode(str(tiny), device="cpu", on_progress=report).start()
    assert not engine_processes(run_root)


def test_sigterm_drains_and_a_second_one_stops(tiny: Path, run_root: Path) -> None:
    with EngineNode(str(tiny), device="cpu") as node:
        engine = pid_of(run_root, "corellm.engine")
        after(0.3, engine, signal.SIGTERM)
        (done,) = node.generate([[1, 2, 3]], SamplingParams(max_tokens=900, ignore_eos=True))
        assert done.output_tokens == 900
        with pytest.raises(EngineDeadError):
            node.generate([[1, 2, 3]], FOREVER)
        wait_until_gone(run_root, 8)
    with EngineNode(str(tiny), device="cpu") as node:
        engine = pid_of(run_root, "corellm.engine")
        for delay in (0.3, 0.5):
            after(delay, engine, signal.SIGTERM)
        with pytest.raises(EngineDeadError, match="stopped"):
            node.generate([[1, 2, 3]] * 300, FOREVER)


def test_nothing_outlives_a_killed_front_end(tiny: Path, run_root: Path) -> None:
    script = textwrap.dedent(f"""
        from corellm import EngineNode, SamplingParams
        with EngineNode({str(tiny)!r}, device="cpu", tp=2) as node:
            print("ready", flush=True)
            node.generate([[1, 2, 3]] * 1000, SamplingParams(max_tokens=900, ignore_eos=True))
    """)
    front_end = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert front_end.stdout is not None
        assert front_end.stdout.readline() == b"ready\n"
        assert len(engine_processes(run_root)) == 3
    finally:
        front_end.kill()
        front_end.communicate()
    wait_until_gone(run_root, 5)


def test_a_front_end_killed_while_it_starts_leaves_nothing(tiny: Path, run_root: Path) -> None:
    script = f"from corellm import EngineNode; EngineNode({str(tiny)!r}, device='cpu', tp=2).start()"
    for delay in (0.3, 0.8, 1.5, 2.5):
        front_end = subprocess.Popen([sys.executable, "-c", script])
        time.sleep(delay)
        front_end.kill()
        front_end.wait()
        wait_until_gone(run_root, 5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tp": 3}, OptionError, "--tp is 3; this model has 4 KV heads, so it can be 1, 2, 4"),
        ({"max_model_len": 5000}, OptionError, "--max-model-len is 5000; this model allows up to 1024"),
        ({"max_batch_tokens": 8, "max_seqs": 8}, OptionError, "--max-batch-tokens is 8"),
        ({"device": "cuda"}, OptionError, "no NVIDIA GPU is visible"),
    ],
)
def test_what_cannot_start_says_why(
    tiny: Path, run_root: Path, options: dict[str, object], error: type[CoreLLMError], words: str
) -> None:
    began = time.monotonic()
    with pytest.raises(error, match=words):
        EngineNode(str(tiny), **{"device": "cpu", **options}).start()
    assert time.monotonic() - began < 20
    assert not engine_processes(run_root)
    assert not list(run_root.rglob("*"))


def test_a_cache_that_does_not_fit_names_the_remedy(
    tiny: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own error reaches the caller with its type."""
    monkeypatch.setenv("CORELLM_KV_BLOCKS", str(2**40))
    with pytest.raises((OutOfMemoryError, StartupError), match="KV"):
        EngineNode(str(tiny), device="cpu").start()
    assert not engine_processes(run_root)
