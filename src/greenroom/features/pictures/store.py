"""Pictures that answers name by URLs: files with unguessable names, for a while.

Owns which pictures there are, how long they are served and which make room for others. The files are those of
`files.py`. Nothing survives a restart: what an earlier run left is removed. Never looks into a picture.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from greenroom.base.detached import run_detached
from greenroom.config.part import Part
from greenroom.errors import PictureStoreFull, ResultTooLarge
from greenroom.runtime.operations import files
from greenroom.runtime.operations.files import RETRY_AFTER_S, OperationFiles
from greenroom.runtime.operations.table import ROW_BYTES, KeepLimits
from greenroom.runtime.shell import Shell

Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Picture:
    """Its bytes, and what they are: `media_type` for the client."""

    media_type: str
    content: bytes


@dataclass(frozen=True, slots=True)
class KeptPicture:
    id: str
    tenant: str
    media_type: str
    size: int
    until: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True)
class _FirstLine:
    media_type: str


def make_pictures(shell: Shell) -> PictureStore:
    files, live = OperationFiles(shell.state_dir.path / "pictures"), shell.live
    return PictureStore(files, lambda: KeepLimits.of_pictures(live.config), shell.loop.clock)


class PictureStore(Part):
    writes = True

    def __init__(self, stored: OperationFiles, limits: Callable[[], KeepLimits], clock: Callable[[], float]) -> None:
        self._files = stored
        self._limits = limits
        self._clock = clock
        # Oldest first.
        self._kept: dict[str, KeptPicture] = {}
        self._used_bytes = 0
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        # Pictures that are gone, but for their files.
        self._leaving: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Remove what an earlier run left. Blocks. Raises OSError."""
        self._files.read_rows()

    @property
    def bytes_max(self) -> int:
        return self._limits().bytes_max

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def __len__(self) -> int:
        return len(self._kept)

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, id: str) -> KeptPicture | None:
        """None if there is none, or its time is over."""
        found = self._kept.get(id)
        return None if found is None or found.until <= self._clock() else found

    def seconds_left(self, picture: KeptPicture) -> int:
        """Whole seconds for which it is still served."""
        return max(0, math.floor(picture.until - self._clock()))

    def read(self, id: str) -> Iterator[bytes] | None:
        """None if it is gone. Blocks. What is read stays readable when the picture is removed."""
        try:
            _, file = self._files.read(id, files.RESULT, _FirstLine)
        except OSError:
            return None
        return files.chunks(file)

    # --- keeping ------------------------------------------------------------------------------------------------------

    async def keep(self, tenant: str, pictures: Sequence[Picture]) -> list[str]:
        """All of them, or none; their ids. Raises ResultTooLarge or PictureStoreFull."""
        # A write that has begun cannot be stopped: its files must be known.
        return await asyncio.shield(self._own(self._keep(tenant, pictures)))

    def _own(self, work: Coroutine[Any, Any, Done]) -> asyncio.Task[Done]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # The caller that would have been told may be gone.
            task.exception()

    async def _keep(self, tenant: str, pictures: Sequence[Picture]) -> list[str]:
        async with self._writing:
            self._make_room(sum(len(picture.content) for picture in pictures), len(pictures))
            ids = [f"img-{secrets.token_hex(16)}" for _ in pictures]
            try:
                await run_detached(lambda: self._write(ids, pictures), "write pictures")
            except OSError as error:
                for id in ids:
                    self._files.remove(id, files.PART, files.RESULT)
                raise PictureStoreFull(
                    f"The disk of the state directory does not take it: {error.strerror}.", retry_after_s=RETRY_AFTER_S
                ) from error
            until = self._clock() + self._limits().keep_s
            for id, picture in zip(ids, pictures, strict=True):
                self._kept[id] = KeptPicture(id, tenant, picture.media_type, len(picture.content), until)
                self._used_bytes += len(picture.content)
            self._arm()
            return ids

    def _write(self, ids: Sequence[str], pictures: Sequence[Picture]) -> None:
        self._remove_files()
        for id, picture in zip(ids, pictures, strict=True):
            file = self._files.create_result(id)
            try:
                file.write(files.first_line(_FirstLine(picture.media_type)))
                file.write(picture.content)
                self._files.complete_result(id, file, survives=False)
            except BaseException:
                files.close_unwritten(file)
                raise

    def _make_room(self, size: int, count: int) -> None:
        limits = self._limits()
        if size > limits.bytes_max or count > limits.count_max:
            raise ResultTooLarge(
                f"{count} pictures of {size:,} bytes are more than are kept ({limits.count_max:,} of "
                f"{limits.bytes_max:,} bytes); see `images`."
            )
        self._expire()
        victims = self._by_their_turn()
        while len(self._kept) + count > limits.count_max or self._used_bytes + size > limits.bytes_max:
            self._drop(next(victims))

    def _by_their_turn(self) -> Iterator[KeptPicture]:
        """Each time the oldest of the tenant that keeps most, without those before."""
        of_tenant: dict[str, deque[KeptPicture]] = {}
        for picture in self._kept.values():
            of_tenant.setdefault(picture.tenant, deque()).append(picture)
        fullest = [(-sum(map(_weight, kept)), tenant) for tenant, kept in of_tenant.items()]
        heapq.heapify(fullest)
        while fullest:
            held, tenant = fullest[0]
            picture = of_tenant[tenant].popleft()
            if of_tenant[tenant]:
                heapq.heapreplace(fullest, (held + _weight(picture), tenant))
            else:
                heapq.heappop(fullest)
            yield picture

    def _drop(self, picture: KeptPicture) -> None:
        """It is gone for callers. Its file goes later: removing thousands takes time."""
        del self._kept[picture.id]
        self._used_bytes -= picture.size
        self._leaving.append(picture.id)

    def _remove_files(self) -> None:
        """Blocks."""
        while self._leaving:
            self._files.remove(self._leaving.pop(), files.RESULT)

    # --- their time ---------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self._clock()
        for picture in [picture for picture in self._kept.values() if picture.until <= now]:
            self._drop(picture)

    def _arm(self) -> None:
        if self._timer is None and self._kept:
            first = min(picture.until for picture in self._kept.values())
            self._timer = asyncio.get_running_loop().call_later(max(0.0, first - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._expire()
        self._own(run_detached(self._remove_files, "remove pictures"))
        self._arm()

    async def close(self) -> None:
        """Wait for what is being written, and remove all pictures."""
        if self._timer is not None:
            self._timer.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for picture in list(self._kept.values()):
            self._drop(picture)
        await run_detached(self._remove_files, "remove pictures")


def _weight(picture: KeptPicture) -> int:
    return picture.size + ROW_BYTES
