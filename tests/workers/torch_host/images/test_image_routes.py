"""The images API of a pipeline, asked by the official client and by clients that mean no good."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy
import openai
import pytest
import torch
from PIL import Image

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.serving.forms import Form
from greenroom.workers.torch_host.control.resources import DeviceContext
from greenroom.workers.torch_host.control.slot_options import Opening, SlotOptions
from greenroom.workers.torch_host.images.image_fields import PIXELS_MAX, read_edit, read_generation
from greenroom.workers.torch_host.images.image_routes import serve_images
from greenroom.workers.torch_host.images.preparing import PreparedPipeline, prepare
from greenroom.workers.torch_host.weights.upload import CopyRate
from tests.waiting import until
from tests.workers.torch_host.samples.tiny_pipelines import make_pipeline

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ASKED = {"prompt": "a cat", "size": "64x48", "num_inference_steps": 2, "seed": 7}
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_pipeline(tmp_path_factory.mktemp("pipelines") / "sdxl", "sdxl")
    around = DeviceContext(torch.device("cpu"), CopyRate(), on_fatal=lambda error, say: say())
    memory = os.memfd_create("arena")
    options = SlotOptions("s", "painter", folder, Path("/unused"), threads=1)
    found = prepare(options, memory, around, Opening())
    found.weights.wake()
    found.engine.on_wake()
    yield found
    found.engine.on_sleep()
    found.close()
    os.close(memory)


@pytest.fixture
async def http(made: PreparedPipeline, socket_folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    served = await serve_images(socket_folder / "s", made.engine, "painter")
    transport = httpx2.AsyncHTTPTransport(uds=str(socket_folder / "s"), verify=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://model", timeout=60) as client:
        yield client
    await served.close()


@pytest.fixture
def client(http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://model/v1", http_client=http, max_retries=0)


def picture(data: str | None) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data or "")))


def file(mode: str = "RGB", size: tuple[int, int] = (64, 48), form: str = "PNG", colour: Any = 0) -> bytes:
    target = io.BytesIO()
    Image.new(mode, size, colour).save(target, format=form)
    return target.getvalue()


async def test_the_official_client_gets_pictures_and_a_seed_gives_the_same_again(client: openai.AsyncOpenAI) -> None:
    how: dict[str, Any] = {"num_inference_steps": 2, "seed": 7, "negative_prompt": "a dog", "guidance_scale": 3.5}

    async def generated(n: int) -> list[Image.Image]:
        answer = await client.images.generate(
            model="x", prompt="a cat", n=n, response_format="b64_json", extra_body={**how, "size": "64x64"}
        )
        return [picture(one.b64_json) for one in answer.data or ()]

    two, (one,) = await generated(2), await generated(1)
    assert [image.size for image in two] == [(64, 64)] * 2 and two[0].format == "PNG"
    assert numpy.array_equal(two[0], one) and not numpy.array_equal(two[1], one)


async def test_the_official_client_edits_whole_pictures_and_parts(client: openai.AsyncOpenAI) -> None:
    how: dict[str, Any] = {"num_inference_steps": 4, "seed": 7, "strength": 0.5}
    mask = Image.new("RGBA", (64, 48), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 32, 48))
    target = io.BytesIO()
    mask.save(target, format="PNG")
    for extra in ({}, {"mask": ("m.png", target.getvalue())}):
        answer = await client.images.edit(
            model="x", image=("i.png", file(colour=(200, 10, 10))), prompt="a cat", extra_body=how, **extra
        )
        assert picture((answer.data or [])[0].b64_json).size == (64, 48)


@pytest.mark.parametrize("steps", [1, 2, 49])
async def test_the_weakest_edit_does_one_step(http: httpx2.AsyncClient, steps: int) -> None:
    asked = {"prompt": "a cat", "num_inference_steps": str(steps), "strength": "0.01"}
    answer = await http.post(EDITS, data=asked, files={"image": ("i.png", file(size=(16, 16)))})
    assert answer.status_code == 200, answer.text
    assert picture(answer.json()["data"][0]["b64_json"]).size == (16, 16)


@pytest.mark.parametrize(("format", "name"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
async def test_pictures_come_in_the_wanted_format(http: httpx2.AsyncClient, format: str, name: str) -> None:
    answer = await http.post(GENERATIONS, json={**ASKED, "output_format": format, "output_compression": 50})
    assert answer.headers["x-pictures"] == "1"
    assert answer.json()["output_format"] == format
    assert picture(answer.json()["data"][0]["b64_json"]).format == name


async def test_quality_is_a_number_of_steps(http: httpx2.AsyncClient, made: PreparedPipeline) -> None:
    def steps(**said: Any) -> int:
        return int(read_generation(made.engine.pipelines, {"prompt": "x", **said}).arguments["num_inference_steps"])

    assert [steps(quality=one) for one in ("low", "standard", "hd")] == [25, 50, 75]
    assert steps(quality="hd", num_inference_steps=3) == 3


def test_a_pipeline_without_steps_is_given_none_and_asked_for_none() -> None:
    class Stepless:
        def __call__(self, prompt: str, width: int | None = None, height: int | None = None) -> None: ...

    pipelines = {"text": Stepless()}
    assert "num_inference_steps" not in read_generation(pipelines, {"prompt": "x"}).arguments
    with pytest.raises(ApiError, match="has no num_inference_steps"):
        read_generation(pipelines, {"prompt": "x", "num_inference_steps": 3})


@pytest.mark.parametrize(
    ("sent", "made_of"),
    [
        ((8_000, 1), (8_000, 16)),
        ((1, 2_000_000), (16, 524_288)),
        ((2_000_000, 1), (524_288, 16)),
        ((100, 50), (96, 48)),
    ],
)
def test_an_edit_has_as_many_pixels_as_a_new_picture_may_have(sent: tuple[int, int], made_of: tuple[int, int]) -> None:
    class Pipeline:
        vae_scale_factor = 8

        def __call__(self, prompt: str, image: Any = None, width: int = 0, height: int = 0) -> None: ...

    form = Form({"prompt": "a cat"}, {}, {"image": [memoryview(file(size=sent))]})
    asked = read_edit({"text": Pipeline()}, form)
    assert (asked.arguments["width"], asked.arguments["height"]) == asked.arguments["image"].size == made_of
    assert made_of[0] * made_of[1] <= PIXELS_MAX


async def test_progress_of_a_picture_is_told_and_leaving_ends_it(
    http: httpx2.AsyncClient, made: PreparedPipeline
) -> None:
    asked = asyncio.create_task(
        http.post(GENERATIONS, json={**ASKED, "num_inference_steps": 1_000}, headers={"X-Request-Id": "r 1"})
    )

    async def progress() -> float | None:
        return (await http.get("/progress", params={"request": "r 1"})).json()["progress"]

    await until(progress, "progress")
    asked.cancel()
    await until(lambda: made.engine.in_flight == 0, "the end")
    assert await progress() is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": None}, "prompt must be a string"),
        ({"prompt": " "}, "prompt must not be empty"),
        ({"prompt": "a" * 32_001}, "at most 32,000"),
        ({"n": 10**9}, "n must be between 1 and 10"),
        ({"n": 0}, "n must be between"),
        ({"size": "30000x30000"}, "8,388,608 pixels"),
        ({"size": "8x8"}, "from 16x16"),
        ({"size": "65x64"}, "multiples of 2"),
        ({"size": "big"}, "WIDTHxHEIGHT"),
        ({"size": [1]}, "WIDTHxHEIGHT"),
        ({"num_inference_steps": 1_001}, "between 1 and 1000"),
        ({"guidance_scale": "high"}, "guidance_scale must be a number"),
        ({"quality": "best"}, "quality must be one of"),
        ({"seed": -1}, "seed must be between"),
        ({"response_format": "url"}, "made by the gateway"),
        ({"stream": True}, "not streamed"),
        ({"output_format": "gif"}, "output_format must be one of"),
        ({"negative_prompt": 3}, "negative_prompt must be a string"),
        ({"true_cfg_scale": 3}, "has no true_cfg_scale"),
        ({"strength": 0.5}, "has no strength"),
    ],
)
async def test_a_bad_field_is_named(http: httpx2.AsyncClient, changes: dict[str, Any], says: str) -> None:
    answer = await http.post(GENERATIONS, json={**ASKED, **changes})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"] == next(iter(changes))


def bomb() -> bytes:
    """A few bytes whose header claims 30,000 × 30,000 pixels. To write them all would take seconds."""
    small = file("1", (8, 8))
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + small[24:29]
    return small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:]


BAD_EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({}, "image is missing"),
    "two images": ({"image": [b"1", b"2"]}, "sent 2 times"),
    "no picture": ({"image": [b"hello"]}, "no picture in PNG"),
    "nothing": ({"image": [b""]}, "no picture in PNG"),
    "half a picture": ({"image": [file(size=(640, 480))[:60]]}, "no picture in PNG"),
    "a GIF": ({"image": [file(form="GIF")]}, "no picture in PNG"),
    "far too large": ({"image": [bomb()]}, "67,108,864 pixels"),
    "a mask that hides nothing": ({"image": [file()], "mask": [file()]}, "no alpha channel"),
    "a mask of another size": ({"image": [file()], "mask": [file("RGBA", (8, 8))]}, "size of image"),
}


@pytest.mark.parametrize("name", BAD_EDITS)
async def test_a_bad_file_is_named(http: httpx2.AsyncClient, name: str) -> None:
    files, says = BAD_EDITS[name]
    sent = [(field, ("name.png", content)) for field, contents in files.items() for content in contents]
    answer = await http.post(EDITS, data={"prompt": "a cat"}, files=sent or [("other", ("a", b"b"))])
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


async def test_other_paths_and_methods_are_refused(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/v1/models")).json()["data"][0]["id"] == "painter"
    assert (await http.get(GENERATIONS)).status_code == 405
    assert (await http.post("/health")).status_code == 405
    assert (await http.post("/v1/chat/completions", json={})).status_code == 404
    assert (await http.post(EDITS, json=ASKED)).status_code == 415
    varied = await http.post("/v1/images/variations", json=ASKED)
    assert (varied.status_code, varied.json()["error"]["code"]) == (400, "unsupported")
