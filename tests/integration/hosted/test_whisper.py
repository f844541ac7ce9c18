"""Speech to text through the gateway: the official client, every format, wrong input, metrics, and models by size."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from tests.harness import gateway
from tests.integration import facts
from tests.integration.facts import at_rest, over
from tests.integration.raw import Answer, http
from tests.later import Later
from tests.library.hub_cache import folder_files, put
from tests.models import tiny_ears
from tests.samples.sounds import FORM, form, heard, noise
from tests.standins.standin_hub import StandinHub

openai = Later("openai")

# The package calls the models deprecated that OpenAI itself has.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning"),
]

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
SOUND_S = 40.0
SOUND = noise(SOUND_S)
SAID = "alpha speaks alpha speaks"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("whisper")
    models = {
        "alpha": heard(tiny_ears("alpha speaks")),
        "english": heard(tiny_ears("english only", multilingual=False)),
        "missing": {"engine": "whisper", "path": "large", "env": {"HF_HOME": str(folder / "hf")}},
    }
    async with gateway(folder, models) as app:
        yield app


def file(content: bytes = SOUND) -> tuple[str, io.BytesIO, str]:
    return "speech.wav", io.BytesIO(content), "audio/wav"


async def sent(app: App, *files: bytes, path: str = TRANSCRIPTIONS, kind: str = "audio/wav", **fields: str) -> Answer:
    body = form([*{"model": "alpha", **fields}.items()], *files, kind=kind)
    return await http(app, "POST", path, body=body, headers=FORM)


# --- the official client --------------------------------------------------------------------------------------------


async def test_json_has_the_text_and_how_long_the_sound_was(client: openai.AsyncOpenAI) -> None:
    answer = await client.audio.transcriptions.create(model="alpha", file=file())
    assert answer.text == SAID
    assert answer.usage is not None and answer.usage.type == "duration"
    assert answer.usage.seconds == SOUND_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "said"),
    [
        ("text", f"{SAID}\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:01,000\nalpha\n\n2\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nalpha\n\n"),
    ],
)
async def test_formats_that_are_plain_text(client: openai.AsyncOpenAI, format: Any, said: str) -> None:
    answer: Any = await client.audio.transcriptions.create(model="alpha", file=file(), response_format=format)
    assert isinstance(answer, str) and answer.startswith(said)


@pytest.mark.slow
async def test_verbose_json_has_segments_or_words_as_asked(client: openai.AsyncOpenAI) -> None:
    told = await client.audio.transcriptions.create(
        model="alpha", file=file(), response_format="verbose_json", prompt="Names: alpha.", temperature=0.2
    )
    assert (told.language, told.duration, told.text, told.words) == ("english", SOUND_S, SAID, None)
    assert [segment.text for segment in told.segments or ()] == [" alpha", " speaks"] * 2
    assert [segment.start for segment in told.segments or ()] == pytest.approx([0, 1.02, 30, 31.02])
    worded = await client.audio.transcriptions.create(
        model="alpha", file=file(), response_format="verbose_json", timestamp_granularities=["word"], language="de"
    )
    assert worded.segments is None and worded.language == "german"
    assert [word.word for word in worded.words or ()] == ["alpha", "speaks"] * 2
    assert all(0 <= word.start <= word.end <= SOUND_S for word in worded.words or ())


@pytest.mark.slow
async def test_translation(client: openai.AsyncOpenAI) -> None:
    assert (await client.audio.translations.create(model="alpha", file=file())).text == SAID
    told = await client.audio.translations.create(model="alpha", file=file(), response_format="verbose_json")
    assert told.language == "english"
    assert [segment.text for segment in told.segments or ()] == [" alpha", " speaks"] * 2


@pytest.mark.slow
async def test_voices_are_looked_for_where_asked(client: openai.AsyncOpenAI) -> None:
    """Noise has no speech."""
    answer = await client.audio.transcriptions.create(model="alpha", file=file(), extra_body={"vad_filter": True})
    assert answer.text == ""


# --- abilities ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_model_that_knows_english_alone_is_not_asked_to_translate(app: App) -> None:
    cards = {card["id"]: card for card in (await http(app, "GET", "/v1/models")).json()["data"]}
    assert cards["alpha"]["capabilities"] == ["transcription", "translation"]
    assert cards["english"]["capabilities"] == ["transcription"]
    body = form([("model", "english")], SOUND)
    refused = await http(app, "POST", TRANSLATIONS, body=body, headers=FORM)
    assert (refused.status, refused.error["code"]) == (400, "unsupported")
    german = form([("model", "english"), ("language", "de")], SOUND)
    refused = await http(app, "POST", TRANSCRIPTIONS, body=german, headers=FORM)
    assert (refused.status, refused.error["param"]) == (400, "language")
    answer = await http(app, "POST", TRANSCRIPTIONS, body=form([("model", "english")], SOUND), headers=FORM)
    assert answer.json()["text"] == "english only english only"


async def test_size_that_is_not_there_says_how_to_get_it(app: App) -> None:
    answer = await http(app, "POST", TRANSCRIPTIONS, body=form([("model", "missing")], SOUND), headers=FORM)
    assert (answer.status, answer.error["code"]) == (503, "bad_model")
    assert "hf download Systran/faster-whisper-large-v3" in answer.error["message"]


# --- wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "fields", "param"),
    [
        ((b"this is no sound",), {}, "file"),
        ((b"",), {}, "file"),
        ((), {}, "file"),
        ((SOUND, SOUND), {}, "file"),
        ((SOUND,), {"response_format": "srt", "stream": "true"}, "response_format"),
        ((SOUND,), {"temperature": "1.5"}, "temperature"),
        ((SOUND,), {"temperature": "nan"}, "temperature"),
        ((SOUND,), {"temperature": "warm"}, "temperature"),
        ((SOUND,), {"prompt": "x" * 20_000}, "prompt"),
        ((SOUND,), {"timestamp_granularities[]": "letter"}, "timestamp_granularities[]"),
        ((SOUND,), {"timestamp_granularities[]": "word"}, "response_format"),
        ((SOUND,), {"vad_filter": "maybe"}, "vad_filter"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_wrong_input_is_refused_by_the_name_of_its_field(
    app: App, files: tuple[bytes, ...], fields: dict[str, str], param: str
) -> None:
    answer = await sent(app, *files, **fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert (await sent(app, noise(1))).json()["text"] == "alpha speaks"


async def test_huge_prompt_is_too_large(app: App) -> None:
    answer = await sent(app, SOUND, prompt="x" * 300_000)
    assert (answer.status, answer.error["param"]) == (413, "prompt")


@pytest.mark.parametrize("kind", ["text/html", "image/png", "application/x-nonsense"])
async def test_type_that_a_caller_claims_is_not_believed(app: App, kind: str) -> None:
    assert (await sent(app, noise(1), kind=kind)).json()["text"] == "alpha speaks"
    assert (await sent(app, b"<html>", kind="audio/wav")).error["code"] == "invalid_audio"


# --- leaving, and what is counted -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_sound_is_counted_in_seconds_and_by_its_factor(app: App) -> None:
    before, used = await counted(app), await heard_s(app)
    for fields in ({}, {"response_format": "srt"}, {"stream": "true"}):
        assert (await sent(app, SOUND, **fields)).status == 200
    assert (await sent(app, b"no sound")).status == 400
    after = await counted(app)
    name = 'greenroom_audio_seconds_{}{{model="alpha",route="transcriptions"}}'
    assert after[name.format("sum")] - before.get(name.format("sum"), 0) == pytest.approx(3 * SOUND_S)
    assert after[name.format("count")] - before.get(name.format("count"), 0) == 3
    factor = 'greenroom_audio_realtime_factor_sum{model="alpha",route="transcriptions"}'
    assert 0 < after[factor] - before.get(factor, 0) < 3
    tokens = [key for key, value in after.items() if key.startswith("greenroom_tokens_total") and value]
    assert not tokens, "sound has no tokens"
    assert await heard_s(app) - used == pytest.approx(3 * SOUND_S, abs=0.01)


async def heard_s(app: App) -> float:
    """Seconds of sound in the usage."""
    await at_rest(app)
    found: float | None = (await http(app, "GET", "/api/v1/usage")).json()["total"]["audio_s"]
    return found or 0.0


async def counted(app: App) -> dict[str, float]:
    text = (await http(app, "GET", "/metrics")).body.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_order_to_sleep_is_the_gateways_alone(app: App) -> None:
    await facts.order(app, "load", "alpha")
    for path in ("/control/sleep", "/control/wake", "//control/sleep"):
        refused = await http(app, "POST", f"/upstream/alpha{path}", body=b"")
        assert refused.status == 403, refused.body
    assert (await http(app, "GET", "/upstream/alpha/health")).json() == {"status": "ok", "asleep": False}


@pytest.mark.slow
async def test_a_size_names_its_model_on_disk_or_on_the_hub(hub: StandinHub, tmp_path: Path) -> None:
    put(tmp_path / "models" / "faster-whisper-tiny", tiny_ears("alpha speaks"))
    files = folder_files(tiny_ears("alpha speaks"))
    hub.repos["Systran/faster-whisper-small"] = {
        name: one if isinstance(one, bytes) else one.read_bytes() for name, one in files.items()
    }
    async with gateway(tmp_path, {}, library={"roots": [str(tmp_path / "models")], "download": True}) as app:
        for name in ("whisper-tiny", "small"):
            taken = await http(app, "POST", "/v1/models/load", {"modelId": name})
            assert taken.status == 202, taken.body
            told = await over(app, f"/v1/models/load/{taken.json()['taskId']}")
            assert told["status"] == "completed", told
        # By either name, and the size alone where it is on disk.
        for name in ("whisper-small", "small", "Systran/faster-whisper-small", "tiny"):
            answer = await sent(app, SOUND, model=name)
            assert answer.status == 200 and answer.json()["text"] == SAID, answer.body
