"""`/v1/chat/completions`: a conversation in, the next message out.

Owns how a request of this kind becomes sequences. Writing the answer is `chat_written.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sandbox.grammar import JsonConstraint
from ..text.conversation import read_messages
from ..text.harmony import ANSWER_HEADER, HarmonyReader
from ..text.tool_calls import CALL_TOKENS, CallReader
from ..text.tools import Tools, form_of, read_tools
from .answering import answer_stream, answer_whole
from .chat_written import ChatDialect
from .fields import Body, boolean, integer, mapping
from .http import Answer
from .model_context import House, Origin, Reading
from .refusals import Refused
from .sampling_params import LOGPROBS_MAX, read_wishes


async def chat(house: House, body: Body, origin: Origin, answer: Answer) -> None:
    """Answer this conversation. Raises Refused before anything was sent, or out of a stream that has begun."""
    logprobs = _logprobs(body)
    wishes = read_wishes(body, logprobs, house.performer.limits.choices)
    tools = read_tools(body)
    messages = read_messages(body, "developer" in house.template.source, thinks=house.harmony is not None)
    switches = mapping(body, "chat_template_kwargs") or {}
    form = form_of(house.template.source)
    constraint = await _constraint(house, body, tools)
    prompt = await house.template.render(messages, tools.shown, switches, house.performer.context)
    if house.harmony is not None and constraint is not None:
        prompt += ANSWER_HEADER
    tokens = await house.text.encode(prompt, False, house.performer.context, "messages")
    house.check(tokens, "messages")

    score = house.score([tokens], wishes, origin, constraint, reading=_reading(house, tools, constraint is not None))
    dialect = ChatDialect(house.model, house.text.speller, form, wishes.tells_usage, logprobs is not None)
    if wishes.streams:
        await answer_stream(house.performer, score, dialect, answer, wishes.tells_usage)
    else:
        await answer_whole(house.performer, score, dialect, answer)


def _reading(house: House, tools: Tools, is_held: bool) -> Reading:
    """How the answer is read. One that is held to a schema has no marks of any format."""
    names = tools.names if tools.may_be_called else frozenset()
    if house.harmony is not None and not is_held:
        return Reading(lambda: HarmonyReader(names), marks=house.harmony.marks, stops=house.harmony.stops)
    if not tools.may_be_called:
        return Reading()
    return Reading(lambda: CallReader(names), spoken=house.text.specials_spelled(CALL_TOKENS))


def _logprobs(body: Body) -> int | None:
    top = integer(body, "top_logprobs", 0, LOGPROBS_MAX)
    if boolean(body, "logprobs"):
        return top or 0
    if top:
        raise Refused("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


async def _constraint(house: House, body: Body, tools: Tools) -> JsonConstraint | None:
    """A tool that must be called is a schema like any other; it comes before the answer's own."""
    forced = tools.forced_schema(form_of(house.template.source))
    if forced is not None:
        return await house.grammars.constraint(forced, strict=False, param="tools")
    wanted = _response_schema(mapping(body, "response_format") or {})
    if wanted is None:
        return None
    schema, strict = wanted
    return await house.grammars.constraint(schema, strict, "response_format")


def _response_schema(wanted: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool] | None:
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}, True
    said = wanted.get("json_schema")
    if kind != "json_schema" or not isinstance(said, dict):
        raise Refused(
            "response_format must be of type text, json_object or json_schema, the last with a json_schema object.",
            param="response_format",
        )
    schema = said.get("schema", {})
    if not isinstance(schema, dict):
        raise Refused("response_format: json_schema.schema must be an object.", param="response_format")
    return schema, boolean(said, "strict")
