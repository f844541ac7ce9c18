"""All keys that count at present: those of the configuration and those of the key file, which is followed.

Owns the last good set of the file. Looks at the file each second, in a thread, and reads it when it changed. A file
that is missing, broken, half written or open to other users changes nothing: the last good set goes on, and `problems`
says why. Requests are checked at their headers, so a revoked key is refused at its next request and answers that have
begun go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from greenroom.access.key_file import FileKey, joined, read_keys
from greenroom.access.keys import ANYONE, BY_TOKENS, Keys
from greenroom.base.detached import run_detached
from greenroom.base.plain_file import why
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.problems import is_reachable_without_keys
from greenroom.config.schema import Config, Server
from greenroom.errors import ConfigError

LOOK_EVERY_S: Final = 1.0
# A local file takes microseconds; a file server that takes longer is told as a problem.
ANSWER_MAX_S: Final = 10.0
NO_KEYS: Final = Server()
_NO_ANSWER: Final = "its disk does not answer"

Mark = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the file. `keys` is None if they were not read again, or if they could not be: then `problem` is."""

    mark: Mark | None = None
    keys: tuple[FileKey, ...] | None = None
    problem: str | None = None


# Runs blocking work in a thread: the work, and a name for the thread.
Run = Callable[[Callable[[], Look], str], Awaitable[Look]]


class KeyRing(Part):
    name = "the key file"

    def __init__(
        self,
        changed: Callable[[], None],
        server: Server = NO_KEYS,
        *,
        run: Run = run_detached,
        look_every_s: float = LOOK_EVERY_S,
        answer_max_s: float = ANSWER_MAX_S,
    ) -> None:
        """`changed` is called when the file's keys, or its problems, are others than before."""
        self._run = run
        self._changed = changed
        self._look_every_s = look_every_s
        self._answer_max_s = answer_max_s
        self._server = server
        self._last = Look()
        # The last good keys of the file, revoked ones included.
        self.of_file: tuple[FileKey, ...] = ()
        # A file can change twice within one tick of its clock: what is new is read once more at the next look.
        self._reads_again = False
        self._following: asyncio.Task[None] | None = None
        self.keys = Keys()
        self.problems: tuple[str, ...] = ()
        self._join()

    @property
    def path(self) -> str | None:
        return self._server.key_file

    async def open(self) -> None:
        """Read the file. What is wrong with it prevents no start: its callers are refused until it is mended."""
        self.use(self._server, await self.look(self.path))

    async def draft(self, new: Config, changes: Changes) -> Apply:
        look = await self.look(new.server.key_file)
        if look.problem is not None and new.server.key_file != self.path:
            raise ConfigError(f"server.key_file: {look.problem}. Nothing was changed")
        return partial(self.use, new.server, look)

    async def look(self, path: str | None) -> Look:
        """Read the file. Never raises, in bounded time."""
        if path is None:
            return Look()
        looking = asyncio.ensure_future(self._run(lambda: _looked(path, None), "read keys"))
        done, _ = await asyncio.wait((looking,), timeout=self._answer_max_s)
        if done:
            bug = looking.exception()
            return looking.result() if bug is None else _unread(path, repr(bug))
        looking.cancel()
        return _unread(path, _NO_ANSWER)

    def use(self, server: Server, look: Look | None = None) -> None:
        """Go by this configuration from now on, and by this look at its file."""
        is_other = server.key_file != self.path
        self._server = server
        if is_other:
            self.of_file, self._last = (), Look()
            if self._following is not None:
                self._following.cancel()
                self.begin()
        is_new = look is not None and self._take(look)
        self._join()
        if is_new:
            self._changed()

    def begin(self) -> None:
        """Look at the file from time to time, until `close`."""
        self._following = asyncio.get_running_loop().create_task(self._follow(self.path), name="follow keys")

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))

    async def _follow(self, path: str | None) -> None:
        while path is not None:
            try:
                # The pause needs memory, too: where there is none, others have their turn all the same.
                await asyncio.sleep(0)
                await asyncio.sleep(self._look_every_s)
                known = None if self._reads_again else self._last.mark
                self._use_look(await self._answered(path, known))
            except Exception as bug:
                # The next look reads the file again. Without one, a key that is revoked would be good for ever.
                with contextlib.suppress(MemoryError):
                    self._take(_unread(path, repr(bug)))
                    self._join()

    async def _answered(self, path: str, known: Mark | None) -> Look:
        """One look, however long it takes: a second thread would hang, too. Says when it takes long."""
        looking = asyncio.ensure_future(self._run(lambda: _looked(path, known), "read keys"))
        try:
            done, _ = await asyncio.wait((looking,), timeout=self._answer_max_s)
            if not done:
                self._use_look(_unread(path, _NO_ANSWER))
            return await looking
        finally:
            looking.cancel()

    def _use_look(self, look: Look) -> None:
        if self._take(look):
            self._join()
            self._changed()

    def _take(self, look: Look) -> bool:
        """True if keys or problem are others than before."""
        before, self._last = self._last, look
        self._reads_again = look.mark != before.mark
        is_new = look.problem != before.problem
        if look.keys is not None and look.keys != self.of_file:
            self.of_file, is_new = look.keys, True
        return is_new

    def _join(self) -> None:
        keys, left_out = joined(self._server.api_keys, self.of_file)
        unkeyed = BY_TOKENS if is_reachable_without_keys(self._server) else ANYONE
        self.keys = Keys(keys, is_required=self._server.has_keys, unkeyed=unkeyed)
        self.problems = tuple(left_out) if self._last.problem is None else (self._last.problem, *left_out)


def _unread(path: str, why: str) -> Look:
    return Look(problem=f"the key file {path} cannot be read: {why}")


def _looked(path: str, known: Mark | None) -> Look:
    """In a thread. A file whose mark is `known` is not read again."""
    try:
        seen = os.stat(path)
        mark = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_mode)
        return Look(mark) if mark == known else Look(mark, read_keys(path))
    except FileNotFoundError:
        return Look(problem=f"the key file {path} is missing; `greenroom key new` makes it")
    except ConfigError as error:
        return Look(problem=error.message)
    except OSError as error:
        return _unread(path, why(error))
