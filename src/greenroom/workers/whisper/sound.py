"""Sound files as samples: 16 kHz, one channel, piece by piece, so that an hour of sound takes no more than a minute.

Owns which formats are read and how long a sound may be. A file is hostile input: its name and the type that a client
claims are not looked at, and FFmpeg may use only formats that hold their sound themselves. Playlists could make it read
other files and addresses.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import av
import numpy as np

from ..serving.errors import ApiError

RATE: Final = 16_000
# Twice that of any recorder. The filter of a resampler grows with the rate that a file claims.
RATE_MAX: Final = 768_000
LENGTH_MAX_S: Final = 4 * 3600
# FFmpeg's names of them. mov is also mp4, m4a and 3gp; matroska is also webm.
FORMATS: Final = "aac,aiff,amr,asf,au,avi,caf,flac,flv,matroska,mov,mp3,mpeg,mpegts,ogg,w64,wav"

Samples = Any
"""A numpy array of 16 bit integers."""


def length_s(sound: memoryview, left: threading.Event | None = None) -> float:
    """How long it is. Decodes all of it and keeps nothing. Raises ApiError for what is no sound, or too long. Once the
    caller has `left` it ends early, and its answer means nothing."""
    length_s = 0.0
    for frame in _frames(sound):
        if left is not None and left.is_set():
            break
        length_s += frame.samples / frame.sample_rate
        if length_s > LENGTH_MAX_S:
            raise ApiError(
                f"file is longer than {LENGTH_MAX_S // 3600} hours. Send it in parts.",
                param="file",
                status=413,
                code="audio_too_long",
            )
    if not length_s:
        raise _no_sound("it holds no sound")
    return length_s


def pieces(sound: memoryview) -> Iterator[Samples]:
    """Its samples, in order. Raises ApiError for what is no sound."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    for frame in _frames(sound):
        # Times in a file may lie; the resampler would make silence of them.
        frame.pts = None
        yield from _arrays(resampler, frame)
    yield from _arrays(resampler, None)


def _frames(sound: memoryview) -> Iterator[Any]:
    """What FFmpeg decodes. Broken packets are left out. Raises ApiError for what is no sound."""
    if not sound.nbytes:
        raise _no_sound("it is empty")
    try:
        with av.open(
            _MemoryFile(sound), container_options={"format_whitelist": FORMATS}, metadata_errors="ignore"
        ) as file:
            if not file.streams.audio:
                raise _no_sound("it holds no sound")
            for packet in _packets(file):
                for frame in _decoded(packet):
                    if not 0 < frame.sample_rate <= RATE_MAX:
                        raise _no_sound(f"it has {frame.sample_rate:,} samples a second")
                    yield frame
    # PyAV has its own errors, and plain ones for values that FFmpeg did not check.
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise _no_sound(_words(error)) from None


def _packets(file: Any) -> Iterator[Any]:
    """Those of the first sound, to its end."""
    # At the end PyAV flushes each stream, in order, and may try that with one that FFmpeg found late, which PyAV does
    # not know. It asks memory that it has not written whether to; ours comes before it.
    with suppress(IndexError):
        yield from file.demux(file.streams.audio[0])


def _decoded(packet: Any) -> list[Any]:
    try:
        return list(packet.decode())
    except av.InvalidDataError:
        return []


def _arrays(resampler: Any, frame: Any) -> Iterator[Samples]:
    try:
        for one in resampler.resample(frame):
            yield one.to_ndarray().reshape(-1)
    except (av.FFmpegError, ValueError) as error:
        raise _no_sound(_words(error)) from None


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _no_sound(why: str) -> ApiError:
    return ApiError(
        f"file cannot be read as sound: {why.rstrip('.')}. Send flac, m4a, mp3, mp4, mpeg, mpga, ogg, wav or webm.",
        param="file",
        code="invalid_audio",
    )


class SampleReader:
    """Takes so many samples at a time from a sound."""

    def __init__(self, sound: memoryview) -> None:
        self._pieces = pieces(sound)
        self._rest: Samples = np.zeros(0, np.int16)

    def take(self, count: int) -> Samples:
        """So many samples; fewer only at the end."""
        held, size = [self._rest], self._rest.size
        while size < count and (piece := next(self._pieces, None)) is not None:
            held.append(piece)
            size += piece.size
        joined = np.concatenate(held)
        self._rest = joined[count:]
        return joined[:count]


class _MemoryFile:
    """A file for FFmpeg that is a part of a request's body. Copies only what is read."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        end = self._content.nbytes if size < 0 else self._at + size
        data = bytes(self._content[self._at : end])
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.nbytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at
