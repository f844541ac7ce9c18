"""Long sounds in windows: all is heard once, in order, at its own time; and how formats write it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from greenroom.workers.whisper.formats import srt, text_of, vtt
from greenroom.workers.whisper.sound import RATE
from greenroom.workers.whisper.transcribing import Segment, Transcriber, Wanted
from tests.models import tiny_ears
from tests.samples.sounds import noise, silence
from tests.waiting import until

WINDOW_S = 90


class ScriptedModel:
    """Hears a word in every `every_s` of each window it is given, as faster-whisper would tell it."""

    supported_languages = ("en", "de")

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.asked: list[dict[str, Any]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

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
    await transcriber.alone(lambda: None)
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


async def test_an_order_is_carried_out_when_the_thread_of_a_cancelled_call_is_done() -> None:
    model = ScriptedModel(every_s=10)
    transcriber = Transcriber(model, beam_size=1, at_once=1)
    model.may_go_on.clear()
    leaving = asyncio.ensure_future(all_of(transcriber.segments(memoryview(silence(30)), Wanted())))
    await until(lambda: bool(model.asked), "it computes")
    leaving.cancel()
    told: list[str] = []
    ordered = asyncio.ensure_future(transcriber.alone(lambda: told.append("now")))
    await asyncio.sleep(0.05)
    assert not told
    model.may_go_on.set()
    await ordered
    assert told == ["now"]


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
