"""Ollama's record, and its routes to models."""

from __future__ import annotations

from typing import Final

from greenroom.config.schema import Ability
from greenroom.dialects.dialect import Dialect, Route
from greenroom.dialects.heartbeat import StreamShape
from greenroom.dialects.ollama import answers
from greenroom.dialects.ollama.requests import untagged
from greenroom.dialects.translation import Translate

OLLAMA: Final = Dialect(
    "ollama",
    answers.ERRORS,
    meant=untagged,
    pages=frozenset((b"/api/tags", b"/api/show", b"/api/ps", b"/api/version", b"/api/pull", b"/api/delete")),
)


def _text(name: str, shape: StreamShape, translate: Translate) -> Route:
    return Route(name, OLLAMA, Ability.CHAT, shape, is_text=True, translate=translate, streams_unless_told=True)


def _vectors(name: str, translate: Translate) -> Route:
    return Route(name, OLLAMA, Ability.EMBEDDINGS, translate=translate, can_stream=False)


ROUTES: Final = {
    b"/api/chat": _text("ollama_chat", answers.CHAT, answers.chat_translation),
    b"/api/generate": _text("ollama_generate", answers.GENERATE, answers.generate_translation),
    b"/api/embed": _vectors("ollama_embed", answers.embed_translation),
    b"/api/embeddings": _vectors("ollama_embeddings", answers.embeddings_translation),
}
