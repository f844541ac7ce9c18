from __future__ import annotations

from dataclasses import replace

from greenroom.workers.whisper.formats import srt, text_of, vtt
from greenroom.workers.whisper.transcribing import Segment

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
