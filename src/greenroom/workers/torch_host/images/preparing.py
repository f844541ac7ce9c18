"""From a pipeline's folder to a pipeline that sleeps. On failure nothing is left. Read `prepare` first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from ...serving.http import HttpServer
from ..control.device_context import DeviceContext, settle_near
from ..control.resources import WorkerResources
from ..control.slot_options import SlotOptions
from ..failures import BadModel
from ..weights.arena import HostArena
from ..weights.building import DTYPES
from ..weights.device_weights import DeviceWeights
from ..weights.loading import LoadContext, load
from .hops import connect
from .image_engine import ImageEngine
from .image_routes import serve_images
from .pipeline import PipelineSource
from .pipeline_files import read_pipeline

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


def prepare(
    order: SlotOptions,
    descriptor: int,
    device_context: DeviceContext,
    progress: Callable[[float], None],
    cancelled: threading.Event,
) -> PreparedPipeline:
    """Implements `Prepare`."""
    if order.dtype not in DTYPES:
        raise BadModel(f"dtype {order.dtype!r} is not known; choose one of {', '.join(DTYPES)}.")
    trusts = {"trust_remote_code": order.trust_remote_code, "allow_pickle": order.allow_pickle}
    source = PipelineSource(read_pipeline(order.folder, order.dtype, **trusts), order.dtype, **trusts)
    if order.threads is not None and device_context.device.type == "cpu":
        torch.set_num_threads(order.threads)
    arenas: list[HostArena] = []
    context = LoadContext(
        arena_max_bytes=order.arena_max_bytes,
        host_free_bytes=order.host_free_bytes,
        # A CPU computes with the arena itself.
        folds=all(device.type == "cuda" for device in device_context.devices),
        on_progress=progress,
        cancelled=cancelled,
        on_thread=lambda: settle_near(device_context.device),
        on_built=lambda module, arena: arenas.append(arena),
    )
    try:
        loaded = load(source, descriptor, order.filled, context)
        pipelines = _pipelines(source.assemble(loaded.module))
        components = dict(loaded.module.named_children())
        spread = _spread(order, components, device_context.devices)
        weights = DeviceWeights(loaded.module, loaded.arena, device_context.device, 0, device_context.copy_rate, spread)
    except BaseException:
        for arena in arenas:
            arena.close()
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
