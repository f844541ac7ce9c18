"""The record of OpenAI's Responses, and their route."""

from __future__ import annotations

from typing import Final

from greenroom.config.schema import Ability
from greenroom.dialects.dialect import Dialect, Route
from greenroom.dialects.responses.answers import COMMENT, ERRORS, response_translation
from greenroom.dialects.route_docs import OBJECTS, STREAM, RouteDoc, object_of

RESPONSES: Final = Dialect("responses", ERRORS)

_DOC: Final = RouteDoc(
    "Continue a conversation, as OpenAI's Responses have it. Nothing is stored.",
    object_of("output", output=OBJECTS, model={"type": "string"}, usage={"type": ["object", "null"]}),
    ("input",),
    {"input": {"type": ["string", "array"], "description": "A text, or items."}, "stream": STREAM},
)
ROUTES: Final = {
    b"/v1/responses": Route(
        "responses", RESPONSES, Ability.CHAT, COMMENT, is_text=True, translate=response_translation, doc=_DOC
    )
}
