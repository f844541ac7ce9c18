"""Pipelines that no single GPU can hold, on two GPUs that a file describes: placed, asleep, awake, lost, refused."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import Claim, MoveKind, Tier
from greenroom.runtime.memory.devices import HOST
from tests.integration.hosted.test_hosted_on_gpus import A, B, on, seen, slot_of
from tests.integration.hosted_rig import Folder, move, nothing_left, until_in, worker_of
from tests.integration.raw import http
from tests.standins import fake_gpu
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]
__all__ = ["nothing_left"]

MIB = 2**20


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With what is set aside, a GPU has 3,688 MiB for models."""
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu(A, 5_000), fake_gpu.gpu(B, 5_000))
    monkeypatch.setenv("CUDA_FAKE_GPUS", str(file))
    return file


class Pipeline(Folder):
    """A pipeline of which only the headers are there; `sizes_mib` are those of its components."""

    def __init__(self, base: Path, name: str, sizes_mib: dict[str, int], **conduct: Any) -> None:
        super().__init__(base, name, **conduct)
        index = {"_class_name": "FluxPipeline", **{part: ["diffusers", "X"] for part in sizes_mib}}
        (self.path / "model_index.json").write_text(json.dumps(index))
        for part, size_mib in sizes_mib.items():
            (self.path / part).mkdir()
            _sparse(self.path / part / "diffusion_pytorch_model.safetensors", size_mib * MIB)

    def model(self, **keys: Any) -> dict[str, Any]:
        said = super().model(engine="diffusers", **keys)
        return {key: value for key, value in said.items() if key != "memory_mib"}


def _sparse(file: Path, size: int) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + size)


def held(app: App, model: str) -> Claim:
    return app.loop.scheduler.state.ledger.held_by(slot_of(app, model))


async def test_a_pipeline_too_large_for_one_gpu_is_spread_sleeps_and_wakes_on_both(gpus: Path) -> None:
    folder = Pipeline(gpus.parent, "flux", {"transformer": 1_500, "text_encoder": 1_300, "vae": 100}, mib=2_400)
    async with on(gpus, {"flux": folder.model()}) as app:
        await move(app, MoveKind.LOAD, "flux")
        (opened,) = folder.lines("open")
        assert opened["gpus"] == f"{A},{B}"
        places = opened["options"]["device_map"]
        assert places["transformer"] != places["text_encoder"] == places["vae"]
        claim = held(app, "flux")
        # Beside its components each has what one would need to compute, and more because it is spread.
        with_decoder, other = (claim[gpu] for gpu in ((A, B) if places["vae"] == 0 else (B, A)))
        assert other - with_decoder == 100 and other > 1_500 + 1_024
        assert sum(claim[gpu] for gpu in (A, B)) <= 2 * 3_688 and claim[HOST] >= 2_900
        await until(lambda: (seen(app, "flux", A), seen(app, "flux", B)) == (1_200, 1_200), "it is seen on both")
        for _ in range(2):
            await move(app, MoveKind.SLEEP, "flux")
            assert held(app, "flux").keys() == {HOST}
            await until(lambda: not seen(app, "flux", A) and not seen(app, "flux", B), "both are free")
            await move(app, MoveKind.LOAD, "flux")
            assert {gpu: held(app, "flux")[gpu] for gpu in (A, B)} == {gpu: claim[gpu] for gpu in (A, B)}
        assert folder.events() == ["open", "wake", "sleep", "wake", "sleep", "wake"]


async def test_it_takes_turns_with_models_of_one_gpu_which_have_workers_of_their_own(gpus: Path) -> None:
    wide = Pipeline(gpus.parent, "wide", {"transformer": 1_500, "text_encoder": 1_300}, mib=2_400)
    small = Folder(gpus.parent, "small", mib=2_000)
    models = {"wide": wide.model(), "small": small.model(memory_mib=2_000, devices=["gpu1"])}
    async with on(gpus, models) as app:
        for _ in range(2):
            for name, other in (("wide", "small"), ("small", "wide")):
                await move(app, MoveKind.LOAD, name)
                await until(lambda other=other: other not in _ready(app), f"{other} has left")  # type: ignore[misc]
        assert {line["event"] for line in wide.lines()} == {"open", "wake", "sleep"}
        assert worker_of(app, "wide") != worker_of(app, "small")


def _ready(app: App) -> set[str]:
    return {slot.model for slot in app.loop.scheduler.state.slots.values() if slot.tier is Tier.READY}


async def test_two_that_are_spread_alike_share_a_worker_and_a_crash_leaves_both_asleep(gpus: Path) -> None:
    sizes = {"transformer": 1_500, "text_encoder": 1_300}
    folders = {name: Pipeline(gpus.parent, name, sizes, mib=2_000) for name in ("one", "two")}
    async with on(gpus, {name: folder.model() for name, folder in folders.items()}) as app:
        await move(app, MoveKind.LOAD, "one")
        await move(app, MoveKind.LOAD, "two")
        assert worker_of(app, "one") == worker_of(app, "two")
        os.kill(worker_of(app, "two"), signal.SIGKILL)
        await until_in(app, "two", Tier.ASLEEP)
        await until(lambda: not seen(app, "two", A) and not seen(app, "two", B), "both GPUs are free")
        await move(app, MoveKind.LOAD, "two")
        (_, again) = folders["two"].lines("open")
        assert (
            again["filled"]
            and again["options"]["device_map"] == folders["two"].lines("open")[0]["options"]["device_map"]
        )


@pytest.mark.parametrize(
    ("sizes", "keys", "says"),
    [
        (
            {"transformer": 2_900, "vae": 100},
            {},
            r"the largest, transformer, has 2,900 MiB, and every GPU also needs [\d,]+ MiB.*smaller dtype",
        ),
        ({"transformer": 1_500, "a": 1_400, "b": 1_400}, {}, "components stay whole, each on one GPU"),
        ({"transformer": 1_500, "text_encoder": 1_300}, {"device_map": "one"}, "With device_map: balanced"),
    ],
)
async def test_one_too_large_is_refused_with_advice(
    gpus: Path, sizes: dict[str, int], keys: dict[str, Any], says: str
) -> None:
    folder = Pipeline(gpus.parent, "huge", sizes)
    async with on(gpus, {"huge": folder.model(**keys)}) as app:
        answer = await http(app, "POST", "/v1/images/generations", {"model": "huge", "prompt": "a cat"})
        assert answer.status == 503 and answer.error["code"] == "model_too_large", answer.error
        assert re.search(says, answer.error["message"]), answer.error["message"]
        assert folder.events() == []


async def test_one_that_is_prepared_has_its_place_on_both_and_no_memory_there_yet(gpus: Path) -> None:
    folder = Pipeline(gpus.parent, "wide", {"transformer": 1_500, "text_encoder": 1_300}, mib=2_000)
    async with on(gpus, {"wide": folder.model()}) as app:
        await move(app, MoveKind.PREPARE, "wide")
        (opened,) = folder.lines("open")
        assert opened["gpus"] == f"{A},{B}" and set(opened["options"]["device_map"].values()) == {0, 1}
        assert held(app, "wide").keys() == {HOST}
        await move(app, MoveKind.LOAD, "wide")
        assert held(app, "wide").keys() == {A, B, HOST} and folder.events() == ["open", "wake"]


async def test_a_wake_that_ran_out_of_memory_is_tried_again_on_both(gpus: Path) -> None:
    folder = Pipeline(gpus.parent, "wide", {"transformer": 1_500, "text_encoder": 1_300}, mib=2_000)
    folder.behave(mib=2_000, at={"wake": "once fail out_of_memory"})
    async with on(gpus, {"wide": folder.model()}) as app:
        await move(app, MoveKind.LOAD, "wide")
        assert folder.events().count("wake") == 2, "it was tried again with the memory that there is"
        assert held(app, "wide").keys() == {A, B, HOST}
