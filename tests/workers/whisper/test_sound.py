"""Files that callers send, as sound or as a refusal."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest

from greenroom.workers.serving.errors import ApiError
from greenroom.workers.whisper.sound import LENGTH_MAX_S, RATE, SampleReader, length_s, pieces
from tests.samples.sounds import noise, silence


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
