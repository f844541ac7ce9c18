"""Pictures by diffusers through a running gateway, asked for with the official client, as jobs, and beside a writer."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.harness import gateway, url
from tests.integration import facts
from tests.integration.jobs.test_jobs import post
from tests.integration.raw import http
from tests.integration.transformers.facts import says
from tests.models import tiny_hf, tiny_pipelines
from tests.torch_python import hosted, painter
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOW: dict[str, Any] = {"num_inference_steps": 2, "seed": 7}
# There is memory for one of them at a time.
BUDGET_MIB = 350


def png(width: int, height: int) -> bytes:
    """A picture of one colour, written without any library."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xc8\x20\x20" * width) * height
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def size_of(picture: bytes) -> tuple[int, int]:
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    painting = painter(tiny_pipelines("sdxl", "flux", "sd3") / "sdxl", memory_mib=200)
    models = {"painter": painting, "writer": hosted(tiny_hf("writer"), memory_mib=200)}
    async with gateway(tmp_path_factory.mktemp("images"), models, budget_mib=BUDGET_MIB) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(app: App) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url(app)}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


async def test_the_official_client_generates_pictures_as_files_and_as_urls(app: App, client: AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": "painter", "prompt": "a cat", "extra_body": {**HOW, "size": "64x64"}}
    coded = await client.images.generate(**ask, n=2, response_format="b64_json")
    pictures = [base64.b64decode(one.b64_json or "") for one in coded.data or ()]
    assert [size_of(one) for one in pictures] == [(64, 64)] * 2 and pictures[0] != pictures[1]
    linked = await client.images.generate(**ask, response_format="url")
    (address,) = [one.url for one in linked.data or ()]
    assert address is not None
    answer = await http(app, "GET", address.removeprefix(url(app)))
    assert (answer.headers["content-type"], answer.body) == ("image/png", pictures[0])


async def test_the_official_client_edits_a_picture(client: AsyncOpenAI) -> None:
    ask: dict[str, Any] = {"model": "painter", "prompt": "a cat", "extra_body": {**HOW, "strength": 0.6}}
    answer = await client.images.edit(image=io.BytesIO(png(64, 48)), **ask)
    assert size_of(base64.b64decode((answer.data or [])[0].b64_json or "")) == (64, 48)


async def test_a_job_tells_how_far_it_is_by_the_steps_that_are_done(app: App) -> None:
    body = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": 100}
    job = (await post(app, "/v1/jobs", {"route": "/v1/images/generations", "body": body})).json()["id"]
    seen: list[float] = []

    async def is_over() -> bool:
        view = (await http(app, "GET", f"/v1/jobs/{job}")).json()
        if view["status"] == "running" and view["progress"] is not None:
            seen.append(view["progress"])
        return view["status"] == "done"

    await until(is_over, "the end of the job", every_s=0.05)
    assert seen == sorted(seen) and any(0 < share < 1 for share in seen), seen


async def test_a_pipeline_and_a_writer_take_turns_in_workers_of_their_own(app: App, client: AsyncOpenAI) -> None:
    async def painted() -> str:
        ask = {"model": "painter", "prompt": "a cat", "size": "64x64", **HOW}
        answer = await http(app, "POST", "/v1/images/generations", ask)
        assert answer.status == 200, answer.body
        return str(answer.json()["data"][0]["b64_json"])

    first, pids = await painted(), set()
    for _ in range(3):
        assert "writer" in await says(app, "writer")
        pids.add(await facts.pid_of(app, "writer"))
        assert (await facts.view(app, "painter"))["tier"] == "asleep"
        assert await painted() == first
        pids.add(await facts.pid_of(app, "painter"))
    assert len(pids) == 2, "each program has one worker, which lives on"


async def test_a_pipeline_over_two_budgets_paints_the_same_after_sleep(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Without GPUs its worker computes on the host, whatever the map of devices says; the plan is for both."""
    models = {"painter": painter(tiny_pipelines("sdxl", "flux", "sd3") / "sdxl", devices=["gpu0", "gpu1"])}
    two = [{"memory_mib": 9_000}, {"memory_mib": 9_000}]
    async with gateway(tmp_path_factory.mktemp("spread"), models, gpus=two) as app:
        ask = {"model": "painter", "prompt": "a cat", "size": "64x64", "response_format": "b64_json", **HOW}
        pictures = []
        for _ in range(2):
            answer = await http(app, "POST", "/v1/images/generations", ask)
            assert answer.status == 200, answer.body
            pictures.append(answer.json()["data"][0]["b64_json"])
            (slot,) = app.loop.scheduler.state.slots_of(ModelId("painter"))
            assert {"gpu0", "gpu1"} <= app.loop.scheduler.state.ledger.held_by(slot.id).keys()
            await app.operations.move(MoveKind.SLEEP, ModelId("painter"))
            assert app.loop.scheduler.state.ledger.held_by(slot.id).keys() == {"host"}
        assert pictures[0] == pictures[1]
