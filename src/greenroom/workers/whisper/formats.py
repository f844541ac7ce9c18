"""Answers in the formats of OpenAI's audio routes, made from segments.

Owns the shapes of bodies and events, and the names of languages. A sound's length is its `usage` where OpenAI's
reference has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from ..serving.errors import encoded
from .transcribing import Segment

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


def content_type(format: str) -> str:
    return _TYPES.get(format, "application/json")


def body(format: str, task: str, granularities: Sequence[str], segments: Sequence[Segment], length_s: float) -> bytes:
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


def delta_event(piece: str) -> bytes:
    return encoded({"type": "transcript.text.delta", "delta": piece})


def done_event(text: str, length_s: float) -> bytes:
    return encoded({"type": "transcript.text.done", "text": text, **usage(length_s)})


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
