"""Facts of processes, against the kernel's own, and of GPUs, from a driver that is made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from corellm_tui import top_hardware
from corellm_tui.top_hardware import GpuFacts, HardwareReader
from corellm_tui.top_lines import plain
from corellm_tui.top_panels import hardware
from corellm_tui.top_state import TopState


class NVMLError(Exception):
    pass


class Driver:
    """Two GPUs under the names of nvidia-ml-py; processes of `users` run on the second."""

    NVMLError = NVMLError

    def __init__(self, users: list[int]) -> None:
        self.users = users
        self.is_lost = False

    def nvmlDeviceGetCount(self) -> int:
        if self.is_lost:
            raise NVMLError
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.users] if device == 1 else []

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(used=30_000_000_000 * device, total=140_000_000_000)

    def nvmlDeviceGetName(self, device: int) -> bytes:
        return b"Made-up \x1b[31m"

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        raise NVMLError

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=80 + device)


def reading(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> HardwareReader:
    monkeypatch.setattr(top_hardware, "_open_nvml", lambda: driver)
    return HardwareReader()


def test_the_drivers_names_are_those_of_the_real_package() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name in vars(Driver):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


def test_the_engine_and_its_children_are_told_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as child:
        facts = reading(monkeypatch, None).read(os.getpid())
        by_pid = {process.pid: process for process in facts.processes}
        assert by_pid[os.getpid()].name == "engine"
        assert by_pid[child.pid].name.startswith("worker ")
        with open("/proc/self/status", encoding="utf-8") as status:
            kilobytes = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        assert by_pid[os.getpid()].memory_bytes == pytest.approx(kilobytes * 1024, rel=0.1)
        assert facts.gpus == []
        child.communicate("\n")


def test_a_process_that_has_gone_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert reading(monkeypatch, None).read(gone.pid).processes == []


def test_the_gpus_are_those_of_the_engine_or_all_where_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    second = GpuFacts(1, "Made-up \x1b[31m", 30_000_000_000, 140_000_000_000, 81, 0.0)
    assert reading(monkeypatch, Driver([os.getpid()])).read(os.getpid()).gpus == [second]
    assert [gpu.index for gpu in reading(monkeypatch, Driver([1])).read(os.getpid()).gpus] == [0, 1]


def test_a_driver_that_fails_means_no_gpus_and_a_panel_with_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([os.getpid()])
    reader, state = reading(monkeypatch, driver), TopState()
    state.add(reader.read(os.getpid()))
    assert plain(hardware(state, 80)[0]) == "GPU 1  81% 30.0 GB/140 GB Made-up ␛[31m"
    driver.is_lost = True
    state.add(reader.read(os.getpid()))
    assert plain(hardware(state, 80)[0]).startswith("engine ")
