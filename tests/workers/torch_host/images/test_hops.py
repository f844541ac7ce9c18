"""Pipelines over two devices: tensors hop at every boundary, and pictures are those of plain diffusers.

The devices are stand-ins which refuse an operation on tensors of two devices, so that a missing hop is an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from PIL import Image

from greenroom.workers.torch_host.control.resources import DeviceContext
from greenroom.workers.torch_host.control.slot_options import Opening, SlotOptions
from greenroom.workers.torch_host.failures import OutOfMemory
from greenroom.workers.torch_host.images import preparing
from greenroom.workers.torch_host.images.preparing import PreparedPipeline, prepare
from greenroom.workers.torch_host.weights.device_memory import BorrowedArena
from greenroom.workers.torch_host.weights.upload import CopyRate
from tests.workers.torch_host.images.test_pipelines import ARGUMENTS as FULL
from tests.workers.torch_host.images.test_pipelines import is_same, plain
from tests.workers.torch_host.samples.tiny_pipelines import KINDS, make_pipeline
from tests.workers.torch_host.stand_in_devices import KIND, MixedDevices, StandInDevices

# Every step crosses the same boundaries, and takes long on stand-ins: the second has what the first brought back.
ARGUMENTS: dict[str, Any] = {**FULL, "num_inference_steps": 2}
ONE, OTHER = torch.device(KIND, 0), torch.device(KIND, 1)
# Which components are on the second device: the denoiser, or all that it is not.
MAPS: dict[str, dict[str, int]] = {
    "denoiser away": {"unet": 1, "transformer": 1},
    "others away": {"text_encoder": 1, "text_encoder_2": 1, "text_encoder_3": 1, "vae": 1},
    "texts away": {"text_encoder_2": 1, "text_encoder_3": 1},
}
_first, *_others = KINDS
FIRST_QUICK = [_first, *(pytest.param(kind, marks=pytest.mark.slow) for kind in _others)]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    for kind in KINDS:
        make_pipeline(folder / kind, kind)
    return folder


@contextlib.contextmanager
def stand_ins() -> Iterator[StandInDevices]:
    """Each operation inside takes many times as long: what needs no second device is done outside."""
    with torch.no_grad(), StandInDevices() as made:
        yield made


@pytest.fixture
def devices() -> Iterator[StandInDevices]:
    with stand_ins() as made:
        yield made


@functools.cache
def plain_picture(folder: Path) -> Any:
    return plain(folder, ARGUMENTS)


def spread(folder: Path, descriptor: int, device_map: dict[str, int], *others: torch.device) -> PreparedPipeline:
    around = DeviceContext(ONE, CopyRate(), on_fatal=lambda error, say: say(), others=others)
    options = SlotOptions("s", "painter", folder, Path("/unused"), device_map=device_map)
    return prepare(options, descriptor, around, Opening())


def picture(made: PreparedPipeline, kind: str, said: dict[str, Any]) -> Any:
    """What the pipeline makes in this thread: only here the stand-ins can make new tensors."""
    pipeline = made.engine.pipelines[kind]
    return numpy.asarray(pipeline(**said, generator=torch.Generator("cpu").manual_seed(7)).images[0])


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("kind", FIRST_QUICK)
def test_a_picture_over_two_devices_is_the_plain_one(
    folders: Path, descriptor: int, kind: str, device_map: str
) -> None:
    with stand_ins() as devices:
        made = spread(folders / kind, descriptor, MAPS[device_map], OTHER)
        try:
            where = {name: next(part.parameters()).device for name, part in made.weights.module.named_children()}
            assert where == {name: (ONE, OTHER)[MAPS[device_map].get(name, 0)] for name in where}
            painted = picture(made, "text", ARGUMENTS)
            assert devices.hops > 0
        finally:
            made.close()
    assert is_same(painted, plain_picture(folders / kind))


@pytest.mark.parametrize("kind", FIRST_QUICK)
def test_an_edit_over_two_devices_is_the_plain_one(folders: Path, descriptor: int, kind: str) -> None:
    """The encoder answers with a distribution, which hops too."""
    sent = Image.effect_mandelbrot((64, 48), (-2, -1, 1, 1), 50).convert("RGB")
    said: dict[str, Any] = {**ARGUMENTS, "image": sent, "strength": 0.7}
    if kind == "sdxl":
        # This one takes the size of the picture.
        del said["width"], said["height"]
    with stand_ins():
        made = spread(folders / kind, descriptor, MAPS["others away"], OTHER)
        try:
            painted = picture(made, "image", said)
        finally:
            made.close()
    assert is_same(painted, plain(folders / kind, said, diffusers.AutoPipelineForImage2Image))


def test_the_stand_ins_notice_a_missing_hop(folders: Path, descriptor: int, devices: StandInDevices) -> None:
    made = spread(folders / "sd3", descriptor, MAPS["others away"], OTHER)
    try:
        # The denoiser is at home and has no boundary.
        with pytest.raises(MixedDevices):
            made.weights.module.transformer.proj_out(torch.ones(1, 32, device=OTHER))
    finally:
        made.close()


def test_all_on_one_device_needs_no_hop(folders: Path, descriptor: int, devices: StandInDevices) -> None:
    made = spread(folders / "flux", descriptor, {"transformer": 1})
    try:
        assert made.weights.devices == (ONE,), "there is no second device"
        picture(made, "text", ARGUMENTS)
        assert devices.hops == 0
    finally:
        made.close()


def test_what_a_caller_gave_is_not_changed_and_records_come_back_whole(devices: StandInDevices) -> None:
    given = {"a": [torch.ones(2, device=ONE)], "b": (1, "two", None)}
    there = preparing.moved(given, OTHER)
    assert there["a"][0].device == OTHER and given["a"][0].device == ONE and there["b"] == (1, "two", None)
    record = diffusers.models.modeling_outputs.AutoencoderKLOutput(
        latent_dist=diffusers.models.autoencoders.vae.DiagonalGaussianDistribution(torch.ones(1, 4, 2, 2, device=ONE))
    )
    back = preparing.brought((record, [torch.ones(1, device=ONE)]), OTHER)
    assert back[0].latent_dist.mean.device == back[0]["latent_dist"].std.device == back[1][0].device == OTHER


def test_a_wake_without_memory_on_one_device_leaves_nothing(
    folders: Path, descriptor: int, devices: StandInDevices
) -> None:
    class Full(BorrowedArena):
        def map(self) -> None:
            raise OutOfMemory("this device is full")

    made = spread(folders / "flux", descriptor, MAPS["others away"], OTHER)
    try:
        one, other = made.weights.parts
        there, other.arena = other.arena, Full(other.arena.tensor)
        with pytest.raises(OutOfMemory, match="this device is full"):
            made.weights.wake()
        assert not one.arena.is_mapped and not made.weights.is_awake
        other.arena = there
        assert made.weights.wake().each_device_bytes[1:] == [0], "stand-ins borrow the arena of the host"
        assert one.arena.is_mapped and other.arena.is_mapped
        made.weights.sleep()
        assert not one.arena.is_mapped and not other.arena.is_mapped
    finally:
        made.close()
