"""The HTTP API of a transcription model: what a form asks for is checked, then answered at once or as events.

Owns the fields of OpenAI's audio routes and the refusals. `/control/` is for the gateway alone, which does not forward
it. A client that leaves cancels its handler, and with it the work after the segment that is being computed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn
from urllib.parse import parse_qs

from ..serving.errors import ApiError, encoded, unsupported
from ..serving.forms import Form, read_form
from ..serving.http import AnswerWriter
from ..serving.request_reader import Request
from .transcribing import Segment, Transcriber, Wanted

# Whisper uses the last 223 tokens of a prompt. What is far longer is a mistake.
PROMPT_CHARS_MAX: Final = 16_384
GRANULARITIES: Final = ("word", "segment")
# The gateway counts by it, whatever the format of the answer is.
LENGTH_HEADER: Final = "x-audio-seconds"
# True for what takes the model off the GPU.
_MOVES: Final = {"/control/sleep": True, "/control/wake": False}
_TASKS: Final = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}


@dataclass(frozen=True, slots=True)
class SoundRequest:
    """One request, checked."""

    sound: memoryview
    wanted: Wanted
    format: str
    granularities: tuple[str, ...]
    stream: bool


class AudioApi:
    def __init__(self, transcriber: Transcriber) -> None:
        self._transcriber = transcriber
        self._is_asleep = False
        # How much of its sound each request has heard, by the gateway's id of it.
        self._progress: dict[str, float] = {}

    async def handle(self, request: Request, answer: AnswerWriter) -> None:
        """Answer one request. Raises ApiError."""
        if request.method == "GET" and request.path == "/health":
            answer.whole(200, encoded({"status": "ok", "asleep": self._is_asleep}))
        elif request.method == "GET" and request.path == "/progress":
            asked = parse_qs(request.query).get("request", [""])[0]
            answer.whole(200, encoded({"progress": self._progress.get(asked)}))
        elif request.method == "POST" and request.path in _MOVES:
            await self._transcriber.move(to_cpu=_MOVES[request.path])
            self._is_asleep = _MOVES[request.path]
            answer.whole(200, encoded({"asleep": self._is_asleep}))
        elif request.path not in _TASKS:
            raise ApiError(f"There is no {request.path} here.", status=404, code="not_found")
        elif request.method != "POST":
            raise ApiError(f"{request.path} takes POST.", status=405, code="method_not_allowed")
        elif self._is_asleep:
            raise ApiError("The model is asleep.", status=503, code="unavailable")
        else:
            await self._transcribe(self._read(request), answer, request.headers.get("x-request-id", ""))

    # --- what is asked ----------------------------------------------------------------------------------------------

    def _read(self, request: Request) -> SoundRequest:
        form = read_form(request.headers.get("content-type", ""), request.body)
        task = _TASKS[request.path]
        sound = form.file("file", needed=True)
        assert sound is not None
        format = _choice(form, "response_format", FORMATS, "json")
        granularities = _granularities(form, format)
        stream = _flag(form, "stream")
        if stream and format not in ("json", "text"):
            raise ApiError(f"A stream has no {format}. Ask for json, or without stream.", param="response_format")
        if "logprobs" in form.lists.get("include", ()):
            raise unsupported("This model gives no logprobs.", param="include")
        wanted = Wanted(
            task=task,
            language=self._language(form, task),
            prompt=_prompt(form),
            temperature=_temperature(form),
            words="word" in granularities,
            # `chunking_strategy` is OpenAI's name for the same.
            vad=_flag(form, "vad_filter") or bool(form.fields.get("chunking_strategy")),
        )
        return SoundRequest(sound, wanted, format, granularities, stream)

    def _language(self, form: Form, task: str) -> str | None:
        known = self._transcriber.languages
        if task == "translate" and known == ["en"]:
            raise unsupported("This model knows English only and does not translate.", param="model")
        said = form.fields.get("language", "").strip().lower()
        if not said:
            return None
        code = next((code for code, name in LANGUAGES.items() if said in (code, name)), None)
        if code not in known:
            what = "English" if known == ["en"] else "codes of ISO 639-1 such as en"
            raise ApiError(f"language {said[:32]!r} is not known; this model takes {what}.", param="language")
        return code

    # --- what is answered -------------------------------------------------------------------------------------------

    async def _transcribe(self, asked: SoundRequest, answer: AnswerWriter, request_id: str) -> None:
        # All of the sound is decoded once before it is heard: what is broken or too long is refused as a whole.
        length_s = await self._transcriber.length_s(asked.sound)
        headers = {LENGTH_HEADER: f"{length_s:.3f}"}
        async with aclosing(self._segments(asked, length_s, request_id)) as found:
            if asked.stream:
                answer.begin_events(headers)
                await _send_events(found, length_s, answer)
                return
            segments = [segment async for segment in found]
        body = answer_body(asked.format, asked.wanted.task, asked.granularities, segments, length_s)
        answer.whole(200, body, {"content-type": _TYPES.get(asked.format, "application/json"), **headers})

    async def _segments(self, asked: SoundRequest, length_s: float, request_id: str) -> AsyncGenerator[Segment, None]:
        self._progress[request_id] = 0.0
        try:
            async with aclosing(self._transcriber.segments(asked.sound, asked.wanted)) as found:
                async for segment in found:
                    self._progress[request_id] = min(1.0, segment.end / length_s)
                    yield segment
        finally:
            self._progress.pop(request_id, None)


async def _send_events(found: AsyncIterator[Segment], length_s: float, answer: AnswerWriter) -> None:
    said = ""
    async for segment in found:
        piece = segment.text if said else segment.text.lstrip()
        said += piece
        if piece:
            answer.event(encoded({"type": "transcript.text.delta", "delta": piece}))
    answer.event(encoded({"type": "transcript.text.done", "text": said, **usage(length_s)}))
    answer.end_events()


# --- fields ---------------------------------------------------------------------------------------------------------


def _choice(form: Form, name: str, choices: tuple[str, ...], default: str) -> str:
    said = form.fields.get(name) or default
    if said not in choices:
        _refuse(name, f"one of {', '.join(choices)}", said)
    return said


def _flag(form: Form, name: str) -> bool:
    said = form.fields.get(name, "").strip().lower()
    if said not in ("", "true", "false", "1", "0"):
        _refuse(name, "true or false", said)
    return said in ("true", "1")


def _temperature(form: Form) -> float:
    said = form.fields.get("temperature", "").strip() or "0"
    try:
        value = float(said)
    except ValueError:
        _refuse("temperature", "a number from 0 to 1", said)
    if not 0 <= value <= 1 or not math.isfinite(value):
        _refuse("temperature", "a number from 0 to 1", said)
    return value


def _prompt(form: Form) -> str | None:
    said = form.fields.get("prompt")
    if said is not None and len(said) > PROMPT_CHARS_MAX:
        raise ApiError(
            f"prompt has {len(said):,} characters; {PROMPT_CHARS_MAX:,} are taken, and the model uses the last 223 "
            "tokens.",
            param="prompt",
        )
    return said


def _granularities(form: Form, format: str) -> tuple[str, ...]:
    name = "timestamp_granularities"
    said = tuple(form.lists.get(name, ())) or tuple(filter(None, (form.fields.get(name),)))
    for one in said:
        if one not in GRANULARITIES:
            _refuse(f"{name}[]", "word or segment", one)
    if "word" in said and format != "verbose_json":
        raise ApiError("Words have times in verbose_json only. Ask for that response_format.", param="response_format")
    return said or ("segment",)


def _refuse(name: str, wanted: str, said: str) -> NoReturn:
    raise ApiError(f"{name} must be {wanted}, not {said[:64]!r}.", param=name)


# --- formats of answers -----------------------------------------------------------------------------------------------


FORMATS: Final = ("json", "text", "srt", "vtt", "verbose_json")
_PLAIN: Final = "text/plain; charset=utf-8"
_TYPES: Final = {"text": _PLAIN, "srt": _PLAIN, "vtt": "text/vtt; charset=utf-8"}

# Whisper's codes and how OpenAI's answers name the languages.
_LANGUAGES: Final = (
    "en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese "
    "tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi fi:finnish "
    "vi:vietnamese he:hebrew uk:ukrainian el:greek ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil "
    "no:norwegian th:thai ur:urdu hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh "
    "sk:slovak te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian kn:kannada "
    "et:estonian mk:macedonian br:breton eu:basque is:icelandic hy:armenian ne:nepali mn:mongolian bs:bosnian "
    "kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba "
    "so:somali af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic "
    "yi:yiddish lo:lao uz:uzbek fo:faroese ps:pashto tk:turkmen nn:nynorsk mt:maltese sa:sanskrit "
    "lb:luxembourgish my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala "
    "ha:hausa ba:bashkir jw:javanese su:sundanese yue:cantonese ht:haitian_creole"
)
LANGUAGES: Final = dict(word.split(":") for word in _LANGUAGES.split())


def answer_body(
    format: str, task: str, granularities: Sequence[str], segments: Sequence[Segment], length_s: float
) -> bytes:
    """The whole answer in one of FORMATS."""
    if format == "json":
        answer: dict[str, Any] = {"text": text_of(segments)}
        return encoded(answer | usage(length_s) if task == "transcribe" else answer)
    if format == "verbose_json":
        return encoded(_verbose(task, granularities, segments, length_s))
    if format == "text":
        return f"{text_of(segments)}\n".encode()
    return (srt(segments) if format == "srt" else vtt(segments)).encode()


def usage(length_s: float) -> dict[str, Any]:
    return {"usage": {"type": "duration", "seconds": round(length_s, 3)}}


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def srt(segments: Sequence[Segment]) -> str:
    blocks = (
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )
    return "".join(blocks)


def vtt(segments: Sequence[Segment]) -> str:
    # In WebVTT an arrow would begin a new cue, and these characters begin tags and entities.
    blocks = (
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_escaped(_line(segment))}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(blocks)


def _verbose(task: str, granularities: Sequence[str], segments: Sequence[Segment], length_s: float) -> dict[str, Any]:
    spoken = segments[0].language if segments else ""
    # A translation is always into English.
    language = "english" if task == "translate" else LANGUAGES.get(spoken, spoken).replace("_", " ")
    answer: dict[str, Any] = {
        "task": task,
        "language": language,
        "duration": round(length_s, 3),
        "text": text_of(segments),
    }
    if "word" in granularities:
        answer["words"] = [
            {"word": word.strip(), "start": start, "end": end}
            for segment in segments
            for start, end, word in segment.words
        ]
    if "segment" in granularities:
        answer["segments"] = [_plain(segment) for segment in segments]
    return answer | usage(length_s) if task == "transcribe" else answer


def _plain(segment: Segment) -> dict[str, Any]:
    return {name: value for name, value in asdict(segment).items() if name not in ("words", "language")}


def _line(segment: Segment) -> str:
    """The text on one line: an empty one would end its block."""
    return " ".join(segment.text.split())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, mark: str) -> str:
    whole_ms = max(0, round(seconds * 1000))
    whole_s, ms = divmod(whole_ms, 1000)
    return f"{whole_s // 3600:02d}:{whole_s // 60 % 60:02d}:{whole_s % 60:02d}{mark}{ms:03d}"
