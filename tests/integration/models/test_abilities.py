"""Routes for images and sound, and that a model without the ability is refused before it is loaded."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.harness import fake, gateway
from tests.integration.facts import Journal
from tests.integration.raw import http
from tests.later import Later

openai = Later("openai")

# The package calls two routes deprecated, of the models that OpenAI has.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),
]

WAV = ("a.wav", io.BytesIO(b"RIFF"), "audio/wav")
PNG = ("a.png", io.BytesIO(b"PNG"), "image/png")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    models = {
        "anything": fake("anything"),
        "painter": fake("painter", category="diffusion"),
        "ear": fake("ear", category="transcription"),
        "mouth": fake("mouth", category="speech"),
        "eye": fake("eye", abilities=["chat", "vision"], category="diffusion"),
    }
    async with gateway(tmp_path_factory.mktemp("abilities"), models) as app:
        yield app


async def ask(client: openai.AsyncOpenAI, route: str, model: str) -> Any:
    match route:
        case "chat":
            return await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        case "completions":
            return await client.completions.create(model=model, prompt="hi")
        case "embeddings":
            return await client.embeddings.create(model=model, input="hi")
        case "images":
            return await client.images.generate(model=model, prompt="a pixel", n=2)
        case "edits":
            return await client.images.edit(model=model, prompt="greener", image=PNG)
        case "variations":
            return await client.images.create_variation(model=model, image=PNG)
        case "transcriptions":
            return await client.audio.transcriptions.create(model=model, file=WAV)
        case "translations":
            return await client.audio.translations.create(model=model, file=WAV)
        case _:
            return await client.audio.speech.create(model=model, input="hello", voice="alloy")


ROUTES = (
    "chat",
    "completions",
    "embeddings",
    "images",
    "edits",
    "variations",
    "transcriptions",
    "translations",
    "speech",
)
CAN = {
    "painter": {"images", "edits", "variations"},
    "ear": {"transcriptions", "translations"},
    "mouth": {"speech"},
    "eye": {"chat"},
}


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_reaches_a_model_of_which_nothing_is_known(client: openai.AsyncOpenAI, route: str) -> None:
    await ask(client, route, "anything")


async def test_pictures_text_and_sound_come_back_as_the_engine_sent_them(client: openai.AsyncOpenAI) -> None:
    pictures = await ask(client, "images", "painter")
    assert [one.b64_json for one in pictures.data] == ["iVBORw0KGgo="] * 2
    assert (await ask(client, "transcriptions", "ear")).text == "ear heard"
    spoken = await ask(client, "speech", "mouth")
    assert spoken.content == b"RIFF mouth: hello" and spoken.response.headers["content-type"] == "audio/wav"


@pytest.mark.parametrize(("model", "route"), [(model, route) for model in CAN for route in ROUTES])
async def test_a_route_without_the_ability_for_it_is_refused_and_loads_nothing(
    app: App, client: openai.AsyncOpenAI, model: str, route: str
) -> None:
    if route in CAN[model]:
        await ask(client, route, model)
        return
    await app.operations.move(MoveKind.UNLOAD, ModelId(model))
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(client, route, model)
    assert (refused.value.code, refused.value.param) == ("unsupported", "model")
    assert f"{model} does not do" in refused.value.message
    assert not app.loop.scheduler.state.slots_of(ModelId(model))


async def test_a_stream_of_pictures_is_not_asked_for_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("stream")
    journal = Journal(folder)
    async with gateway(folder, {"painter": fake("painter", *journal.switches, "--record")}) as app:
        body = {"model": "painter", "prompt": "a pixel", "stream": True}
        assert (await http(app, "POST", "/v1/images/generations", body)).status == 200
        (line,) = journal.lines("request", path="/v1/images/generations")
        assert "stream_options" not in line["body"]


async def test_abilities_are_shown(app: App) -> None:
    cards = {card["id"]: card["capabilities"] for card in (await http(app, "GET", "/v1/models")).json()["data"]}
    status = (await http(app, "GET", "/api/v1/status")).json()["models"]
    assert cards == {model["id"]: model["capabilities"] for model in status}
    assert cards == {
        "anything": None,
        "painter": ["image_edits", "images"],
        "ear": ["transcription", "translation"],
        "mouth": ["speech"],
        "eye": ["chat", "vision"],
    }
