from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Config
from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.probes import make_probe, open_probe
from greenroom.runtime.memory.readings import NoProbe
from tests.runtime.memory.probes.test_nvml import FakeNvml, NVMLError
from tests.standins import fake_gpu


def config(**said: Any) -> Config:
    return Config.model_validate(said)


@pytest.fixture
def driver() -> FakeNvml:
    """This machine has GPUs."""
    return FakeNvml()


def no_driver() -> None:
    raise NVMLError("no library")


def test_gpus_of_the_configuration_come_first(driver: FakeNvml) -> None:
    probe = make_probe(config(gpus=[{"memory_mib": 8_000}, {"memory_mib": 4_000}]), {}, lambda: driver)
    assert probe.kind == "simulated"
    assert [(gpu.uuid, gpu.total_mib, gpu.used_mib, gpu.processes) for gpu in probe.look().gpus] == [
        ("gpu0", 8_000, 0, {}),
        ("gpu1", 4_000, 0, {}),
    ]


def test_nvml_is_used_where_it_works(driver: FakeNvml) -> None:
    probe, seen = open_probe(config(), {}, lambda: driver)
    assert probe.kind == "nvml"
    assert [gpu.uuid for gpu in seen.gpus] == ["GPU-a", "GPU-b"]


def test_only_gpus_that_are_given_to_us_are_seen(driver: FakeNvml) -> None:
    _, seen = open_probe(config(), {"CUDA_VISIBLE_DEVICES": "1"}, lambda: driver)
    assert [gpu.uuid for gpu in seen.gpus] == ["GPU-b"]


def test_a_machine_without_gpus_has_none_and_says_why() -> None:
    probe, seen = open_probe(config(), {}, no_driver)
    assert probe.kind == "none"
    assert seen.gpus == () and seen.host.total_mib > 0
    assert isinstance(probe, NoProbe) and "no library" in probe.why


def test_a_driver_that_cannot_be_looked_at_is_none_too(driver: FakeNvml) -> None:
    driver.broken = {"nvmlDeviceGetCount"}
    probe, _ = open_probe(config(), {}, lambda: driver)
    assert probe.kind == "none"
    assert not driver.is_open


def test_nvml_that_was_asked_for_must_work() -> None:
    with pytest.raises(ProbeFailed, match="no library"):
        make_probe(config(memory={"probe": "nvml"}), {}, no_driver)


def test_a_first_look_that_was_asked_for_must_work(driver: FakeNvml) -> None:
    driver.broken = {"nvmlDeviceGetCount"}
    with pytest.raises(ProbeFailed, match="nvmlDeviceGetCount"):
        open_probe(config(memory={"probe": "nvml"}), {}, lambda: driver)


def test_gpus_can_be_left_out(driver: FakeNvml) -> None:
    assert make_probe(config(memory={"probe": "none"}), {}, lambda: driver).look().gpus == ()
    assert not driver.is_open


def test_a_file_can_describe_gpus(tmp_path: Path, driver: FakeNvml) -> None:
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-x", 100), fake_gpu.gpu("GPU-y", 100))
    asked = config(memory={"probe": "file", "file": str(file)})
    assert [gpu.uuid for gpu in make_probe(asked, {}, lambda: driver).look().gpus] == ["GPU-x", "GPU-y"]
    given = {"CUDA_VISIBLE_DEVICES": "GPU-y"}
    assert [gpu.uuid for gpu in make_probe(asked, given, lambda: driver).look().gpus] == ["GPU-y"]
