"""A long JSON body while its request is read: what that costs is spread over turns, or done in a thread.

Owns which results are there already. A reader asks for each as if it were; where one is missing it raises `Pending`,
and is called again once that is done. So a reader has one text for short and for long bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final, TypeVar

from greenroom.base.detached import run_detached
from greenroom.errors import BadRequest, GreenroomError
from greenroom.http.body import Body
from greenroom.serving.body.outline import Outline, outline_of

# Bodies up to this size are read at once, and so is what is left of longer ones if it is not more.
SHORT_BYTES: Final = 64 * 1024

# So many separators, those in texts included, cannot be more values than take some milliseconds.
FEW_SEPARATORS: Final = 6_000

Result = TypeVar("Result")


def is_plain(body: Body, values_max: int) -> bool:
    """True for a body in memory that has few values: it can be read at once, though it is above SHORT_BYTES."""
    if body.is_spooled:
        return False
    text = body.read()
    return text.count(b",") + text.count(b"[") + text.count(b"{") <= min(FEW_SEPARATORS, values_max)


class Pending(Exception):
    """Await `step` and read again."""

    def __init__(self, step: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.step = step


class LongBodies:
    """One step of one long body is done at a time, so that many of them take no more of a turn than one."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def of(self, body: Body, values_max: int) -> LongBody:
        return LongBody(self._turn, body, values_max)


class LongBody:
    """One body. What is done in a thread must not touch what requests share."""

    __slots__ = ("_body", "_outline", "_results", "_turn", "_values_max")

    def __init__(self, turn: asyncio.Lock, body: Body, values_max: int) -> None:
        self._turn = turn
        self._body = body
        self._values_max = values_max
        self._outline: Outline | None = None
        self._results: dict[Hashable, Any] = {}

    @property
    def outline(self) -> Outline:
        """Raises Pending."""
        if self._outline is None:
            raise Pending(self.scan)
        return self._outline

    @property
    def is_heavy(self) -> bool:
        """What is left of it is long, too. Raises Pending."""
        return len(self.outline.text) > SHORT_BYTES

    def done(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. Raises Pending if that is not done yet."""
        if not self.is_heavy:
            return work()
        if key not in self._results:
            raise Pending(lambda: self._do(key, work))
        result: Result | GreenroomError = self._results[key]
        if isinstance(result, GreenroomError):
            raise result
        return result

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """The same at once, without keeping it."""
        if not self.is_heavy:
            return work()
        async with self._turn:
            return await run_detached(work, "read a long body")

    async def _do(self, key: Hashable, work: Callable[[], object]) -> None:
        try:
            self._results[key] = await self.in_thread(work)
        except GreenroomError as error:
            self._results[key] = error

    async def scan(self) -> None:
        """Make the outline. Raises BadRequest and BodiesFull."""
        outline = await outline_of(self._body, self._values_max, self._turn)
        if not outline.text.strip():
            raise BadRequest("The body is empty; send a JSON object that names a model.")
        # It is kept until the request has ended: to read the body once more would take as long as this.
        self._outline = outline
