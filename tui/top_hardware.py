"""What the engine's processes and GPUs are doing, read by the dashboard itself, so that the engine pays nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import psutil


class ProcessFacts(msgspec.Struct, frozen=True, array_like=True):
    """Part of `Hardware`. `cpu_percent` is of one core, since the reading before."""

    name: str  # engine, worker 0, ...
    pid: int
    cpu_percent: float
    memory_bytes: int  # resident
    threads: int


class GpuFacts(msgspec.Struct, frozen=True, array_like=True):
    """Part of `Hardware`."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    use_percent: int
    watts: float


class Hardware(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Part of recordings, made by the dashboard about once a second."""

    processes: list[ProcessFacts]
    gpus: list[GpuFacts]


class HardwareReader:
    """Reads one engine's facts. GPUs need the package nvidia-ml-py and a driver; without them there are none."""

    def __init__(self) -> None:
        self._nvml = _open_nvml()
        self._processes: dict[int, psutil.Process] = {}  # kept, since CPU use is measured from reading to reading

    def read(self, engine_pid: int) -> Hardware:
        """Facts of the engine with this pid and of its workers. A process that has gone is left out."""
        processes: list[ProcessFacts] = []
        with contextlib.suppress(psutil.Error):
            engine = self._known(psutil.Process(engine_pid))
            processes += _facts("engine", engine)
            workers = sorted(engine.children(), key=lambda child: child.pid)
            for rank, worker in enumerate(workers):
                processes += _facts(f"worker {rank}", self._known(worker))
        alive = {facts.pid for facts in processes}
        self._processes = {pid: process for pid, process in self._processes.items() if pid in alive}
        return Hardware(processes=processes, gpus=self._gpus(alive))

    def _known(self, process: psutil.Process) -> psutil.Process:
        known = self._processes.setdefault(process.pid, process)
        if known != process:  # the pid is another process by now
            known = self._processes[process.pid] = process
        return known

    def _gpus(self, pids: set[int]) -> list[GpuFacts]:
        """The GPUs that these processes use; all of them where a container hides whose they are."""
        nvml = self._nvml
        if nvml is None:
            return []
        found: list[tuple[bool, GpuFacts]] = []
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                users = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
                found.append((not users.isdisjoint(pids), _gpu_facts(nvml, device, index)))
        except nvml.NVMLError:
            return []
        ours = [facts for is_ours, facts in found if is_ours]
        return ours or [facts for _, facts in found]


def _open_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _facts(name: str, process: psutil.Process) -> list[ProcessFacts]:
    try:
        with process.oneshot():
            return [
                ProcessFacts(name, process.pid, process.cpu_percent(), process.memory_info().rss, process.num_threads())
            ]
    except psutil.Error:
        return []


def _gpu_facts(nvml: Any, device: Any, index: int) -> GpuFacts:
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    name = nvml.nvmlDeviceGetName(device)
    watts = 0.0
    with contextlib.suppress(nvml.NVMLError):  # not every board measures it
        watts = nvml.nvmlDeviceGetPowerUsage(device) / 1000
    return GpuFacts(
        index=index,
        name=name if isinstance(name, str) else name.decode(errors="replace"),
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        use_percent=int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
        watts=watts,
    )
