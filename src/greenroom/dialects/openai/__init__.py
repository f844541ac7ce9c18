"""OpenAI's routes, which engines have as well."""

from __future__ import annotations

from typing import Final

from greenroom.config.schema import Ability
from greenroom.dialects import heartbeat
from greenroom.dialects.dialect import Dialect, Route
from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.openai import requests
from greenroom.dialects.route_docs import OBJECTS, STREAM, RouteDoc, Schema, object_of, string, typed

OPENAI: Final = Dialect("openai", ErrorShape())

COMPLETIONS_PATH: Final = b"/v1/completions"
_RERANK_PATH: Final = b"/v1/rerank"
_FILE: Final[Schema] = {"type": "string", "format": "binary"}
_PICTURE_FIELDS: Final[Schema] = {
    "n": typed("integer", "How many pictures."),
    "size": string("Such as 512x512."),
    "response_format": string("b64_json, or url: the gateway keeps the picture for a while."),
}
_SOUND_FIELDS: Final[Schema] = {
    "file": _FILE,
    "prompt": string("Words before the sound."),
    "response_format": string("json, text, srt, verbose_json or vtt."),
    "stream": STREAM,
}
_WORDS: Final[Schema] = {"type": ["string", "array"], "description": "A text or several."}
_CHOICES: Final = object_of("choices", choices=OBJECTS, model={"type": "string"}, usage={"type": ["object", "null"]})
_PICTURES: Final = object_of("data", created={"type": "number"}, data=OBJECTS)
_TRANSCRIPT: Final = object_of("text", text={"type": "string"})


def completion(name: str, summary: str, sent_to: bytes | None = None) -> Route:
    """A route that is answered like /v1/completions."""
    doc = RouteDoc(summary, _CHOICES, ("prompt",), {"prompt": _WORDS, "stream": STREAM})
    check = requests.COMPLETION
    return Route(name, OPENAI, Ability.COMPLETIONS, is_text=True, sent_to=sent_to, check=check, doc=doc)


def _pictures(name: str, form: tuple[str, ...], summary: str, fields: Schema) -> Route:
    doc = RouteDoc(summary, _PICTURES, fields={"image": _FILE, **fields, **_PICTURE_FIELDS})
    return Route(name, OPENAI, Ability.IMAGE_EDITS, form=form, makes_pictures=True, doc=doc)


def _heard(name: str, ability: Ability, summary: str, fields: Schema) -> Route:
    doc = RouteDoc(summary, _TRANSCRIPT, fields={**fields, **_SOUND_FIELDS})
    return Route(name, OPENAI, ability, heartbeat.TRANSCRIPT, form=("file",), is_sound=True, doc=doc)


# As llama.cpp, vLLM and llama-swap call it too.
_RERANK_TWIN: Final = Route("rerank", OPENAI, Ability.RERANK, sent_to=_RERANK_PATH, check=requests.RERANK)
_CHAT: Final = RouteDoc("Continue a conversation.", _CHOICES, ("messages",), {"messages": OBJECTS, "stream": STREAM})
_EMBEDDING: Final = RouteDoc("Turn texts into vectors.", object_of("data", data=OBJECTS), ("input",), {"input": _WORDS})
_RERANK: Final = RouteDoc(
    "Order documents by how well they answer a query.",
    object_of("results", results=OBJECTS),
    ("query", "documents"),
    {"query": string("What is looked for."), "documents": {"type": "array"}},
)
_PICTURE: Final = RouteDoc(
    "Make pictures.", _PICTURES, ("prompt",), {"prompt": string("What to show."), **_PICTURE_FIELDS}
)
_EDITED: Final[Schema] = {"mask": _FILE, "prompt": string("What to show.", minLength=1)}
_SPEECH: Final = RouteDoc(
    "Say a text.",
    None,
    ("input",),
    {
        "input": string("What to say."),
        "voice": {"type": ["string", "object"]},
        "response_format": string("mp3, wav and others that the engine can."),
    },
)
ROUTES: Final = {
    b"/v1/chat/completions": Route(
        "chat", OPENAI, Ability.CHAT, heartbeat.CHAT, is_text=True, check=requests.CHAT, doc=_CHAT
    ),
    COMPLETIONS_PATH: completion("completions", "Continue a text."),
    b"/v1/embeddings": Route("embeddings", OPENAI, Ability.EMBEDDINGS, check=requests.EMBEDDING, doc=_EMBEDDING),
    _RERANK_PATH: Route("rerank", OPENAI, Ability.RERANK, check=requests.RERANK, doc=_RERANK),
    b"/v1/reranking": _RERANK_TWIN,
    b"/rerank": _RERANK_TWIN,
    b"/reranking": _RERANK_TWIN,
    b"/v1/images/generations": Route(
        "images", OPENAI, Ability.IMAGES, makes_pictures=True, check=requests.PICTURE, doc=_PICTURE
    ),
    b"/v1/images/edits": _pictures("image_edits", ("image", "prompt"), "Change a picture.", _EDITED),
    b"/v1/images/variations": _pictures("image_variations", ("image",), "Make others like a picture.", {}),
    b"/v1/audio/transcriptions": _heard(
        "transcriptions", Ability.TRANSCRIPTION, "Write down what is said.", {"language": string("Such as en.")}
    ),
    b"/v1/audio/translations": _heard("translations", Ability.TRANSLATION, "Write down in English what is said.", {}),
    b"/v1/audio/speech": Route("speech", OPENAI, Ability.SPEECH, is_sound=True, check=requests.SPEECH, doc=_SPEECH),
}
