"""Pipelines from an arena make the pictures that plain diffusers makes from the same folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy
import pytest
import torch
from PIL import Image

from greenroom.workers.torch_host.control.resources import DeviceContext
from greenroom.workers.torch_host.control.slot_options import Opening, SlotOptions
from greenroom.workers.torch_host.failures import BadModel, Failure, OutOfMemory, WorkCancelled
from greenroom.workers.torch_host.images import image_engine
from greenroom.workers.torch_host.images.image_engine import ImageEngine, ImageJob
from greenroom.workers.torch_host.images.image_fields import ImageRequest
from greenroom.workers.torch_host.images.preparing import PreparedPipeline, prepare
from greenroom.workers.torch_host.weights.device_memory import BorrowedArena
from greenroom.workers.torch_host.weights.upload import CopyRate
from tests.waiting import until_now
from tests.workers.torch_host.samples.tiny_pipelines import KINDS, make_pipeline

ARGUMENTS: dict[str, Any] = {"prompt": "a cat", "num_inference_steps": 3, "width": 64, "height": 48}
# Half precision is slow on a CPU.
SMALL: dict[str, Any] = {**ARGUMENTS, "num_inference_steps": 1, "width": 16, "height": 16}
WAIT_S = 60.0
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    for kind in KINDS:
        make_pipeline(folder / kind, kind)
    return folder


def prepared(
    folder: Path, descriptor: int, cancelled: threading.Event | None = None, **changes: Any
) -> PreparedPipeline:
    around = DeviceContext(torch.device("cpu"), CopyRate(), on_fatal=lambda error, say: say())
    options = SlotOptions("s", "painter", folder, Path("/unused"), **changes)
    return prepare(options, descriptor, around, Opening(cancelled or threading.Event()))


def asked(made: PreparedPipeline, kind: str, said: dict[str, Any], seeds: tuple[int, ...] = (7,)) -> ImageJob:
    """Submit a job."""
    job = ImageJob(ImageRequest(kind, said, list(seeds)))
    made.engine.submit(job)
    return job


def pictures(job: ImageJob) -> list[Any]:
    """The pictures of one job as arrays. Raises its error."""
    return [numpy.asarray(Image.open(io.BytesIO(file))) for file in job.done.result(WAIT_S)]


@contextlib.contextmanager
def awake(folder: Path, descriptor: int, **changes: Any) -> Iterator[PreparedPipeline]:
    made = prepared(folder, descriptor, **changes)
    made.weights.wake()
    made.engine.on_wake()
    try:
        yield made
    finally:
        made.engine.on_sleep()
        made.weights.sleep()
        made.close()


def is_same(one: Any, other: Any) -> bool:
    """True for equal pictures: sums in another order, by other threads, may differ in the last bit of a colour."""
    return one.shape == other.shape and int(numpy.abs(one.astype(int) - other.astype(int)).max()) <= 1


def plain(folder: Path, said: dict[str, Any], auto: Any = diffusers.DiffusionPipeline, **how: Any) -> Any:
    """What diffusers makes of it, without any of our code."""
    pipeline = auto.from_pretrained(folder, **how)
    with torch.no_grad():
        return numpy.asarray(pipeline(**said, generator=torch.Generator("cpu").manual_seed(7)).images[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_that_of_plain_diffusers(folders: Path, kind: str, descriptor: int) -> None:
    with awake(folders / kind, descriptor) as made:
        assert made.read_bytes > 0
        (picture,) = pictures(asked(made, "text", ARGUMENTS))
    assert picture.shape == (48, 64, 3)
    assert is_same(picture, plain(folders / kind, ARGUMENTS))


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_that_of_plain_diffusers(folders: Path, kind: str, descriptor: int) -> None:
    sent = Image.effect_mandelbrot((64, 48), (-2, -1, 1, 1), 50).convert("RGB")
    mask = Image.new("L", (64, 48))
    mask.paste(255, (0, 0, 32, 48))
    said: dict[str, Any] = {**ARGUMENTS, "image": sent, "strength": 0.7}
    with awake(folders / kind, descriptor) as made:
        (painted,) = pictures(asked(made, "inpaint", {**said, "mask_image": mask}))
        if kind == "sdxl":
            # This one takes the size of the picture.
            del said["width"], said["height"]
        (changed,) = pictures(asked(made, "image", said))
    wanted = {**ARGUMENTS, "image": sent, "strength": 0.7, "mask_image": mask}
    assert is_same(painted, plain(folders / kind, wanted, diffusers.AutoPipelineForInpainting))
    assert is_same(changed, plain(folders / kind, said, diffusers.AutoPipelineForImage2Image))


def test_the_nth_picture_is_that_of_the_nth_seed(folders: Path, descriptor: int) -> None:
    with awake(folders / "flux", descriptor) as made:
        both = pictures(asked(made, "text", ARGUMENTS, (7, 8)))
        (second,) = pictures(asked(made, "text", ARGUMENTS, (8,)))
        assert is_same(both[1], second) and not is_same(both[0], second)


def test_a_filled_arena_is_adopted_without_reading(folders: Path, descriptor: int) -> None:
    with awake(folders / "sdxl", descriptor) as made:
        first = pictures(asked(made, "text", ARGUMENTS))
    with awake(folders / "sdxl", descriptor, filled=True) as made:
        assert made.read_bytes == 0
        assert is_same(pictures(asked(made, "text", ARGUMENTS))[0], first[0])


def test_a_component_that_a_pipeline_converts_is_back_in_the_arena_afterwards(tmp_path: Path, descriptor: int) -> None:
    """SDXL decodes in float32 and leaves its decoder in memory of its own."""
    folder = make_pipeline(tmp_path / "half", "sdxl", dtype=torch.float16, variant="fp16")
    with awake(folder, descriptor) as made:
        first = pictures(asked(made, "text", SMALL))
        flat = made.weights.parts[0].arena.tensor
        outside = [
            name
            for name, tensor in made.weights.module.state_dict().items()
            if not 0 <= tensor.data_ptr() - flat.data_ptr() < flat.numel()
        ]
        assert not outside
        assert made.weights.module.vae.dtype == torch.float16
        assert is_same(pictures(asked(made, "text", SMALL))[0], first[0])
    assert is_same(first[0], plain(folder, SMALL, dtype=torch.float16, variant="fp16"))


def test_weights_without_a_plan_are_diffusers(
    tmp_path: Path, descriptor: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_pipeline(tmp_path / "half", "flux", dtype=torch.float16)
    with caplog.at_level("INFO"), awake(folder, descriptor) as made:
        (picture,) = pictures(asked(made, "text", SMALL))
    # T5 keeps some of its weights in float32.
    assert "weights are loaded by diffusers" in caplog.text
    assert is_same(picture, plain(folder, SMALL, dtype=torch.float16))


def test_progress_is_told_and_a_cancelled_job_ends_within_a_step(folders: Path, descriptor: int) -> None:
    with awake(folders / "sdxl", descriptor) as made:
        job = asked(made, "text", {**ARGUMENTS, "num_inference_steps": 1_000}, (1, 2))
        until_now(lambda: 0 < job.progress < 0.5, "progress", WAIT_S)
        assert made.engine.in_flight == 1
        made.engine.cancel(job)
        with pytest.raises(WorkCancelled):
            pictures(job)
        assert len(pictures(asked(made, "text", ARGUMENTS))) == 1
        until_now(lambda: made.engine.in_flight == 0, "the end", WAIT_S)


def test_sleep_ends_what_is_made_and_what_waits(folders: Path, descriptor: int) -> None:
    with awake(folders / "sdxl", descriptor) as made:
        running = asked(made, "text", {**ARGUMENTS, "num_inference_steps": 1_000})
        waiting = asked(made, "text", ARGUMENTS)
        until_now(lambda: running.progress > 0, "progress", WAIT_S)
        made.engine.on_sleep()
        for one in (running, waiting):
            with pytest.raises(Failure):
                pictures(one)
        assert made.engine.in_flight == 0


def test_what_a_pipeline_refuses_is_an_error_and_the_next_picture_is_made(folders: Path, descriptor: int) -> None:
    with awake(folders / "sdxl", descriptor) as made:
        with pytest.raises(Failure):
            pictures(asked(made, "text", {**ARGUMENTS, "width": 63}))
        assert len(pictures(asked(made, "text", ARGUMENTS))) == 1


def change_index(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def pickled(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "unet" / "diffusion_pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (lambda folder: (folder / "model_index.json").unlink(), "no pipeline of diffusers"),
    "no JSON": (lambda folder: (folder / "model_index.json").write_text("{"), "is not JSON"),
    "a list": (lambda folder: (folder / "model_index.json").write_text("[]"), "no JSON object"),
    "nothing in it": (lambda folder: (folder / "model_index.json").write_text('{"_class_name": "X"}'), "no component"),
    "a missing component": (lambda folder: shutil.rmtree(folder / "vae"), "there is no folder"),
    "a component elsewhere": (lambda folder: change_index(folder, **{"../x": ["diffusers", "X"]}), "names no package"),
    "a package elsewhere": (lambda folder: change_index(folder, unet=["../evil", "X"]), "cannot be one"),
    "a class elsewhere": (lambda folder: change_index(folder, unet=["diffusers", "a.b"]), "cannot be one"),
    "no words": (lambda folder: change_index(folder, unet=[1, 2]), "names no package"),
    "an unknown class": (lambda folder: change_index(folder, unet=["diffusers", "Nothing"]), "does not have"),
    "an unknown pipeline": (lambda folder: change_index(folder, _class_name="NoPipeline"), "does not have"),
    "a pickle": (pickled, "a pickle"),
    "no weights": (lambda folder: (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink(), "has no weights"),
    "half a file": (
        lambda folder: os.truncate(folder / "unet" / "diffusion_pytorch_model.safetensors", 1_000),
        "safetensors file",
    ),
    "code": (lambda folder: (folder / "unet" / "mine.py").write_text(""), "code of its own"),
    "a pipeline of its own": (lambda folder: change_index(folder, _class_name=["mine", "Mine"]), "brings the code"),
    "no settings": (lambda folder: (folder / "unet" / "config.json").write_text("[]"), "diffusers cannot load"),
    "another shape": (
        lambda folder: shutil.copy(
            folder / "vae" / "diffusion_pytorch_model.safetensors",
            folder / "unet" / "diffusion_pytorch_model.safetensors",
        ),
        "lacks .* weights of UNet2DConditionModel",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_folder_is_called_bad_and_leaves_nothing(
    folders: Path, tmp_path: Path, name: str, descriptor: int
) -> None:
    folder = shutil.copytree(folders / "sdxl", tmp_path / "broken")
    spoil, says = BROKEN[name]
    spoil(folder)
    with pytest.raises(BadModel, match=says):
        prepared(folder, descriptor)
    assert os.fstat(descriptor).st_size == 0


def test_a_load_that_is_not_wanted_any_more_leaves_nothing(folders: Path, descriptor: int) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(WorkCancelled):
        prepared(folders / "sdxl", descriptor, cancelled)
    assert os.fstat(descriptor).st_size == 0


def test_a_pipeline_without_a_thread_leaves_nothing(
    folders: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name.startswith("model-"):
            raise RuntimeError("can't start new thread")
        start(self)

    closed: list[object] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(BorrowedArena, "close", lambda self: closed.append(self))
    with pytest.raises(RuntimeError, match="new thread"):
        prepared(folders / "sdxl", descriptor)
    assert len(closed) == 1, "its memory on the device is given back"


def test_what_a_picture_held_is_free_before_emptying(
    folders: Path, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Large:
        pass

    class Greedy:
        def __call__(self, **said: Any) -> None:
            held = Large()
            held.itself = held  # type: ignore[attr-defined]
            alive.append(weakref.ref(held))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    alive: list[weakref.ref[Large]] = []
    is_freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: is_freed.append(alive[0]() is None))
    # What is logged is kept by pytest, with the frames of its error.
    monkeypatch.setattr(image_engine.log, "exception", lambda text: None)
    made = prepared(folders / "sdxl", descriptor)
    greedy = ImageEngine({"text": Greedy()}, made.weights, on_fatal=lambda error, say: None, name="greedy")
    try:
        greedy.on_wake()
        job = ImageJob(ImageRequest("text", {}, [7]))
        greedy.submit(job)
        with pytest.raises(OutOfMemory):
            pictures(job)
        assert is_freed == [True]
    finally:
        greedy.close()
        made.close()
