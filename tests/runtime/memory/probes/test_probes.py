"""Which probe looks at this machine, and which GPUs it shows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Config
from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.probes import FileProbe, VisibleProbe, make_probe, open_probe, order_warning, visible
from greenroom.runtime.memory.readings import GpuReading, NoProbe, Reading
from tests.runtime.memory.probes.test_nvml import FakeNvml
from tests.runtime.memory.readings import gpu, reading
from tests.standins import fake_gpu


def config(**said: Any) -> Config:
    return Config.model_validate(said)


@pytest.fixture
def driver() -> FakeNvml:
    """This machine has GPUs."""
    return FakeNvml()


@pytest.fixture
def no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_gpus_of_the_configuration_come_first(driver: FakeNvml) -> None:
    probe = make_probe(config(gpus=[{"memory_mib": 8_000}, {"memory_mib": 4_000}]), {}, driver)
    assert probe.kind == "simulated"
    assert [(gpu.uuid, gpu.total_mib, gpu.used_mib, gpu.processes) for gpu in probe.look().gpus] == [
        ("gpu0", 8_000, 0, {}),
        ("gpu1", 4_000, 0, {}),
    ]


@pytest.mark.parametrize(("environ", "seen"), [({}, ["GPU-a", "GPU-b"]), ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-b"])])
def test_nvml_is_used_where_it_works_and_shows_the_gpus_that_are_given_to_us(
    environ: dict[str, str], seen: list[str], driver: FakeNvml
) -> None:
    probe, found = open_probe(config(), environ, driver)
    assert probe.kind == "nvml" and [gpu.uuid for gpu in found.gpus] == seen


@pytest.mark.usefixtures("no_bindings")
def test_a_machine_whose_driver_cannot_be_looked_at_has_no_gpus_and_says_why(driver: FakeNvml) -> None:
    probe, seen = open_probe(config(), {})
    assert probe.kind == "none" and seen.gpus == () and seen.host.total_mib > 0
    assert isinstance(probe, NoProbe) and "pynvml" in probe.why
    driver.broken = {"nvmlDeviceGetCount"}
    assert open_probe(config(), {}, driver)[0].kind == "none" and not driver.is_open


@pytest.mark.usefixtures("no_bindings")
def test_nvml_that_was_asked_for_must_work(driver: FakeNvml) -> None:
    asked = config(memory={"probe": "nvml"})
    with pytest.raises(ProbeFailed, match="pynvml"):
        make_probe(asked, {})
    driver.broken = {"nvmlDeviceGetCount"}
    with pytest.raises(ProbeFailed, match="nvmlDeviceGetCount"):
        open_probe(asked, {}, driver)


def test_gpus_can_be_left_out(driver: FakeNvml) -> None:
    assert make_probe(config(memory={"probe": "none"}), {}, driver).look().gpus == ()
    assert not driver.is_open


def test_a_file_can_describe_gpus(tmp_path: Path, driver: FakeNvml) -> None:
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-x", 100), fake_gpu.gpu("GPU-y", 100))
    asked = config(memory={"probe": "file", "file": str(file)})
    assert [gpu.uuid for gpu in make_probe(asked, {}, driver).look().gpus] == ["GPU-x", "GPU-y"]
    given = {"CUDA_VISIBLE_DEVICES": "GPU-y"}
    assert [gpu.uuid for gpu in make_probe(asked, given, driver).look().gpus] == ["GPU-y"]


GPUS = (gpu("GPU-aa11", 0), gpu("GPU-aa22", 1), gpu("GPU-bb33", 2))


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("0,2", ["GPU-aa11", "GPU-bb33"]),
        (" 1 , 0 ", ["GPU-aa22", "GPU-aa11"]),
        ("GPU-bb33", ["GPU-bb33"]),
        ("GPU-bb", ["GPU-bb33"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["GPU-aa11"]),
        ("0,7,1", ["GPU-aa11"]),
        ("GPU-aa", []),
        ("GPU-bb,GPU-zz,0", ["GPU-bb33"]),
        ("NoDevFiles", []),
        ("0,0,1", ["GPU-aa11", "GPU-aa22"]),
        ("MIG-42,1", ["GPU-aa22"]),
        ("MIG-42", []),
        ("²,1", []),
    ],
)
def test_the_variable_means_what_it_means_to_cuda(said: str, seen: list[str]) -> None:
    assert [gpu.uuid for gpu in visible(GPUS, said)] == seen


class Shrinking:
    """A probe whose first GPU falls off the bus after the first look."""

    kind = "nvml"

    def __init__(self) -> None:
        self.closed = False
        self.looks = 0

    def look(self) -> Reading:
        self.looks += 1
        if self.looks == 1:
            return reading(*GPUS)
        return reading(*(replace(gpu, index=at) for at, gpu in enumerate(GPUS[1:])))

    def glance(self, uuid: str) -> GpuReading | None:
        return reading(*GPUS).gpu(uuid)

    def close(self) -> None:
        self.closed = True


def test_only_gpus_that_were_given_are_seen_and_a_vanished_one_does_not_shift_the_others() -> None:
    inner = Shrinking()
    probe = VisibleProbe(inner, "0,1")
    assert [gpu.uuid for gpu in probe.look().gpus] == ["GPU-aa11", "GPU-aa22"]
    assert [gpu.uuid for gpu in probe.look().gpus] == ["GPU-aa22"]
    assert probe.glance("GPU-aa22") == GPUS[1] and probe.glance(GPUS[2].uuid) is None
    probe.close()
    assert inner.closed and probe.kind == "nvml"


DIFFERING, ALIKE = ("H200", "T4"), ("fake", "fake")


@pytest.mark.parametrize(
    ("names", "environ", "is_warned"),
    [
        (DIFFERING, {"CUDA_VISIBLE_DEVICES": "0,1"}, True),
        (DIFFERING, {}, False),
        (DIFFERING, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, False),
        (DIFFERING, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, False),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "1"}, False),
    ],
)
def test_numbers_are_warned_of_where_gpus_differ(
    names: tuple[str, str], environ: dict[str, str], is_warned: bool
) -> None:
    warning = order_warning([gpu("GPU-a", 0, name=names[0]), gpu("GPU-b", 1, name=names[1])], environ)
    assert (warning is not None and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in warning) is is_warned
    assert is_warned or warning is None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return fake_gpu.describe(
        tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 24_000, 500), fake_gpu.gpu("GPU-b", 8_000, temperature_c=40)
    )


def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_gpus_are_as_the_file_describes_them(file: Path) -> None:
    first, second = FileProbe(file).look().gpus
    assert (first.uuid, first.index, first.total_mib, first.used_mib, first.processes) == ("GPU-a", 0, 24_000, 500, {})
    assert (second.uuid, second.index, second.temperature_c, second.utilisation) == ("GPU-b", 1, 40, None)


def test_a_process_counts_while_it_lives(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as living:
        assert fake_gpu.take(file, 3_000, living.pid)
        assert [(gpu.used_mib, gpu.processes) for gpu in FileProbe(file).look().gpus] == [
            (2_000, {living.pid: 1_500}),
            (1_500, {living.pid: 1_500}),
        ]
        living.kill()
        # Not yet waited for, it is a zombie, which has no memory any more.
        os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
        assert [gpu.used_mib for gpu in FileProbe(file).look().gpus] == [500, 0]
    assert [gpu.processes for gpu in FileProbe(file).look().gpus] == [{}, {}]


def test_memory_of_the_dead_lingers_as_long_as_the_file_says(tmp_path: Path) -> None:
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 24_000), linger_s=2)
    fake_gpu.take(file, 1_000, dead_pid())
    now = [50.0]
    probe = FileProbe(file, clock=lambda: now[0])
    assert [(gpu.used_mib, gpu.processes) for gpu in probe.look().gpus] == [(1_000, {})]
    now[0] += 1.9
    assert probe.look().gpus[0].used_mib == 1_000
    now[0] += 0.2
    assert probe.look().gpus[0].used_mib == 0


def test_pids_can_be_hidden(file: Path) -> None:
    fake_gpu.describe(file, fake_gpu.gpu("GPU-a", 24_000), pids_visible=False)
    assert fake_gpu.take(file, 700)
    (gpu,) = FileProbe(file).look().gpus
    assert (gpu.used_mib, gpu.processes) == (700, None)


def test_changes_are_seen_at_the_next_look(file: Path) -> None:
    probe = FileProbe(file)
    probe.look()
    fake_gpu.describe(file, fake_gpu.gpu("GPU-a", 24_000, 9_000))
    assert [gpu.used_mib for gpu in probe.look().gpus] == [9_000]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"gpus": [{"uuid": "a"}]}',
        '{"gpus": [{"uuid": "a", "memory_mib": -1}]}',
        '{"gpus": [], "pids": true}',
        '{"gpus": [{"uuid": "a b", "memory_mib": 1}]}',
        '{"gpus": [{"uuid": "a", "memory_mib": 1}, {"uuid": "a", "memory_mib": 1}]}',
    ],
)
def test_a_file_that_describes_nothing_fails_and_is_named(content: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(ProbeFailed, match=r"gpus\.json"):
        FileProbe(file).look()


def test_a_missing_file_fails(tmp_path: Path) -> None:
    with pytest.raises(ProbeFailed, match="No such file"):
        FileProbe(tmp_path / "none.json").look()


def test_what_a_process_wrote_badly_fails_and_strange_files_are_nothing(file: Path) -> None:
    folder = file.with_name("gpus.json.d")
    folder.mkdir()
    (folder / "README").write_text("hello")
    assert FileProbe(file).look().gpus[1].used_mib == 0
    (folder / str(os.getpid())).write_text('{"GPU-a": "much"}')
    with pytest.raises(ProbeFailed, match=str(os.getpid())):
        FileProbe(file).look()


def test_more_than_there_is_cannot_be_taken(file: Path) -> None:
    assert not fake_gpu.take(file, 23_501)
    assert FileProbe(file).look().gpus[0].used_mib == 500
    assert fake_gpu.take(file, 23_500)
