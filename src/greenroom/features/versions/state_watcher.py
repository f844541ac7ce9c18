"""Follows the file of the desired state: a gateway updates its model to what the trainer has written there.

Owns when the file is read and when a failed update is tried again. The file is read at once when the kernel tells of a
change, and every few seconds in any case: a volume that several machines share tells nothing of what others write. What
is no whole state, and states that are not newer than the last that was taken, change nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable
from typing import Final

from greenroom.base.detached import run_detached
from greenroom.base.repeated import Repeated
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, GatewayState, Part
from greenroom.config.schema import Config
from greenroom.errors import GreenroomError, UpdateInProgress
from greenroom.features.versions.desired import DesiredState, read_state
from greenroom.features.versions.updates import UpdateOrder, Updates
from greenroom.features.versions.weights import TENANT
from greenroom.library.records import Version
from greenroom.telemetry.logs import get_logger

_log = get_logger("versions")

LOOK_EVERY_S: Final = 5.0
# A state that could not be taken is tried again: after so long, then twice as long each time.
RETRY_S: Final = 2.0
RETRY_MAX_S: Final = 120.0


class DesiredStateWatcher(Part):
    def __init__(self, updates: Updates, gateway: GatewayState) -> None:
        self._updates = updates
        self._gateway = gateway
        self._following = Repeated(self._follow, "following the desired state", self._pause_s, _log.failed)
        self._watch = FileWatch(self._following.wake)
        # The state that failed last, and how long to wait before it is tried again.
        self._failed: DesiredState | None = None
        self._retry_s = RETRY_S
        self._retry_at = 0.0
        self._problem: str | None = None
        # True from the start until the file was read for the first time, and what it says was taken or could not be.
        self.is_catching_up = False

    def begin(self) -> None:
        self.is_catching_up = self._gateway.config.versions.state_file is not None
        self._following.wake()
        self._following.start()

    async def draft(self, new: Config, changes: Changes) -> Apply:
        """The configuration may name another file."""
        return self._following.wake

    async def close(self) -> None:
        await self._following.cancel()
        self._watch.close()

    async def _follow(self) -> None:
        path = self._gateway.config.versions.state_file
        # Before the file is read: what is written meanwhile is told.
        self._watch.watch(path)
        try:
            if path is not None and await self._look(path):
                self._following.wake()
        finally:
            self.is_catching_up = False

    async def _look(self, path: str) -> bool:
        """Read the file, and take what it says if that is new. True if it was new: a newer one may be there by now."""
        while (state := await self._read(path)) is not None and (model := self._meant(state)) is not None:
            self._tell_problem(None)
            if state.number <= self._updates.of(model).state:
                self._failed = None
                return False
            if state == self._failed and asyncio.get_running_loop().time() < self._retry_at:
                return False
            try:
                await self._take(model, state)
                return True
            except UpdateInProgress as other:
                # It ends, well or not. Then what the file says by then is taken.
                await self._updates.rest(other)
        return False

    async def _read(self, path: str) -> DesiredState | None:
        try:
            return await run_detached(lambda: read_state(path), "read the desired state")
        except (OSError, ValueError) as error:
            # Perhaps it is just being written.
            self._tell_problem(f"{path} is ignored: {error}")
            return None

    def _meant(self, state: DesiredState) -> str | None:
        config = self._gateway.config
        ours = [name for name, model in config.models.items() if model.versions is not None]
        if (name := state.model or config.versions.default) in ours:
            return name
        if name is None and len(ours) == 1:
            return ours[0]
        self._tell_problem(f"the desired state is for {name or 'one of several models'}, which is not here")
        return None

    async def _take(self, model: str, state: DesiredState) -> None:
        """Raises UpdateInProgress while another update runs."""
        updates, known = self._updates, self._updates.of(model)
        kept = next((version for version in known.kept if state.rollback and _is_of(version, state)), None)
        order = UpdateOrder(state.repo_id, state.revision, state.number, state.allow_gap, kept, state.number)
        try:
            if state.rollback and _is_of(known.current, state):
                await updates.settle(model, state.number)
            else:
                row = await updates.submit(model, order, tenant=TENANT, key=TENANT)
                await updates.ended(row.id)
        except UpdateInProgress:
            raise
        except GreenroomError as error:
            self._back_off(state)
            _log.warning(
                "desired state not taken", model=model, state=state.number, code=error.code, retry_s=self._retry_s
            )
        else:
            self._failed = None

    def _back_off(self, state: DesiredState) -> None:
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S) if state == self._failed else RETRY_S
        self._failed = state
        self._retry_at = asyncio.get_running_loop().time() + self._retry_s

    def _pause_s(self) -> float:
        if self._failed is None:
            return LOOK_EVERY_S
        return min(LOOK_EVERY_S, max(0.05, self._retry_at - asyncio.get_running_loop().time()))

    def _tell_problem(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            _log.warning("desired state ignored", problem=problem)
        self._problem = problem


def _is_of(version: Version | None, state: DesiredState) -> bool:
    return version is not None and (version.repo_id, version.commit) == (state.repo_id, state.revision)


# --- what the kernel tells ------------------------------------------------------------------------------------------

_IN_CLOSE_WRITE, _IN_MOVED_TO = 0x08, 0x80
_EVENT: Final = struct.Struct("iIII")
_READ_BYTES: Final = 64 * 1024


class FileWatch:
    """Calls `changed` when a file was written or replaced, by inotify on its folder. Where there is none, never."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = -1
        self._path: str | None = None

    def watch(self, path: str | None) -> None:
        """From now on this file. A folder that is not there yet is watched by a later call."""
        if path == self._path and (self._fd >= 0 or path is None):
            return
        self.close()
        self._path = path
        if path is None or not hasattr(self._libc, "inotify_init1"):
            return
        fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            return
        folder = os.fsencode(os.path.dirname(path) or ".")
        if self._libc.inotify_add_watch(fd, folder, _IN_CLOSE_WRITE | _IN_MOVED_TO) < 0:
            os.close(fd)
            return
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        try:
            told = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        names, wanted = set(), os.path.basename(os.fsencode(self._path or ""))
        while len(told) >= _EVENT.size:
            *_, length = _EVENT.unpack_from(told)
            names.add(told[_EVENT.size : _EVENT.size + length].rstrip(b"\0"))
            told = told[_EVENT.size + length :]
        # An event without a name is about the folder, which may be gone, or says that events were lost.
        if names & {wanted, b""}:
            self._changed()
        if b"" in names:
            self.close()
