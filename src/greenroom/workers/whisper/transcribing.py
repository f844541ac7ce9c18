"""The model at work: sound in, segments out, one after another, until the end or until the caller has left.

Owns the threads that compute, and the windows in which a long sound is read: what came before a window is forgotten but
for its last words, so memory does not grow with length. A window ends in a stretch that the next one hears again, so
that no sentence is cut.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

from .sound import RATE, SampleReader, length_s

WINDOW_S: Final = 300
# Whisper hears 30 seconds at a time. What begins in the last 30 of a window is left to the next one.
HEARD_AGAIN_S: Final = 30
# Words of the window before that a window is given; Whisper uses the last 223 tokens.
PROMPT_CHARS: Final = 400
# Tried in this order until the text is likely and does not repeat itself.
TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller asks for. `temperature` 0 tries all of TEMPERATURES."""

    task: str = "transcribe"
    language: str | None = None
    prompt: str | None = None
    temperature: float = 0.0
    words: bool = False
    vad: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """Times are seconds from the beginning of the sound. `language` is that of the sound, as told or as heard."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[tuple[float, float, str]]
    language: str


class Transcriber:
    """`model` is a WhisperModel of faster-whisper; `at_once` are the requests that it computes at the same time."""

    def __init__(self, model: Any, *, beam_size: int, at_once: int, window_s: int = WINDOW_S) -> None:
        self._model = model
        self._beam_size = beam_size
        self._window_s = window_s
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="transcribe")
        self._running: set[Future[Any]] = set()

    @property
    def languages(self) -> list[str]:
        return list(self._model.supported_languages)

    async def length_s(self, sound: memoryview) -> float:
        """As in `sound.py`. A caller that leaves ends it."""
        left = threading.Event()
        try:
            return await self._in_thread(lambda: length_s(sound, left))
        finally:
            left.set()

    async def segments(self, sound: memoryview, wanted: Wanted) -> AsyncGenerator[Segment, None]:
        """Each as soon as it is there. A caller that stops asking ends the work with the segment that is computed."""
        found = self._segments(sound, wanted)
        while (segment := await self._in_thread(lambda: next(found, None))) is not None:
            yield segment

    async def move(self, *, to_cpu: bool) -> None:
        """Take the model off the GPU or put it back, when no thread computes any more, not even for a caller that has
        left."""
        await asyncio.to_thread(wait, list(self._running))
        inner = self._model.model
        await self._in_thread(lambda: inner.unload_model(to_cpu=True) if to_cpu else inner.load_model())

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Being cancelled does not end work that has begun."""
        begun = self._threads.submit(work)
        self._running.add(begun)
        begun.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(begun)

    # --- in a thread ------------------------------------------------------------------------------------------------

    def _segments(self, sound: memoryview, wanted: Wanted) -> Iterator[Segment]:
        reader, size = SampleReader(sound), self._window_s * RATE
        window, before_s, count = reader.take(size), 0.0, 0
        while window.size:
            length, is_last = window.size / RATE, window.size < size
            own_s = length if is_last else length - HEARD_AGAIN_S
            until_s = own_s
            for segment in self._of_window(window, wanted):
                if segment.start >= own_s and not is_last:
                    break
                until_s = max(own_s, min(segment.end, length))
                wanted = replace(wanted, language=segment.language, prompt=_last_words(wanted.prompt, segment.text))
                yield _moved(segment, before_s, count)
                count += 1
            if is_last:
                return
            done = round(until_s * RATE)
            before_s += done / RATE
            window = np.concatenate([window[done:], reader.take(done)])

    def _of_window(self, window: Any, wanted: Wanted) -> Iterator[Segment]:
        found, info = self._model.transcribe(
            window.astype(np.float32) / 32_768,
            language=wanted.language,
            task=wanted.task,
            beam_size=self._beam_size,
            temperature=wanted.temperature or list(TEMPERATURES),
            initial_prompt=wanted.prompt or None,
            word_timestamps=wanted.words,
            vad_filter=wanted.vad,
        )
        for one in found:
            yield Segment(
                id=one.id,
                seek=one.seek,
                start=float(one.start),
                end=float(one.end),
                text=one.text,
                tokens=list(one.tokens),
                temperature=float(one.temperature or 0.0),
                avg_logprob=float(one.avg_logprob),
                compression_ratio=float(one.compression_ratio),
                no_speech_prob=float(one.no_speech_prob),
                words=[(float(word.start), float(word.end), word.word) for word in one.words or ()],
                language=info.language,
            )


def _last_words(prompt: str | None, text: str) -> str:
    return f"{prompt or ''}{text}"[-PROMPT_CHARS:]


def _moved(segment: Segment, by_s: float, number: int) -> Segment:
    """The same, counted from the beginning of the sound instead of the window."""
    return replace(
        segment,
        id=number,
        seek=segment.seek + round(by_s * 100),
        start=round(segment.start + by_s, 3),
        end=round(segment.end + by_s, 3),
        words=[(round(start + by_s, 3), round(end + by_s, 3), word) for start, end, word in segment.words],
    )
