"""The lines of docs/dialects.md: each path is served, and each field becomes what the page says."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from greenroom.dialects.anthropic.answers import messages_translation
from greenroom.dialects.neutral import AnswerContext, Fields
from greenroom.dialects.ollama.answers import chat_translation
from greenroom.dialects.responses.answers import response_translation
from greenroom.dialects.translation import Translate
from greenroom.errors import BadRequest
from greenroom.serving.routes import MODEL_ROUTES
from tests.docs.pages import section, text_of

PAGE = "docs/dialects.md"
HELLO = [{"role": "user", "content": "hi"}]
CONTEXT = AnswerContext("m", "1", 0.0)
# How the fields below a heading are read, and a body to which they are added.
SECTIONS: dict[str, tuple[Translate, dict[str, Any]]] = {
    "Anthropic": (messages_translation, {"max_tokens": 9, "messages": HELLO}),
    "OpenAI Responses": (response_translation, {"input": "hi"}),
    "Ollama": (chat_translation, {"messages": HELLO}),
}


LINES = [
    (name, *match)
    for name in SECTIONS
    for match in re.findall(r"^\| `(\{.*?\})` \| (?:`(\{.*\})`|(refused)) \|$", section(PAGE, name), re.MULTILINE)
]


def fields_of(body: dict[str, Any]) -> Fields:
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


@pytest.mark.parametrize(("name", "sent", "gets", "refused"), LINES)
def test_a_field_becomes_what_the_page_says(name: str, sent: str, gets: str, refused: str) -> None:
    translate, body = SECTIONS[name]
    fields = fields_of({"model": "m", **body, **json.loads(sent)})
    if refused:
        with pytest.raises(BadRequest) as caught:
            translate(CONTEXT, False).request(fields)
        assert caught.value.param in json.loads(sent)
        return
    made = {key: json.loads(bytes(raw)) for key, raw in translate(CONTEXT, False).request(fields).items()}
    wanted = json.loads(gets)
    assert {key: made.get(key) for key in wanted} == wanted
    plain = set(translate(CONTEXT, False).request(fields_of({"model": "m", **body})))
    beside = {"tools", "tool_choice"} if "tools" in json.loads(sent) else set()
    assert set(made) - plain - beside - set(wanted) == set(), "nothing else is sent"


def test_the_page_has_a_table_for_each_dialect() -> None:
    assert all(sum(line[0] == name for line in LINES) >= 10 for name in SECTIONS)


def test_every_path_of_the_page_is_served_and_every_path_is_on_it() -> None:
    named = set(re.findall(r"^\| `POST (/\S+)` \|", text_of(PAGE), re.MULTILINE))
    served = {path.decode() for path, route in MODEL_ROUTES.items() if route.translate is not None or route.is_native}
    assert served <= named <= served | {"/api/show", "/api/pull", "/models/load", "/models/unload"}
