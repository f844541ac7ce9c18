"""Anthropic's record and routes."""

from __future__ import annotations

from typing import Final

from greenroom.config.schema import Ability
from greenroom.dialects.anthropic.answers import (
    ERRORS,
    PING,
    count_translation,
    messages_translation,
    model_card,
    model_list,
)
from greenroom.dialects.dialect import Dialect, ModelShape, Route
from greenroom.dialects.route_docs import OBJECTS, STREAM, RouteDoc, object_of, typed

ANTHROPIC: Final = Dialect("anthropic", ERRORS, models=ModelShape("anthropic-version", model_card, model_list))

_MESSAGES: Final = RouteDoc(
    "Continue a conversation, as Anthropic's Messages have it.",
    object_of("content", content=OBJECTS, model={"type": "string"}, usage={"type": "object"}),
    ("messages", "max_tokens"),
    {"messages": OBJECTS, "max_tokens": typed("integer", "How long the answer may be."), "stream": STREAM},
)
_COUNT: Final = RouteDoc(
    "Count the tokens of a request to /v1/messages.",
    object_of("input_tokens", input_tokens={"type": "integer"}),
    ("messages",),
    {"messages": OBJECTS},
)
ROUTES: Final = {
    b"/v1/messages": Route(
        "messages", ANTHROPIC, Ability.CHAT, PING, is_text=True, translate=messages_translation, doc=_MESSAGES
    ),
    b"/v1/messages/count_tokens": Route(
        "count_tokens", ANTHROPIC, Ability.CHAT, translate=count_translation, can_stream=False, doc=_COUNT
    ),
}
