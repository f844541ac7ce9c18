"""The device that a model is prepared for, its copy rate, and the processors near it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ..failures import OnFatal
from ..weights.device_weights import CopyRate

DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """The device of a model, its copy rate, and what to call when the device is lost.

    `others` are further devices over which its components may be spread.
    """

    device: torch.device
    copy_rate: CopyRate
    on_fatal: OnFatal
    others: tuple[torch.device, ...] = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All of them, in the order in which `device_map` counts them."""
        return (self.device, *self.others)


def settle_near(device: torch.device) -> None:
    """Run the calling thread, and those it starts, on processors near this device."""
    near = processors_near(device) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def processors_near(device: torch.device) -> set[int]:
    # With one NUMA node there is no need to wait for CUDA to identify the device.
    if device.type != "cuda" or len(list(NODES.glob("node[0-9]*"))) < 2:
        return set()
    seen = torch.cuda.get_device_properties(device)
    try:
        address = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
        return numbers_in((DEVICES / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()


def numbers_in(text: str) -> set[int]:
    """The numbers in a list of the kernel, such as `0-3,8,10-11`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
