"""From a pipeline's folder to a pipeline that sleeps. On failure nothing is left. Read `prepare` first."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from ...serving.http import HttpServer
from ..control.resources import DeviceContext, SlotLoad, WorkerResources
from ..control.slot_options import Opening, SlotOptions
from ..failures import BadModel
from ..weights.arena import HostArena
from ..weights.building import DTYPES
from ..weights.device_weights import DeviceWeights
from ..weights.loading import load
from .image_engine import ImageEngine
from .image_routes import serve_images
from .pipeline import PipelineSource, read_pipeline

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedPipeline:
    """Implements `PreparedModel`."""

    weights: DeviceWeights
    engine: ImageEngine
    host_bytes: int
    read_bytes: int

    async def serve(self, socket: Path, model: str, resources: WorkerResources) -> HttpServer:
        return await serve_images(socket, self.engine, model)

    def close(self) -> None:
        self.engine.close()
        self.weights.close()


class _ImageLoad(SlotLoad):
    """Keeps the arena, so that it can be closed."""

    arena: HostArena | None = None

    def on_built(self, module: torch.nn.Module, arena: HostArena) -> None:
        self.arena = arena


def prepare(order: SlotOptions, descriptor: int, device_context: DeviceContext, opening: Opening) -> PreparedPipeline:
    """Implements `Prepare`."""
    if order.dtype not in DTYPES:
        raise BadModel(f"dtype {order.dtype!r} is not known; choose one of {', '.join(DTYPES)}.")
    trusts = {"trust_remote_code": order.trust_remote_code, "allow_pickle": order.allow_pickle}
    source = PipelineSource(read_pipeline(order.folder, order.dtype, **trusts), order.dtype, **trusts)
    if order.threads is not None and device_context.device.type == "cpu":
        torch.set_num_threads(order.threads)
    context = _ImageLoad(order, device_context, opening)
    try:
        loaded = load(source, descriptor, order.filled, context)
        pipelines = _pipelines(source.assemble(loaded.module))
        components = dict(loaded.module.named_children())
        spread = _spread(order, components, device_context.devices)
        weights = DeviceWeights(loaded.module, loaded.arena, device_context.device, 0, device_context.copy_rate, spread)
    except BaseException:
        if context.arena is not None:
            context.arena.close()
        raise
    try:
        if len(weights.devices) > 1:
            connect(pipelines.values(), components, spread)
        engine = ImageEngine(pipelines, weights, on_fatal=device_context.on_fatal, name=order.model)
    except BaseException:
        weights.close()
        raise
    return PreparedPipeline(weights, engine, loaded.arena.held_bytes, loaded.read_bytes)


def _spread(order: SlotOptions, components: Iterable[str], devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """The device of each component. Those that the map does not name are on the first."""
    places = {name: order.device_map.get(name, 0) for name in components}
    return {name: devices[min(place, len(devices) - 1)] for name, place in places.items()}


def _pipelines(pipeline: Any) -> dict[str, Any]:
    """The pipeline, and those that change a picture or a part of one with the same components, where there are such."""
    found = {"text": pipeline}
    for kind, auto in (
        ("image", diffusers.AutoPipelineForImage2Image),
        ("inpaint", diffusers.AutoPipelineForInpainting),
    ):
        try:
            made = auto.from_pipe(pipeline)
        except (ValueError, TypeError, AttributeError) as reason:
            log.info("no edits of kind %s: %s", kind, str(reason)[:200])
            continue
        made.set_progress_bar_config(disable=True)
        found[kind] = made
    return found


# --- pipelines on several GPUs ----------------------------------------------------------------------------------------


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
