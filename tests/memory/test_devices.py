"""The budget: simulated GPUs from the configuration, and the machine's own memory."""

import os

from greenroom.config.schema import Config, Gpu, Host
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.memory.devices import HOST, HOST_SHARE, devices


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
