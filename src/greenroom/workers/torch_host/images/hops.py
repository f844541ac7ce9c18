"""Pipelines over several devices: each component is whole on one of them, and tensors hop at its boundary.

Owns where a pipeline computes what is outside of its components (its home), and the move of tensors into a component
and back. A pipeline is not changed for it: to its code, everything is at home. Never places a component.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import torch

# The components with the most calls: what is computed between two steps stays on their device.
_DENOISERS: Final = ("transformer", "unet", "prior")
# Methods by which pipelines call a component, besides `forward`.
_METHODS: Final = (
    *("forward", "encode", "decode", "generate", "encode_image", "encode_text", "post_process_latents"),
    *("get_text_features", "get_image_features"),
)
# Pipelines also call modules inside a component, such as the last norm of a text encoder. None is deeper than this.
_DEPTH: Final = 3
_NESTED_MAX: Final = 8


def home_of(spread: Mapping[str, torch.device]) -> torch.device:
    """The device of the component that denoises; else that of the first component."""
    return next((spread[name] for name in _DENOISERS if name in spread), next(iter(spread.values())))


def connect(
    pipelines: Iterable[Any], components: Mapping[str, torch.nn.Module], spread: Mapping[str, torch.device]
) -> None:
    """Let these pipelines compute at home, and tensors hop to and from components that are elsewhere."""
    home = home_of(spread)
    for name, component in components.items():
        if spread[name] != home:
            _Boundary(spread[name], home).put_around(component)
    for pipeline in pipelines:
        _settle(pipeline, home)


def _settle(pipeline: Any, home: torch.device) -> None:
    """Diffusers takes the device of any component for that of the pipeline; this names it."""
    kind = type(pipeline)
    says = property(lambda self: home)
    told = {"device": says, "_execution_device": says, "__module__": kind.__module__}
    pipeline.__class__ = type(kind.__name__, (kind,), told)


class _Boundary:
    """Moves tensors into calls of one component, and their results back. Calls inside of calls move nothing."""

    def __init__(self, device: torch.device, home: torch.device) -> None:
        self._device, self._home = device, home
        self._is_inside = False

    def put_around(self, component: torch.nn.Module) -> None:
        for name in _METHODS:
            if callable(method := getattr(component, name, None)):
                setattr(component, name, self._hopping(method))
        for path, part in component.named_modules():
            if path and path.count(".") < _DEPTH and not isinstance(part, torch.nn.ModuleList | torch.nn.ModuleDict):
                part.forward = self._hopping(part.forward)

    def _hopping(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            if self._is_inside:
                return method(*arguments, **named)
            self._is_inside = True
            try:
                result = method(*moved(arguments, self._device), **moved(named, self._device))
            finally:
                self._is_inside = False
            return brought(result, self._home)

        return call


def moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on this device. Containers of the caller are not changed."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(moved(one, device) for one in value)
    if type(value) is dict:
        return {key: moved(one, device) for key, one in value.items()}
    return value


def brought(result: Any, device: torch.device, nested: int = 0) -> Any:
    """A result of a component with all its tensors on this device. Records such as a distribution are changed."""
    if isinstance(result, torch.Tensor):
        return result.to(device)
    if nested == _NESTED_MAX or isinstance(result, torch.nn.Module):
        return result
    if type(result) in (list, tuple):
        return type(result)(brought(one, device, nested + 1) for one in result)
    if isinstance(result, MutableMapping):
        # The records of Transformers and diffusers keep their fields as attributes, too.
        for key in list(result):
            result[key] = brought(result[key], device, nested + 1)
    elif type(result).__module__.partition(".")[0] in ("diffusers", "transformers"):
        for key, one in list(getattr(result, "__dict__", {}).items()):
            setattr(result, key, brought(one, device, nested + 1))
    return result
