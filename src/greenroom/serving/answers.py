"""Answers that do not simply pass from the engine to the client: kept for later, or made anew from the whole answer.

Owns the seams between the request that is served and what becomes of its answer. `features/jobs/jobs.py` keeps answers;
`features/pictures/answers.py` makes URLs of pictures.
"""

from __future__ import annotations

from typing import Final, Protocol

from greenroom.errors import BadRequest, GreenroomError
from greenroom.http.body import Body
from greenroom.http.headers import Headers
from greenroom.http.request import Head
from greenroom.runtime.slots import LiveSlot

# The field by which a caller chooses how it gets pictures, and its values.
RESPONSE_FORMAT: Final = "response_format"
AS_URL: Final = "url"
AS_BASE64: Final = "b64_json"


class LaterAnswer(Protocol):
    """A request whose answer is kept, as far as serving it differs."""

    @property
    def may_run_again(self) -> bool:
        """Whether it may be sent once more if the engine is lost before its first byte."""
        ...

    async def starts(self, slot: LiveSlot) -> None:
        """Called before the engine of this slot is sent anything. Raises the error that keeps it from that."""
        ...

    def is_put_back(self, error: GreenroomError | None) -> bool:
        """True if this end is none: it is run again later."""
        ...

    def ended(self, error: GreenroomError | None) -> None:
        """Called once, after the request was recorded."""
        ...


class RemadeAnswer(Protocol):
    """Makes one request's answer from the whole answer of its engine."""

    @property
    def bytes_max(self) -> int:
        """Longer answers of engines are refused."""
        ...

    def body(self) -> Body:
        """Where the engine's answer is collected."""
        ...

    async def remade(self, status: int, headers: Headers, body: Body) -> tuple[int, Headers, bytes]:
        """Status, headers and body for the client. Closes `body`. Raises the error to answer with."""
        ...


class PictureUrls(Protocol):
    """Replaces the pictures in answers by URLs."""

    def for_request(self, head: Head, tenant: str, model: str) -> RemadeAnswer:
        """Raises BadRequest if no URL can be made for this request."""
        ...


def expect_no_stream(stream: bool) -> None:
    """Raises BadRequest: the pictures of a stream are parts of its events."""
    if stream:
        raise BadRequest(
            f"A stream of pictures has no URLs; ask for {RESPONSE_FORMAT} {AS_BASE64}, or without stream.",
            param=RESPONSE_FORMAT,
        )
