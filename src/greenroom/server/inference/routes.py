"""Which paths ask a model for something. Matched on the raw path: what is authorised is what is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from greenroom.engines.base import Ability
from greenroom.http.heartbeat import StreamShape


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is its label in metrics; `shape` what an empty piece of its stream looks like.

    `has_prefix`: what it sends begins with a text that a cache may know already.
    """

    name: str
    ability: Ability | None = None
    shape: StreamShape = StreamShape.TEXT
    is_multipart: bool = False
    has_prefix: bool = False


MODEL_ROUTES: Mapping[bytes, Route] = {
    b"/v1/chat/completions": Route("chat", Ability.CHAT, StreamShape.CHAT, has_prefix=True),
    b"/v1/completions": Route("completions", Ability.COMPLETIONS, has_prefix=True),
    b"/v1/embeddings": Route("embeddings", Ability.EMBEDDINGS),
    b"/v1/rerank": Route("rerank", Ability.RERANK),
    b"/v1/audio/transcriptions": Route("transcriptions", is_multipart=True),
    b"/v1/audio/translations": Route("translations", is_multipart=True),
    b"/v1/images/edits": Route("image_edits", is_multipart=True),
}

UPSTREAM_PREFIX = b"/upstream/"
UPSTREAM = Route("upstream")
