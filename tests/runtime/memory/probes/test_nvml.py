"""The NVML probe against bindings that answer as real drivers do, well and badly."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.nvml import FIRST_PID_NAMESPACE, IDLE_MIB, NvmlProbe
from greenroom.runtime.memory.readings import HostProbe

MIB = 1024 * 1024


class NVMLError(Exception):
    pass


class FakeNvml:
    """As much of the bindings as is used. `broken` names calls that fail."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2: int | None = 0x2000028  # noqa: N815

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.gpus = [SimpleNamespace(uuid="GPU-a", name="H200", mig=0), SimpleNamespace(uuid="GPU-b", name="T4", mig=0)]
        self.compute: list[tuple[int, int | None]] = []
        self.graphics: list[tuple[int, int | None]] = []
        self.used_mib = 29
        self.lost: set[str] = set()
        self.lists = 0
        self.is_open = False

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in super().__getattribute__("broken"):

            def fail(*_: object) -> None:
                raise NVMLError(f"{name} is not supported")

            return fail
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if self.gpus[index].uuid in self.lost:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        found = [gpu for gpu in self.gpus if gpu.uuid == uuid and uuid not in self.lost]
        if not found:
            raise NVMLError("not found")
        return found[0]

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(handle.uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(handle.name)

    def nvmlDeviceGetMigMode(self, handle: Any) -> tuple[int, int]:
        return handle.mig, handle.mig

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if version is None:
            return SimpleNamespace(total=1_000 * MIB, used=130 * MIB)
        return SimpleNamespace(total=1_000 * MIB, reserved=100 * MIB, used=self.used_mib * MIB + 1)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=37, memory=1)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        self.lists += 1
        return self._listed(handle, self.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]:
        return self._listed(handle, self.graphics)

    def _listed(self, handle: Any, processes: list[tuple[int, int | None]]) -> list[Any]:
        if handle is not self.gpus[0]:
            return []
        return [SimpleNamespace(pid=pid, usedGpuMemory=mib if mib is None else mib * MIB) for pid, mib in processes]


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def machine(tmp_path: Path) -> HostProbe:
    """A machine with the processes 10 and 11, and no container around it."""
    (tmp_path / "self" / "ns").mkdir(parents=True)
    for pid in (10, 11):
        (tmp_path / str(pid)).mkdir()
    enter(tmp_path, FIRST_PID_NAMESPACE)
    return HostProbe(proc=tmp_path)


def enter(proc: Path, namespace: str) -> None:
    link = proc / "self" / "ns" / "pid"
    link.unlink(missing_ok=True)
    os.symlink(namespace, link)


def test_everything_is_told_of_each_gpu(nvml: FakeNvml, machine: HostProbe) -> None:
    nvml.compute, nvml.graphics = [(10, 20), (11, 5)], [(11, 5), (12, 1)]
    first, second = NvmlProbe(nvml, machine).look().gpus
    assert (first.uuid, first.index, first.name) == ("GPU-a", 0, "H200")
    assert (first.utilisation, first.temperature_c) == (37, 61)
    assert first.processes == {10: 20, 11: 5, 12: 1}
    assert (second.uuid, second.index, second.processes) == ("GPU-b", 1, {})


def test_what_the_driver_keeps_for_itself_is_not_there_to_plan_with(nvml: FakeNvml, machine: HostProbe) -> None:
    gpu = NvmlProbe(nvml, machine).look().gpus[0]
    assert (gpu.total_mib, gpu.used_mib) == (900, 30)


@pytest.mark.parametrize("version", [None, 1])
def test_old_drivers_and_bindings_tell_the_total_only(version: int | None, machine: HostProbe) -> None:
    class Old(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
            if version is not None:
                raise NVMLError("function not found")
            return super().nvmlDeviceGetMemoryInfo(handle)

    nvml = Old()
    nvml.nvmlMemory_v2 = version
    gpu = NvmlProbe(nvml, machine).look().gpus[0]
    assert (gpu.total_mib, gpu.used_mib) == (1_000, 130)


def test_what_is_not_supported_is_left_out(nvml: FakeNvml, machine: HostProbe) -> None:
    nvml.broken = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature", "nvmlDeviceGetMigMode"}
    gpu = NvmlProbe(nvml, machine).look().gpus[0]
    assert (gpu.utilisation, gpu.temperature_c, gpu.used_mib) == (None, None, 30)


@pytest.mark.parametrize("call", ["nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"])
def test_processes_that_may_not_be_listed_are_unknown(call: str, nvml: FakeNvml, machine: HostProbe) -> None:
    nvml.broken = {call}
    assert NvmlProbe(nvml, machine).look().gpus[0].processes is None


CONTAINER = "pid:[4026532201]"


@pytest.mark.parametrize(
    ("namespace", "used_mib", "compute", "processes"),
    [
        pytest.param(FIRST_PID_NAMESPACE, 29, [(10, 20), (11, None)], None, id="memory of one is not told"),
        pytest.param(FIRST_PID_NAMESPACE, 29, [(10, 20), (99, 5)], {10: 20, 99: 5}, id="one has just ended"),
        pytest.param(CONTAINER, IDLE_MIB, [], None, id="in a container an empty list says nothing"),
        pytest.param(CONTAINER, 29, [], {}, id="in a container, without used memory"),
        pytest.param(CONTAINER, 29, [(10, 20), (40_000, 5)], None, id="in a container, a pid of the machine outside"),
        pytest.param(CONTAINER, 29, [(10, 20), (11, 5)], {10: 20, 11: 5}, id="in a container, all are there"),
        pytest.param(None, 500, [], None, id="a namespace that is not told is taken for a container"),
    ],
)
def test_processes_are_believed_where_all_that_are_listed_can_be_seen(
    namespace: str | None,
    used_mib: int,
    compute: list[tuple[int, int | None]],
    processes: dict[int, int] | None,
    nvml: FakeNvml,
    machine: HostProbe,
) -> None:
    if namespace is None:
        (machine.proc / "self" / "ns" / "pid").unlink()
    else:
        enter(machine.proc, namespace)
    nvml.used_mib, nvml.compute = used_mib, compute
    assert NvmlProbe(nvml, machine).look().gpus[0].processes == processes


def test_in_a_container_a_process_that_ends_while_it_is_listed_hides_no_other(machine: HostProbe) -> None:
    class Ending(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
            self.compute = [(10, 20), (99, 5)] if self.lists == 0 else [(10, 20)]
            return super().nvmlDeviceGetComputeRunningProcesses(handle)

    enter(machine.proc, "pid:[4026532201]")
    nvml = Ending()
    nvml.gpus = nvml.gpus[:1]
    assert NvmlProbe(nvml, machine).look().gpus[0].processes == {10: 20}


def test_a_gpu_that_is_cut_up_is_left_alone(nvml: FakeNvml, machine: HostProbe) -> None:
    nvml.gpus[0].mig = 1
    assert [(gpu.uuid, gpu.index) for gpu in NvmlProbe(nvml, machine).look().gpus] == [("GPU-b", 1)]


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_does_not_answer_fails_the_look(call: str, nvml: FakeNvml, machine: HostProbe) -> None:
    probe = NvmlProbe(nvml, machine)
    nvml.broken = {call}
    with pytest.raises(ProbeFailed, match=call):
        probe.look()
    nvml.broken = set()
    assert len(probe.look().gpus) == 2


def test_a_gpu_that_fell_off_the_bus_hides_no_other(nvml: FakeNvml, machine: HostProbe) -> None:
    nvml.lost = {"GPU-a"}
    assert [(gpu.uuid, gpu.index) for gpu in NvmlProbe(nvml, machine).look().gpus] == [("GPU-b", 1)]


def test_a_driver_that_was_exchanged_is_opened_anew(nvml: FakeNvml, machine: HostProbe) -> None:
    probe = NvmlProbe(nvml, machine)
    nvml.broken = {"nvmlDeviceGetCount", "nvmlInit"}
    for word in ("nvmlDeviceGetCount", "nvmlInit"):
        with pytest.raises(ProbeFailed, match=word):
            probe.look()
    assert not nvml.is_open
    nvml.broken = set()
    assert len(probe.look().gpus) == 2
    assert nvml.is_open


def test_a_machine_without_the_library_has_no_such_probe(nvml: FakeNvml) -> None:
    nvml.broken = {"nvmlInit"}
    with pytest.raises(ProbeFailed, match="NVML cannot be used: nvmlInit"):
        NvmlProbe(nvml)


def test_closing_lets_go_of_the_library_and_never_fails(nvml: FakeNvml, machine: HostProbe) -> None:
    probe = NvmlProbe(nvml, machine)
    assert nvml.is_open
    probe.close()
    assert not nvml.is_open
    nvml.broken = {"nvmlShutdown"}
    probe.close()


def test_the_real_bindings_have_what_is_used_here() -> None:
    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 10
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_a_glance_asks_for_the_memory_of_one_gpu_and_nothing_else(nvml: FakeNvml, machine: HostProbe) -> None:
    probe = NvmlProbe(nvml, machine)
    looked = probe.look().gpu("GPU-b")
    nvml.lists = 0
    glance = probe.glance("GPU-b")
    assert looked is not None and glance is not None and nvml.lists == 0
    assert (glance.uuid, glance.total_mib, glance.used_mib) == ("GPU-b", looked.total_mib, looked.used_mib)
    assert glance.processes is None
    with pytest.raises(ProbeFailed, match="GPU-c"):
        probe.glance("GPU-c")
