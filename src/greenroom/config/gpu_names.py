"""What a GPU is called outside: CUDA knows UUIDs and numbers."""

from __future__ import annotations


def cuda_name(device: str) -> str:
    """What CUDA calls a GPU. One that stands in the configuration as a budget, gpu0, has no UUID: it goes by number."""
    number = device.removeprefix("gpu")
    return number if number.isdecimal() else device
