from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.runtime.memory.probes import VisibleProbe, order_warning, visible
from greenroom.runtime.memory.readings import GpuReading, Reading
from tests.runtime.memory.readings import gpu, reading

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


def test_numbers_of_gpus_that_differ_are_warned_of() -> None:
    differing = [gpu("GPU-a", 0, name="H200"), gpu("GPU-b", 1, name="T4")]
    warning = order_warning(differing, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert warning is not None and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in warning


@pytest.mark.parametrize(
    "environ", [{}, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}]
)
def test_what_is_clear_is_not_warned_of(environ: dict[str, str]) -> None:
    assert order_warning([gpu("GPU-a", 0, name="H200"), gpu("GPU-b", 1, name="T4")], environ) is None


def test_numbers_of_gpus_that_are_alike_are_not_warned_of() -> None:
    assert order_warning([gpu("GPU-a", 0), gpu("GPU-b", 1)], {"CUDA_VISIBLE_DEVICES": "1"}) is None
