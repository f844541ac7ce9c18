"""Text to speech through the gateway: the example with a real espeak-ng, asked by the official client."""

from __future__ import annotations

import io
import shutil
import sys
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway
from tests.integration.raw import http
from tests.later import Later

openai = Later("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVER = Path(__file__).parents[3] / "examples" / "speech" / "espeak_server.py"
TEXT = "The room is ready, and everyone may come in."


def speaking(**keys: Any) -> dict[str, Any]:
    return {"cmd": [sys.executable, str(SERVER), "${PORT}"], "category": "speech", "memory_mib": 50, **keys}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    assert shutil.which("espeak-ng"), "there is no espeak-ng; type `make setup`, or as root: apt-get install espeak-ng"
    async with gateway(tmp_path_factory.mktemp("speech"), {"voice": speaking()}) as app:
        yield app


async def wav(client: openai.AsyncOpenAI, text: str = TEXT, **more: Any) -> tuple[float, bytes]:
    """How long it speaks, and its samples."""
    answer = await client.audio.speech.create(
        model="voice", input=text, response_format="wav", **{"voice": "alloy", **more}
    )
    with wave.open(io.BytesIO(answer.read())) as file:
        samples = file.readframes(file.getnframes())
        return file.getnframes() / file.getframerate(), samples


async def test_text_is_spoken_and_a_longer_one_takes_longer(client: openai.AsyncOpenAI) -> None:
    short, _ = await wav(client, "Yes.")
    long, samples = await wav(client)
    assert 0.2 < short < long < 10
    assert len(set(samples)) > 100, "there is a sound in it"


async def test_speed_and_voice_are_heard(client: openai.AsyncOpenAI) -> None:
    usual, said = await wav(client)
    fast, _ = await wav(client, speed=2.0)
    slow, _ = await wav(client, speed=0.5)
    assert fast < usual < slow
    assert (await wav(client, voice="de"))[1] != said != (await wav(client, voice="nova"))[1]


async def test_pcm_has_the_rate_that_clients_play_it_with(app: App, client: openai.AsyncOpenAI) -> None:
    length_s, _ = await wav(client)
    body = {"model": "voice", "input": TEXT, "voice": "alloy", "response_format": "pcm"}
    answer = await http(app, "POST", "/v1/audio/speech", body)
    assert answer.headers["content-type"] == "audio/pcm"
    assert len(answer.body) / 2 / 24_000 == pytest.approx(length_s, abs=0.01)
    assert float(answer.headers["x-audio-seconds"]) == pytest.approx(length_s, abs=0.01)


async def test_text_is_never_a_command(client: openai.AsyncOpenAI) -> None:
    for text in ("; touch /tmp/x", "--voices", "-w /etc/x", "$(id)", "日本語 \x00 é"):
        assert (await wav(client, text))[0] > 0


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"response_format": "mp3"}, "response_format"),
        ({"response_format": ["wav"]}, "response_format"),
        ({"voice": "../../etc/passwd"}, "voice"),
        ({"voice": 7}, "voice"),
        ({"speed": 9}, "speed"),
        ({"speed": "fast"}, "speed"),
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": "x" * 5000}, "input"),
    ],
)
async def test_wrong_input_is_refused_by_the_name_of_its_field(
    client: openai.AsyncOpenAI, wrong: dict[str, Any], param: str
) -> None:
    asked: dict[str, Any] = {"voice": "alloy", "input": TEXT, "response_format": "wav"}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.audio.speech.create(model="voice", **{**asked, **wrong})
    assert refused.value.param == param


async def test_what_is_said_is_counted_in_seconds(app: App, client: openai.AsyncOpenAI) -> None:
    before_s = await spoken_s(app)
    length_s, _ = await wav(client)
    assert await spoken_s(app) - before_s == pytest.approx(length_s, abs=0.01), "an answer's length is told in ms"


async def spoken_s(app: App) -> float:
    text = (await http(app, "GET", "/metrics")).body.decode()
    sums = (line for line in text.splitlines() if line.startswith("greenroom_audio_seconds_sum"))
    return sum(float(line.rpartition(" ")[2]) for line in sums if 'route="speech"' in line)
