"""Memory for workers themselves is set aside where a hosted model may come, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Config, Model
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.memory.devices import WORKER_GPU_MIB, set_aside, without

A, B, HOST = DeviceId("GPU-a"), DeviceId("GPU-b"), DeviceId("host")
DEVICES = (
    Device(A, DeviceKind.GPU, 10_000, 512),
    Device(B, DeviceKind.GPU, 10_000, 512),
    Device(HOST, DeviceKind.HOST, 50_000),
)


@pytest.mark.parametrize(
    ("keys", "gpus"),
    [({}, {A, B}), ({"devices": ("GPU-b",)}, {B}), ({"device": "cpu"}, set()), ({"engine": "llamacpp"}, set())],
)
def test_it_is_set_aside_where_a_hosted_model_may_be_placed(
    tmp_path: Path, keys: dict[str, Any], gpus: set[DeviceId]
) -> None:
    catalog = Catalog()
    catalog.fill(Config(models={"m": Model(path=str(tmp_path), **keys)}))
    assert set_aside(catalog, DEVICES) == dict.fromkeys(sorted(gpus), WORKER_GPU_MIB)


def test_plans_do_not_count_with_it() -> None:
    assert [device.margin_mib for device in without(DEVICES, {A: 800})] == [1_312, 512, 0]
    assert without(DEVICES, {}) == DEVICES
