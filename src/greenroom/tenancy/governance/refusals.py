"""Refused calls in the audit log: the first of a key and reason within a minute, and how many followed.

Owns the folding. A caller without a token can have the log grow by two lines a minute for each reason there is,
whatever it sends; a log that kept its size by dropping old lines would let it push out what was permitted. What a crash
loses is at most a minute's counts, of calls that did nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from greenroom.errors import AuditUnavailable

FOLD_S: Final = 60.0
Subject = tuple[str, str]


@dataclass(slots=True)
class _Folded:
    """The calls after the first."""

    timer: asyncio.TimerHandle
    count: int = 0
    last_at: int = 0
    last_request: str = ""
    operations: set[str] = field(default_factory=set)

    def add(self, fields: Mapping[str, Any]) -> None:
        self.count += 1
        self.last_at, self.last_request = int(time.time()), str(fields.get("request", ""))
        if operation := fields.get("operation"):
            self.operations.add(operation)


class Refusals:
    """`append` writes a line of the log. A line that cannot be written is counted; the call is refused in any case."""

    def __init__(self, append: Callable[[Mapping[str, Any]], Awaitable[None]], fold_s: float = FOLD_S) -> None:
        self._append = append
        self._fold_s = fold_s
        # By the name of the key and the code: both are few, whatever callers send.
        self._folded: dict[Subject, _Folded] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    async def add(self, fields: Mapping[str, Any]) -> None:
        """Write down a refused call, or count it. `fields` has its `code`, and its `key` if it has one."""
        subject = (str(fields.get("key", "")), str(fields["code"]))
        if (folded := self._folded.get(subject)) is not None:
            folded.add(fields)
            return
        timer = asyncio.get_running_loop().call_later(self._fold_s, self._end, subject)
        self._folded[subject] = folded = _Folded(timer)
        try:
            await self._append({"event": "refused", **fields})
        except AuditUnavailable:
            folded.add(fields)

    async def close(self) -> None:
        """Write down all that is counted, if there is room."""
        self._is_closed = True
        for subject, folded in list(self._folded.items()):
            folded.timer.cancel()
            self._end(subject)
        if self._writing:
            await asyncio.wait(self._writing)

    def _end(self, subject: Subject) -> None:
        folded = self._folded.pop(subject)
        if not folded.count:
            return
        task = asyncio.get_running_loop().create_task(self._write(subject, folded), name="audit refusals")
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, subject: Subject, folded: _Folded) -> None:
        key, code = subject
        last = {"lastAt": folded.last_at, "lastRequest": folded.last_request}
        told = {"repeats": folded.count, "operations": sorted(folded.operations), **last}
        try:
            await self._append({"event": "refused", "key": key, "code": code, **told})
        except AuditUnavailable:
            if self._is_closed:
                return
            # Counted again, for a disk that has room later.
            timer = asyncio.get_running_loop().call_later(self._fold_s, self._end, subject)
            later = self._folded.setdefault(subject, _Folded(timer))
            if later.timer is not timer:
                timer.cancel()
            later.count += folded.count
            later.operations |= folded.operations
