"""Files that callers send, as sound or as a refusal; and long sounds in windows, all heard once and in order."""

from __future__ import annotations

import asyncio
import io
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.whisper.api import srt, text_of, vtt
from greenroom.workers.whisper.sound import LENGTH_MAX_S, RATE, SampleReader, length_s, pieces
from greenroom.workers.whisper.transcribing import Segment, Transcriber, Wanted
from tests.models import tiny_ears
from tests.samples.sounds import noise, silence
from tests.waiting import until


def view(content: bytes) -> memoryview:
    return memoryview(content)


def encoded(container: str, codec: str, *, seconds: float = 2, rate: int = 48_000) -> bytes:
    """A tone in this format."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as written:
        stream = written.add_stream(codec, rate=rate)
        stream.layout = "mono"
        tone = np.sin(np.arange(int(seconds * rate)) * 0.05).astype(np.float32)
        for begin in range(0, tone.size, 960):
            piece = tone[begin : begin + 960].reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout="mono")
            frame.sample_rate = rate
            frame.pts = begin
            written.mux(stream.encode(frame))
        written.mux(stream.encode(None))
    return file.getvalue()


def claiming(rate: int) -> bytes:
    """A short wav file whose head says this rate."""
    file = bytearray(noise(0.1))
    file[24:28] = rate.to_bytes(4, "little")
    return bytes(file)


def late_stream() -> bytes:
    """An flv file with sound, whose head does not tell of the picture that follows."""

    def tag(kind: int, data: bytes) -> bytes:
        head = bytes((kind,)) + len(data).to_bytes(3, "big") + bytes(7)
        return head + data + (len(head) + len(data)).to_bytes(4, "big")

    # Samples of 16 bits, 44,100 a second.
    sound = tag(8, b"\x3e" + bytes(4096))
    return b"FLV\x01\x04" + (9).to_bytes(4, "big") + bytes(4) + sound * 200 + tag(9, b"\x12" + bytes(64)) + sound


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("webm", "libopus"),
        ("mp3", "libmp3lame"),
        ("mp4", "aac"),
    ],
)
def test_formats_of_the_api_are_read(container: str, codec: str) -> None:
    assert length_s(view(encoded(container, codec))) == pytest.approx(2, abs=0.1)


def test_samples_are_those_of_the_file() -> None:
    file = noise(1.5)
    taken = SampleReader(view(file))
    first, rest = taken.take(RATE), taken.take(RATE)
    assert (first.size, rest.size, taken.take(1).size) == (RATE, RATE // 2, 0)
    assert np.concatenate([first, rest]).tobytes() == file[44:]


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"not a sound at all", b"RIFF\x00\x00\x00\x00WAVE", noise(1)[:40], b"\x00" * 4096, b"ID3" + bytes(200)),
        # To resample what claims such a rate takes a minute and gigabytes.
        claiming(1_660_960_384),
    ],
    ids=["empty", "text", "head", "cut", "zeros", "tag", "rate"],
)
def test_what_is_no_sound_is_refused(content: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        length_s(view(content))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "invalid_audio", "file")


def test_sound_that_is_cut_off_is_heard_to_where_it_ends() -> None:
    assert length_s(view(noise(2)[: 44 + RATE])) == pytest.approx(0.5, abs=0.1)


def test_sound_before_and_after_a_stream_that_is_found_late_is_heard() -> None:
    """PyAV knows no stream that the head did not tell of, and may fail at the end of the file for that."""
    assert length_s(view(late_stream())) == pytest.approx(201 * 4096 / 2 / 44_100, abs=0.01)
    assert sum(piece.size for piece in pieces(view(late_stream()))) == pytest.approx(9.33 * RATE, abs=0.01 * RATE)


def test_playlist_reads_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg itself would read a file beside it."""
    (tmp_path / "secret.wav").write_bytes(noise(1))
    monkeypatch.chdir(tmp_path)
    playlist = b"ffconcat version 1.0\nfile secret.wav\n"
    with av.open(io.BytesIO(playlist)) as file:
        assert sum(frame.samples for packet in file.demux(audio=0) for frame in packet.decode()) == RATE
    with pytest.raises(ApiError, match="cannot be read as sound"):
        length_s(view(playlist))


def test_picture_is_no_sound() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as written:
        stream = written.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for packet in stream.encode(av.VideoFrame(16, 16, "yuv420p")):
            written.mux(packet)
        written.mux(stream.encode(None))
    with pytest.raises(ApiError, match="holds no sound"):
        length_s(view(file.getvalue()))


@pytest.mark.slow
def test_sound_that_is_too_long_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        length_s(view(silence(LENGTH_MAX_S + 10)))
    assert (refused.value.status, refused.value.code) == (413, "audio_too_long")
    assert "4 hours" in refused.value.message


@pytest.mark.slow
def test_long_sound_takes_no_more_memory_than_the_part_that_is_heard() -> None:
    reader = SampleReader(view(silence(1200)))
    tracemalloc.start()
    try:
        sizes = [reader.take(300 * RATE).size for _ in range(5)]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes[:3] == [300 * RATE] * 3 and sum(sizes) == pytest.approx(1200 * RATE, rel=0.01)
    assert peak_bytes < 5 * 300 * RATE * 2


WINDOW_S = 90


class ScriptedModel:
    """Hears a word in every `every_s` of each window it is given, as faster-whisper would tell it."""

    supported_languages = ("en", "de")

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.asked: list[dict[str, Any]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        # The model of CTranslate2 is within, and knows its moves.
        self.model, self.moves = self, list[str]()

    def unload_model(self, *, to_cpu: bool) -> None:
        assert to_cpu
        self.moves.append("sleep")

    def load_model(self) -> None:
        self.moves.append("wake")

    def transcribe(self, samples: Any, **options: Any) -> tuple[Iterator[Any], Any]:
        self.asked.append({**options, "length_s": samples.size / RATE})
        return self._segments(samples.size / RATE), SimpleNamespace(language=options["language"] or "de")

    def _segments(self, length_s: float) -> Iterator[Any]:
        for number in range(int(length_s / self._every_s)):
            self.may_go_on.wait()
            start = number * self._every_s
            yield SimpleNamespace(
                id=number,
                seek=0,
                start=start,
                end=start + self._every_s,
                text=f" w{number}",
                tokens=[number],
                temperature=0.0,
                avg_logprob=-0.1,
                compression_ratio=1.0,
                no_speech_prob=0.0,
                words=[SimpleNamespace(start=start, end=start + 1, word=f" w{number}")],
            )


async def all_of(found: AsyncIterator[Segment]) -> list[Segment]:
    return [segment async for segment in found]


@pytest.mark.slow
async def test_sound_is_not_measured_for_a_caller_that_has_left() -> None:
    transcriber, sound = Transcriber(ScriptedModel(10), beam_size=1, at_once=1), memoryview(silence(13_000, rate=4_000))
    began = time.perf_counter()
    assert await transcriber.length_s(sound) == pytest.approx(13_000)
    whole_s = time.perf_counter() - began
    measuring = asyncio.ensure_future(transcriber.length_s(sound))
    await asyncio.sleep(whole_s / 10)
    measuring.cancel()
    began = time.perf_counter()
    await transcriber.move(to_cpu=True)
    assert time.perf_counter() - began < whole_s / 2, "the thread is free"


async def test_windows_join_without_a_gap_and_nothing_is_heard_twice() -> None:
    model = ScriptedModel(every_s=7)
    transcriber = Transcriber(model, beam_size=1, at_once=1, window_s=WINDOW_S)
    found = await all_of(transcriber.segments(memoryview(silence(280)), Wanted(words=True)))
    assert [segment.id for segment in found] == list(range(40))
    assert [segment.start for segment in found] == pytest.approx([7 * number for number in range(40)])
    assert [segment.words[0][0] for segment in found] == [segment.start for segment in found]
    assert max(asked["length_s"] for asked in model.asked) == WINDOW_S
    assert len(model.asked) == 5


async def test_later_windows_know_the_language_and_the_words_before() -> None:
    model = ScriptedModel(every_s=10)
    transcriber = Transcriber(model, beam_size=3, at_once=1, window_s=WINDOW_S)
    found = await all_of(transcriber.segments(memoryview(silence(100)), Wanted(prompt="Hi.", temperature=0.4)))
    first, second, *_ = model.asked
    assert {segment.language for segment in found} == {"de"}
    assert (first["language"], first["initial_prompt"], first["temperature"]) == (None, "Hi.", 0.4)
    assert (second["language"], second["initial_prompt"]) == ("de", "Hi. w0 w1 w2 w3 w4 w5")
    assert first["beam_size"] == 3


async def test_model_is_moved_when_the_thread_of_a_cancelled_call_is_done() -> None:
    model = ScriptedModel(every_s=10)
    transcriber = Transcriber(model, beam_size=1, at_once=1)
    model.may_go_on.clear()
    leaving = asyncio.ensure_future(all_of(transcriber.segments(memoryview(silence(30)), Wanted())))
    await until(lambda: bool(model.asked), "it computes")
    leaving.cancel()
    ordered = asyncio.ensure_future(transcriber.move(to_cpu=True))
    await asyncio.sleep(0.05)
    assert not model.moves
    model.may_go_on.set()
    await ordered
    assert model.moves == ["sleep"]


async def test_real_model_hears_its_words_in_every_half_minute() -> None:
    from faster_whisper import WhisperModel

    model = WhisperModel(str(tiny_ears("alpha speaks")), device="cpu", cpu_threads=1)
    transcriber = Transcriber(model, beam_size=1, at_once=1, window_s=60)
    found = await all_of(transcriber.segments(memoryview(noise(100)), Wanted()))
    assert [segment.text for segment in found] == [" alpha", " speaks"] * 4
    assert [segment.start for segment in found][::2] == pytest.approx([0, 30, 60, 90], abs=0.1)


ONE = Segment(0, 0, 3661.5, 3662.0, " a < b\n\n--> c", [], 0.0, 0.0, 0.0, 0.0, [], "en")


def test_hours_and_milliseconds_are_written_as_the_formats_want_them() -> None:
    assert "01:01:01,500 --> 01:01:02,000\n" in srt([ONE])
    assert "01:01:01.500 --> 01:01:02.000\n" in vtt([ONE])


def test_text_cannot_end_its_block_or_begin_another() -> None:
    assert srt([ONE, replace(ONE, text=" x")]).split("\n\n")[0].splitlines()[2:] == ["a < b --> c"]
    (line,) = vtt([ONE]).split("\n\n")[1].splitlines()[1:]
    assert line == "a &lt; b --&gt; c"


def test_silence_is_an_empty_text() -> None:
    assert (text_of([]), srt([]), vtt([])) == ("", "", "WEBVTT\n\n")
