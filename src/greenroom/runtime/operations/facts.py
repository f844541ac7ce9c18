"""What is kept of an operation beside its row when it has ended: one record, as its result. For operations whose answer
is no file: downloads and loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from greenroom.base.detached import run_detached
from greenroom.errors import GatewayBug, GreenroomError
from greenroom.runtime.operations.files import OperationError, OperationStatus
from greenroom.runtime.operations.table import OperationTable

Facts = TypeVar("Facts")


def error_of(error: GreenroomError) -> OperationError:
    """As its row tells it: of a bug, callers never see more than that there is one."""
    is_bug = isinstance(error, GatewayBug)
    return OperationError(error.code, "Something went wrong in the gateway." if is_bug else error.message)


async def end_with(
    table: OperationTable, id: str, status: OperationStatus, error: OperationError | None, facts: object
) -> None:
    """End it with these facts, or without them if there is no room: they are not worth failing for."""
    result = None
    try:
        result = table.result(id)
        result.write_head(facts)
    except GreenroomError:
        if result is not None:
            result.discard()
            result = None
    await table.end(id, status, error, result)


async def facts_of(table: OperationTable, ids: Sequence[str], kind: type[Facts]) -> dict[str, Facts]:
    """The facts of operations that have ended; those without are left out."""
    return await run_detached(lambda: _read(table, ids, kind), "read operations") if ids else {}


def _read(table: OperationTable, ids: Sequence[str], kind: type[Facts]) -> dict[str, Facts]:
    found = {}
    for id in ids:
        kept = table.read_result(id, kind)
        if kept is not None:
            found[id], rest = kept
            # Nothing follows; reading to the end closes the file.
            for _ in rest:
                pass
    return found
