"""Engines that make or hear something else than text, as the contract suite for them wants them.

To add an engine: describe it by a `MediaKind` and name it in MEDIA.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.integration.hosted.test_speech import speaking
from tests.integration.raw import request_bytes
from tests.models import tiny_ears, tiny_pipelines
from tests.samples.sounds import FORM, form, heard, noise, silence
from tests.standins import comfyui_installation
from tests.torch_python import painter

Described = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MediaKind:
    """`path` and `body` are a request that is answered soon and always in the same way, `long` one that takes long."""

    model: Callable[[], Described]
    path: str
    body: dict[str, Any]
    long: dict[str, Any]
    answers: Callable[[bytes], object]
    """What of an answer is the same each time."""
    can_sleep: bool = False
    bad: tuple[tuple[dict[str, Any], str], ...] = field(default=())
    """Changes of the request that are refused, each with the code of the error."""
    files: tuple[bytes, bytes] | None = None
    """Sounds that are sent with the two requests, which are forms then."""
    streams: bool = False

    def request(self, model: str, changes: dict[str, Any] | None = None, *, long: bool = False) -> bytes:
        """The request to this model, as it is sent."""
        fields = {"model": model, **(self.long if long else self.body), **(changes or {})}
        if self.files is None:
            return request_bytes("POST", self.path, json.dumps(fields).encode())
        body = form([(name, str(value)) for name, value in fields.items()], self.files[long])
        return request_bytes("POST", self.path, body, FORM)


def _pictures(answer: bytes) -> object:
    return [one["b64_json"] for one in json.loads(answer)["data"]]


PICTURE = {"prompt": "a cat", "size": "64x64", "num_inference_steps": 2, "seed": 7}
BAD_PICTURES = (
    ({"n": 10**9}, "invalid_request"),
    ({"size": "30000x30000"}, "invalid_request"),
    ({"prompt": 3}, "invalid_request"),
)


def _diffusers(kind: str) -> MediaKind:
    return MediaKind(
        model=lambda: painter(tiny_pipelines("sdxl", "flux", "sd3") / kind),
        path="/v1/images/generations",
        body=PICTURE,
        long={**PICTURE, "num_inference_steps": 1_000},
        answers=_pictures,
        can_sleep=True,
        bad=BAD_PICTURES,
    )


def _text(answer: bytes) -> object:
    return json.loads(answer)["text"]


BAD_SOUNDS = (
    ({"language": "klingon"}, "invalid_request"),
    ({"temperature": 2}, "invalid_request"),
    ({"response_format": "mp3"}, "invalid_request"),
)

MEDIA = {
    **{f"diffusers-{kind}": _diffusers(kind) for kind in ("sdxl", "flux", "sd3")},
    "comfyui": MediaKind(
        model=lambda: comfyui_installation.shared().model(),
        path="/v1/images/generations",
        body=PICTURE,
        long={**PICTURE, "num_inference_steps": 1_000},
        answers=_pictures,
        can_sleep=True,
        bad=BAD_PICTURES,
    ),
    "whisper": MediaKind(
        model=lambda: heard(tiny_ears("alpha speaks")),
        path="/v1/audio/transcriptions",
        body={},
        long={"stream": "true"},
        files=(noise(40), silence(1_500, rate=8_000)),
        answers=_text,
        can_sleep=True,
        streams=True,
        bad=BAD_SOUNDS,
    ),
    "espeak-ng": MediaKind(
        model=speaking,
        path="/v1/audio/speech",
        body={"input": "The room is ready.", "voice": "alloy"},
        long={"input": "ready " * 680, "voice": "alloy", "speed": 0.25, "response_format": "pcm"},
        answers=bytes,
        bad=(({"response_format": "mp3"}, "invalid_request"), ({"speed": 9}, "invalid_request")),
    ),
}
