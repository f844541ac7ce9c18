"""Devices that a machine without GPUs has not: their tensors are computed by the CPU, and never mix.

A `StandInTensor` says that it is on a device such as `lazy:0`, which torch can name and this machine lacks. As on real
devices, an operation on tensors of two devices fails, and so does one on such a tensor and a tensor of the CPU that is
more than one number. Only a copy between devices takes both. Inside `StandInDevices` new tensors may be made there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

KIND = "lazy"
CPU = torch.device("cpu")
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class MixedDevices(RuntimeError):
    """An operation was given tensors of two devices: a hop is missing."""


class StandInTensor(torch.Tensor):
    """The numbers are in `inner`, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> StandInTensor:
        made: StandInTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor, device: torch.device) -> None:
        """All is done by `__new__`."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def __getitem__(self, key: Any) -> Any:
        # Torch would make a tensor of a list where no mode sees it.
        return super().__getitem__(torch.tensor([int(one) for one in key]) if isinstance(key, list) else key)

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"StandInTensor({self.inner!r}, {self.device})"


class StandInDevices(TorchDispatchMode):
    """Counts the copies between two of these devices."""

    def __init__(self) -> None:
        super().__init__()
        self.hops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], StandInTensor):
            self.hops += kwargs.get("device", args[0].device) not in (args[0].device, CPU)
        return _computed(func, args, kwargs)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    device = kwargs.get("device") or _device_of(func, given)
    named = {key: CPU if key == "device" and one is not None else one for key, one in kwargs.items()}
    result = func(*tree_map(_inner, args), **tree_map(_inner, named))
    changed = {id(one.inner): one for one in given if isinstance(one, StandInTensor)}
    return tree_map(lambda one: _wrapped(one, device, changed), result)


def _device_of(func: Any, given: list[torch.Tensor]) -> torch.device:
    """Where the result is. Raises MixedDevices."""
    if func in _COPIES:
        return given[0].device
    # One number of the CPU may be used everywhere.
    devices = {one.device for one in given if one.device != CPU or one.dim()}
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        devices -= {CPU} if given[0].device != CPU else set()
    if len(devices) > 1:
        raise MixedDevices(f"{func} is given tensors of {sorted(map(str, devices))}")
    return devices.pop() if devices else CPU


def _inner(one: Any) -> Any:
    return one.inner if isinstance(one, StandInTensor) else one


def _wrapped(one: Any, device: torch.device, changed: dict[int, StandInTensor]) -> Any:
    if not isinstance(one, torch.Tensor) or torch.device(device).type != KIND:
        return one
    # What an operation changed in place is the tensor that it was given.
    return changed[id(one)] if id(one) in changed else StandInTensor(one, torch.device(device))
