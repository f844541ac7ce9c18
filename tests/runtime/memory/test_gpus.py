"""Which GPUs an engine may see."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config.schema import Config
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.memory.slot_memory import visible_gpus

HOST = Device(DeviceId("host"), DeviceKind.HOST, 64_000)
A, B = (Device(DeviceId(name), DeviceKind.GPU, 10_000) for name in ("GPU-a", "GPU-b"))
HERE = (A, B, HOST)


def entry(**keys: Any) -> Entry:
    said = {"cmd": "serve ${PORT}"} if "path" not in keys else {}
    catalog = Catalog()
    catalog.fill(Config.model_validate({"models": {"m": said | keys}}))
    found = catalog.find("m")
    assert found is not None
    return found


def test_without_gpus_nothing_is_said() -> None:
    assert visible_gpus(entry(memory_mib=5), {HOST.id: 5}, (HOST,)) is None


def test_what_was_claimed_is_seen_in_the_order_of_the_claim() -> None:
    assert visible_gpus(entry(memory_mib=5), {A.id: 3, B.id: 2, HOST.id: 1}, HERE) == (A.id, B.id)
    assert visible_gpus(entry(memory_mib=5), {B.id: 5}, HERE) == (B.id,)


@pytest.mark.parametrize(
    "keys",
    [
        {"memory_mib": 500, "host_memory_mib": 500},
        {"memory_mib": 0},
        {"device": "cpu"},
        {"path": "/m.gguf", "n_gpu_layers": 0},
        {"path": "/m.gguf", "memory_mib": 500},
    ],
)
def test_a_model_known_to_need_no_gpu_sees_none(keys: dict[str, Any]) -> None:
    assert visible_gpus(entry(**keys), {HOST.id: 500}, HERE) == ()


def test_a_model_of_unknown_need_sees_the_gpus_that_the_operator_allows() -> None:
    assert visible_gpus(entry(), {}, HERE) == (A.id, B.id)
    assert visible_gpus(entry(devices=["GPU-b"]), {}, HERE) == (B.id,)
    # Of a program that was once seen on the host alone it is not known that it needs no GPU.
    assert visible_gpus(entry(), {HOST.id: 500}, HERE) == (A.id, B.id)


def test_where_memory_is_not_planned_declared_models_see_their_gpus_too() -> None:
    assert visible_gpus(entry(memory_mib=500), {}, HERE) == (A.id, B.id)
    assert visible_gpus(entry(path="/m.gguf"), {}, HERE) == (A.id, B.id)
