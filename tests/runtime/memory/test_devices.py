"""The budget: GPUs, simulated or seen, and the machine's own memory; and what they are called."""

import os

import pytest

from greenroom.config.schema import Config, Gpu, Host, Memory
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.runtime.memory.devices import HOST, HOST_SHARE, DeviceNames, devices
from tests.runtime.memory.readings import HOST_READING, gpu, reading


def test_simulated_gpus_are_numbered_in_order() -> None:
    config = Config(gpus=(Gpu(memory_mib=8192), Gpu(memory_mib=4096, margin_mib=0)), host=Host(memory_mib=1000))
    assert devices(config) == (
        Device(DeviceId("gpu0"), DeviceKind.GPU, 8192, 512),
        Device(DeviceId("gpu1"), DeviceKind.GPU, 4096, 0),
        Device(HOST, DeviceKind.HOST, 1000, 0),
    )


def test_without_gpus_a_share_of_the_machine_is_the_budget() -> None:
    (host,) = devices(Config())
    physical_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    assert 0 < host.capacity_mib <= physical_mib * HOST_SHARE


def test_gpus_that_were_seen_are_devices_under_their_uuids() -> None:
    config = Config(memory=Memory(gpu_margin_mib=300))
    assert devices(config, reading(gpu("GPU-a"), gpu("GPU-b", 1, total_mib=8_000))) == (
        Device(DeviceId("GPU-a"), DeviceKind.GPU, 24_000, 300),
        Device(DeviceId("GPU-b"), DeviceKind.GPU, 8_000, 300),
        Device(HOST, DeviceKind.HOST, int(HOST_READING.total_mib * HOST_SHARE), 0),
    )


def test_simulated_gpus_keep_their_own_margins_when_they_were_seen() -> None:
    config = Config(gpus=(Gpu(memory_mib=8192, margin_mib=7),))
    assert devices(config, reading(gpu("gpu0", total_mib=8192)))[0].margin_mib == 7


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("host", "host"),
        ("gpu0", "GPU-aa11"),
        ("gpu1", "GPU-aa22"),
        ("1", "GPU-aa22"),
        ("GPU-aa22", "GPU-aa22"),
        ("GPU-aa2", "GPU-aa22"),
        ("GPU-aa", None),
        ("gpu7", None),
        ("gpu", None),
        ("", None),
    ],
)
def test_people_may_call_a_gpu_by_number_uuid_or_the_beginning_of_one(name: str, device: str | None) -> None:
    names = DeviceNames((gpu("GPU-aa11", 0), gpu("GPU-aa22", 1)))
    assert names.id_of(name) == device


def test_simulated_gpus_are_called_what_they_are() -> None:
    names = DeviceNames((gpu("gpu0", 0), gpu("gpu1", 1)))
    assert [names.id_of("gpu0"), names.id_of("gpu1"), names.id_of("gpu2")] == ["gpu0", "gpu1", None]
