"""The processors near a GPU, for the threads that fill memory it will read.

Owns the look at what the system says about it. Memory belongs to the node of the processor that first touches it, and a
GPU reads from the other node at half the speed. Where nothing is known, nothing is changed.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")


def settle_near(device: torch.device) -> None:
    """Let the calling thread, and those it starts, run near this device."""
    near = processors_near(device) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)


def processors_near(device: torch.device) -> set[int]:
    # Where all memory is equally near nobody has to wait for CUDA to say which device this is.
    if device.type != "cuda" or len(list(NODES.glob("node[0-9]*"))) < 2:
        return set()
    seen = torch.cuda.get_device_properties(device)
    try:
        address = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
        return numbers_in((DEVICES / address / "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()


def numbers_in(text: str) -> set[int]:
    """What a list of the kernel's names: `0-3,8,10-11`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
