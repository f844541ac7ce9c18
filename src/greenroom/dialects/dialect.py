"""What a dialect is, which is an API that clients know, and what its routes to models are.

Each dialect has a folder: `__init__.py` has its record and its routes, `requests.py` and `answers.py` are the two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Raw

from greenroom.config.schema import Ability
from greenroom.dialects.errors import ErrorShape
from greenroom.dialects.heartbeat import TEXT, StreamShape
from greenroom.dialects.neutral import Fields
from greenroom.dialects.route_docs import RouteDoc
from greenroom.dialects.translation import Translate
from greenroom.errors import BadRequest

Read = Callable[[Raw], object]
# Larger fields of a body are left to the engine.
READ_BYTES_MAX: Final = 256 * 1024
_NULL: Final = Raw(b"null")
# Values that hold nothing to answer.
_NOTHING: Final = (_NULL, Raw(b"[]"), Raw(b"{}"))
_NOTHING_BYTES: Final = 4


class BodyCheck:
    """`needs`: of each of these, one field must hold something. `reads`: how fields are read that have a type; that of
    a content tells True if it is text alone."""

    __slots__ = ("_needs", "_reads")

    def __init__(self, *needs: tuple[str, ...], reads: dict[str, Read]) -> None:
        self._needs = needs
        self._reads = reads

    def check(self, fields: Fields, size: int, puts: dict[str, bytes], drops: frozenset[str]) -> str:
        """The last field that is text alone, if one was read. Raises BadRequest, which names the field.

        `size` is the body's. What the operator sets (`puts`) or strips (`drops`) is not read, and large fields are not
        either: the event loop waits for what is read here.
        """
        for names in self._needs:
            for name in names:
                raw = fields.get(name)
                if (raw is not None and (len(raw) > _NOTHING_BYTES or raw not in _NOTHING)) or name in puts:
                    break
            else:
                raise BadRequest(f"{' or '.join(names)} is missing or empty.", param=names[0])
        if size > READ_BYTES_MAX:
            fields = {name: raw for name, raw in fields.items() if len(raw) <= READ_BYTES_MAX}
        reads, name, plain = self._reads, "", ""
        try:
            for name, raw in fields.items():
                read = reads.get(name)
                if read is not None and name not in puts and name not in drops and read(raw) is True:
                    plain = name
        except (msgspec.DecodeError, ValueError) as error:
            raise BadRequest(f"{name}: {error}.", param=name) from None
        except RecursionError:
            raise BadRequest(f"{name} is nested too deeply.", param=name) from None
        return plain


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How models are listed where a request has this header: each by its id, its name and when it was made."""

    header: str
    one: Callable[[str, str | None, int], dict[str, Any]]
    all: Callable[[list[tuple[str, str | None, int]]], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """`meant` tells which model a name means, given whether the caller can ask for one; None: the one of that name.

    `pages`: paths which the management API answers, and whose errors have this dialect's shape.
    """

    name: str
    errors: ErrorShape
    meant: Callable[[str, Callable[[str], bool]], str] | None = None
    models: ModelShape | None = None
    pages: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is its label in metrics; `shape` what an empty event of its stream looks like.

    `is_text`: it sends a text whose beginning a cache may know, and gets one whose tokens are counted.
    `form`: it takes a form, which must have these fields beside `model`. `makes_pictures`: its answer has pictures.
    `is_sound`: its answer is counted by the length of the sound that was heard or made.
    `translate`: how it becomes OpenAI's chat; None: it goes to the engine as it is.
    `is_native`: a route of engines, open to models whose engine has it. `is_promptless`: it computes no prompt.
    `can_stream`: False where an answer is always one piece. `streams_unless_told`: it streams if the body is silent.
    `sent_to`: the path of engines for it; None: the caller's.
    `check`: what its body must hold, where it is passed on as it is.
    `doc`: for the document of the API; None: it is not in that.
    `has_prompt`: its engine may keep what it computed for the request, and find it again for another one.
    """

    name: str
    dialect: Dialect
    ability: Ability | None = None
    shape: StreamShape = TEXT
    form: tuple[str, ...] = ()
    is_text: bool = False
    makes_pictures: bool = False
    is_sound: bool = False
    translate: Translate | None = None
    is_native: bool = False
    is_promptless: bool = False
    can_stream: bool = True
    streams_unless_told: bool = False
    sent_to: bytes | None = None
    check: BodyCheck | None = None
    doc: RouteDoc | None = None
    has_prompt: bool = field(init=False)

    def __post_init__(self) -> None:
        of_texts = self.ability in (Ability.EMBEDDINGS, Ability.RERANK)
        has_prompt = self.is_text or of_texts or (self.is_native and not self.is_promptless)
        object.__setattr__(self, "has_prompt", has_prompt)

    def is_stream(self, asked: bool, fields: Mapping[str, Raw]) -> bool:
        """Whether the answer streams, where the field `stream` was read as `asked`."""
        said = bytes(fields.get("stream", _NULL))
        return self.can_stream and (asked or (self.streams_unless_told and said == b"null"))
