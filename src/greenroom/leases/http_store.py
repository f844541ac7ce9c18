"""A client of a gateway's lease API over HTTP.

Owns the calls and the translation of answers and errors. Each call has its own connection and thread. A cancelled call
cuts its connection, by which the gateway sees that its caller has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Final, TypeVar
from urllib.parse import quote

from greenroom.base.detached import run_detached
from greenroom.base.json_client import NO_ANSWER, WHOLE_MAX, Call, Fields, json_of, origin_of, reason
from greenroom.errors import (
    BadRequest,
    GreenroomError,
    InvalidKey,
    LeaseDenied,
    LeaseLost,
    LeaseTaken,
    LeaseTooLarge,
    LeaseUnknown,
    NotAllowed,
    StoreDown,
)
from greenroom.leases.records import Holder, Lease, LeaseAsk, is_program_id

PATH: Final = "/api/v1/leases"
# Beyond the wait that was asked for: the gateway decides at once and writes one line to disk.
ANSWER_MAX_S: Final = 30.0
# Of seconds to wait.
DIGITS_MAX: Final = 9
_BY_CODE: Final = {one.code: one for one in (LeaseDenied, LeaseLost, LeaseTaken, LeaseUnknown)}
_BY_STATUS: Final = {401: InvalidKey, 403: NotAllowed, 408: StoreDown, 429: StoreDown}

Result = TypeVar("Result")


class HttpStore:
    def __init__(
        self, url: str, key: str | None = None, *, answer_max_s: float = ANSWER_MAX_S, op_token: str | None = None
    ) -> None:
        """Raises BadRequest for an invalid address. Connects to nothing yet. `op_token` permits the first lease."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._op_token = op_token
        self._answer_max_s = answer_max_s
        try:
            origin = origin_of(url, key)
        except ValueError as error:
            raise BadRequest(f"{url} is no address: {error}.") from None
        if origin is None:
            raise BadRequest(f"{url} is no address of a gateway; write it like http://127.0.0.1:8210.")
        self._origin = origin

    async def acquire(self, ask: LeaseAsk) -> Lease:
        # Whole seconds as whole numbers, which have one canonical form.
        body = {
            key: int(one) if isinstance(one, float) and one.is_integer() else one for key, one in asdict(ask).items()
        }
        # Only gateways use these, and not between each other.
        del body["shares"]
        return await self._call("POST", PATH, body, _lease, ask.wait_s + self._answer_max_s)

    async def renew(self, id: str, token: int) -> Lease:
        if not is_program_id(id):
            raise LeaseUnknown(f"There is no lease {id!r}: no program's lease is called so.")
        return await self._call("POST", f"{_path(id)}/renew", {"token": token}, _lease)

    async def release(self, id: str, token: int | None = None) -> None:
        query = "" if token is None else f"?token={token}"
        if is_program_id(id):
            await self._call("DELETE", _path(id) + query, None, lambda nothing: None)

    async def leases(self) -> list[Lease]:
        return await self._call("GET", PATH, None, lambda said: [_lease(one) for one in said.each("leases")])

    async def close(self) -> None:
        """Nothing is kept open between calls."""

    async def _call(
        self, method: str, path: str, body: object, read: Callable[[Fields], Result], answer_max_s: float | None = None
    ) -> Result:
        call = Call(self._origin, method, path, body, answer_max_s or self._answer_max_s, self._op_token)
        try:
            status, headers, content = await run_detached(call.answer, "call the gateway")
        except NO_ANSWER as error:
            raise StoreDown(
                f"The gateway at {self._url} does not answer ({reason(error)}).", retry_after_s=1.0
            ) from None
        finally:
            # Its caller may have left.
            call.cut()
        try:
            # A release has no answer but its status.
            said = Fields(json_of(content) if content else {})
            if status < 300:
                return read(said)
            raise _error(status, headers, said.inner("error"))
        except ValueError:
            raise StoreDown(f"What answers at {self._url} is no gateway (status {status}).") from None


def _path(lease: str) -> str:
    return f"{PATH}/{quote(lease, safe='')}"


def _lease(said: Fields) -> Lease:
    holder = said.inner_or_none("holder")
    return Lease(
        id=said.text("id"),
        name=said.text("name"),
        token=said.whole("token"),
        claim=said.inner("claim").wholes(),
        priority=said.whole("priority", -WHOLE_MAX),
        preemptible=said.flag("preemptible"),
        state=said.text("state"),
        ttl_s=said.number("ttl_s"),
        expires_in_s=said.number("expires_in_s"),
        recall_in_s=said.number_or_none("recall_in_s"),
        holder=None if holder is None else _holder(holder),
        kind=said.text("kind"),
    )


def _holder(said: Fields) -> Holder:
    return Holder(said.text("host"), said.whole("pid"), said.whole("start_ticks"), said.whole("pid_ns"))


def _error(status: int, headers: Mapping[str, str], said: Fields) -> GreenroomError:
    """The gateway's error, with its message and numbers."""
    message, code = said.text("message"), said.text("code")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or (StoreDown if status >= 500 else BadRequest)
    if kind is LeaseDenied and headers.get("x-should-retry") == "false":
        kind = LeaseTooLarge
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() and len(retry_after) <= DIGITS_MAX else None
    beside = said.except_for(_SHOWN)
    return kind(message, param=said.text_or_none("param"), retry_after_s=retry_after_s, beside=beside)


_SHOWN: Final = frozenset({"message", "type", "code", "param", "details"})
