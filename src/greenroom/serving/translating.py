"""How a request of another dialect, or to a route of the engines' own, is put to the engine of its model.

Owns the choice between passing on and translating, and what is refused before anything is loaded.
"""

from __future__ import annotations

import secrets
import time

from greenroom.config.schema import Ability
from greenroom.dialects.chat import has_images
from greenroom.dialects.dialect import Route
from greenroom.dialects.llama_server.tokenize import TOKENIZE_PATH, tokenize_translation
from greenroom.dialects.neutral import AnswerContext
from greenroom.dialects.translation import Translate, Translation, pass_through
from greenroom.engines.base import LLAMACPP_PATHS, VLLM_PATHS
from greenroom.errors import NoAbility
from greenroom.http.body import Body
from greenroom.runtime.catalogue import Entry
from greenroom.serving.body.long_body import LongBody
from greenroom.serving.body.media import check_body
from greenroom.serving.body.peek import BodyFields, Fields


def translated(
    route: Route, translate: Translate, entry: Entry, target: bytes, peeked: BodyFields, name: str, stream: bool
) -> tuple[Translation, bytes]:
    """The translation into a dialect that the engine has, and the target there; `name` is the model in its answer.

    Raises BadRequest for what cannot be said in it.
    """
    if peeked.long is None:
        translation, fields, has_pictures = _translated(translate, name, stream, peeked.fields)
    else:
        said = peeked.fields
        key, work = ("translated", entry.id), lambda: _translated(translate, name, stream, said)
        translation, fields, has_pictures = peeked.long.done(key, work)
    abilities = entry.facts.abilities
    if abilities is not None and Ability.VISION not in abilities and has_pictures:
        raise NoAbility(f"{entry.id} does not do vision; send it no pictures.", param="model")
    if target.partition(b"?")[0].decode() in entry.engine.speaks:
        return pass_through(route.dialect.errors, target), target
    peeked.fields = fields
    return translation, translation.path


def _translated(translate: Translate, name: str, stream: bool, said: Fields) -> tuple[Translation, Fields, bool]:
    """Also says whether it has pictures. The fields are read in any case: an engine may break where a mistake should
    be named."""
    translation = translate(AnswerContext(name, secrets.token_hex(12), time.time()), stream)
    fields = translation.request(said)
    return translation, fields, has_images(fields)


def check_whole(entry: Entry, body: Body, long: LongBody | None, refused: frozenset[str] = frozenset()) -> None:
    """`check_body` for what an engine gets as it was sent. Raises what that raises, and Pending."""
    hosts = entry.config.media_hosts
    if long is None:
        check_body(body.read(), hosts, refused)
    else:
        text = long.outline.text
        long.done(("whole", entry.id), lambda: check_body(text, hosts, refused))


def check_native(entry: Entry, target: bytes, peeked: BodyFields, body: Body) -> Translation | None:
    """The translation that such a request needs, if any.

    Raises NoAbility if the engine has no such route, MediaRefused, or BadRequest.
    """
    engine, path = entry.engine, target.partition(b"?")[0]
    if path.decode() not in engine.speaks:
        has = ", ".join(sorted(engine.speaks)) or "none"
        raise NoAbility(f"The engine of {entry.id} has no {path.decode()}; it has: {has}.", param="model")
    if engine.fetches_media:
        check_whole(entry, body, peeked.long)
    # Of a program that may be either, the caller must know which it is.
    if path == TOKENIZE_PATH and not engine.speaks >= LLAMACPP_PATHS | VLLM_PATHS:
        translation = tokenize_translation(peeked.fields, engine_is_vllm=engine.speaks >= VLLM_PATHS)
        if translation is not None:
            peeked.fields = translation.request(peeked.fields)
        return translation
    return None
