"""The budget, what GPUs are called, which of them an engine may see, and what is set aside for workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Config, Gpu, Host, Memory, Model
from greenroom.core.model import Claim, Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.memory.devices import HOST, HOST_SHARE, WORKER_GPU_MIB, DeviceNames, devices, set_aside, without
from greenroom.runtime.memory.slot_memory import visible_gpus
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


MACHINE = Device(DeviceId("host"), DeviceKind.HOST, 64_000)
A, B = (Device(DeviceId(name), DeviceKind.GPU, 10_000) for name in ("GPU-a", "GPU-b"))
HERE = (A, B, MACHINE)


def described(**keys: Any) -> Entry:
    said = {"cmd": "serve ${PORT}"} if "path" not in keys else {}
    catalog = Catalog()
    catalog.fill(Config.model_validate({"models": {"m": said | keys}}))
    found = catalog.find("m")
    assert found is not None
    return found


KEPT_AWAY = {MACHINE.id: 500}


@pytest.mark.parametrize(
    ("keys", "claim", "seen"),
    [
        ({"memory_mib": 5}, {A.id: 3, B.id: 2, MACHINE.id: 1}, (A, B)),
        ({"memory_mib": 5}, {B.id: 5}, (B,)),
        # Known to need no GPU.
        ({"memory_mib": 500, "host_memory_mib": 500}, KEPT_AWAY, ()),
        ({"memory_mib": 0}, KEPT_AWAY, ()),
        ({"device": "cpu"}, KEPT_AWAY, ()),
        ({"path": "/m.gguf", "n_gpu_layers": 0}, KEPT_AWAY, ()),
        ({"path": "/m.gguf", "memory_mib": 500}, KEPT_AWAY, ()),
        # Of unknown need: those that the operator allows.
        ({}, {}, (A, B)),
        ({"devices": ["GPU-b"]}, {}, (B,)),
        # Of a program that was once seen on the host alone it is not known that it needs no GPU.
        ({}, KEPT_AWAY, (A, B)),
        # Memory is not planned.
        ({"memory_mib": 500}, {}, (A, B)),
        ({"path": "/m.gguf"}, {}, (A, B)),
    ],
)
def test_an_engine_sees_the_gpus_it_was_given_or_may_use(
    keys: dict[str, Any], claim: Claim, seen: tuple[Device, ...]
) -> None:
    assert visible_gpus(described(**keys), claim, HERE) == tuple(device.id for device in seen)


def test_without_gpus_nothing_is_said() -> None:
    assert visible_gpus(described(memory_mib=5), {MACHINE.id: 5}, (MACHINE,)) is None


WITH_MARGINS = (
    Device(A.id, DeviceKind.GPU, 10_000, 512),
    Device(B.id, DeviceKind.GPU, 10_000, 512),
    Device(MACHINE.id, DeviceKind.HOST, 50_000),
)


@pytest.mark.parametrize(
    ("keys", "gpus"),
    [
        ({}, {A.id, B.id}),
        ({"devices": ("GPU-b",)}, {B.id}),
        ({"device": "cpu"}, set()),
        ({"engine": "llamacpp"}, set()),
    ],
)
def test_it_is_set_aside_where_a_hosted_model_may_be_placed(
    tmp_path: Path, keys: dict[str, Any], gpus: set[DeviceId]
) -> None:
    catalog = Catalog()
    catalog.fill(Config(models={"m": Model(path=str(tmp_path), **keys)}))
    assert set_aside(catalog, WITH_MARGINS) == dict.fromkeys(sorted(gpus), WORKER_GPU_MIB)


def test_plans_do_not_count_with_it() -> None:
    assert [device.margin_mib for device in without(WITH_MARGINS, {A.id: 800})] == [1_312, 512, 0]
    assert without(WITH_MARGINS, {}) == WITH_MARGINS
