"""Which tokens were used: each nonce once, over restarts.

Owns the journal of this gateway. A nonce is on disk before anything happens. What the journal does not remember it
refuses by the time of issue: tokens as old as a nonce that was forgotten, and tokens that may have been used before the
journal began. So a clock that is set back, or a lost journal, lets no token be used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import FileTooLarge, NotPlainFile, append_whole, read_plain, replaced, sync_folder
from greenroom.errors import ConfigError, NoncesUnavailable, TokenBeforeStart, TokenReplayed

# Longer than any token may live (`window_s` and the skew at most), so that a changed window lets none be used again.
KEEP_S: Final = 86_400 + 2 * 300
# Each costs a signature of the keys' holders.
NONCES_MAX: Final = 100_000
# Forgotten nonces leave the file when they are so many more than those that are kept.
SLACK: Final = 10_000
WRITE_MAX_S: Final = 10.0
JOURNAL_BYTES_MAX: Final = 64 * 1024 * 1024
_HEAD: Final = re.compile(rb"greenroom nonces 1 after ([0-9]{1,16})")
_LINE: Final = re.compile(rb"([0-9]{1,16}) ([0-9a-f]{64})")

# Runs blocking work in a thread: the work, and a name for the thread.
Run = Callable[[Callable[[], None], str], Awaitable[None]]


class Nonces(Protocol):
    """`issued_at` is the token's, in whole seconds; `now` the wall clock."""

    async def open(self, now: float) -> None:
        """Make ready. Raises ConfigError if that can never work."""
        ...

    async def consume(self, nonce: str, issued_at: int, now: float) -> None:
        """Use it up. Raises TokenReplayed, TokenBeforeStart, or NoncesUnavailable where that cannot be known."""
        ...

    async def close(self) -> None: ...


def key_of(nonce: str) -> str:
    """Its name in a store: of one length, and nothing that a caller could choose."""
    return hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).hexdigest()


def replayed() -> TokenReplayed:
    return TokenReplayed("The token was used before; each permits one call. Sign a new one.")


def full() -> NoncesUnavailable:
    return NoncesUnavailable(
        f"{NONCES_MAX:,} tokens were used within a day; none is accepted until the first of them is forgotten.",
        retry_after_s=60.0,
    )


def before_start(after: float) -> TokenBeforeStart:
    return TokenBeforeStart(
        "The token was issued before this server knew which tokens were used. Sign a new one"
        f"{'' if not after else f', issued after {after:.0f}'}."
    )


class NonceJournal:
    """A file of this gateway alone. `skew_s` is how far clocks may differ. With `is_first` its folder was made by this
    start, so that no journal was lost there."""

    def __init__(self, path: Path, skew_s: float, run: Run = run_detached, *, is_first: bool = False) -> None:
        self._path = path
        self._skew_s = skew_s
        self._is_first = is_first
        self._run = run
        self._used: dict[str, int] = {}
        # Tokens issued at or before this may have been used.
        self._after = 0
        self._lines = 0
        self._fd: int | None = None
        self._writing = threading.Lock()

    async def open(self, now: float) -> None:
        try:
            await self._run(lambda: self._open(now), "read nonces")
        except OSError as error:
            raise ConfigError(f"governance: {self._path} cannot be used: {error.strerror or error}") from None

    async def consume(self, nonce: str, issued_at: int, now: float) -> None:
        key = key_of(nonce)
        if issued_at <= self._after:
            raise before_start(self._after)
        if key in self._used:
            raise replayed()
        self._forget(now)
        if len(self._used) >= NONCES_MAX:
            raise full()
        # Taken before the disk answers: the same token may come again meanwhile. It stays used if the disk fails.
        self._used[key] = issued_at
        try:
            async with asyncio.timeout(WRITE_MAX_S):
                await self._run(lambda: self._append(key, issued_at), "write nonce")
        except (OSError, TimeoutError) as error:
            said = getattr(error, "strerror", None) or "the disk does not answer"
            raise NoncesUnavailable(f"{self._path} cannot be written: {said}.", retry_after_s=5.0) from None

    async def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _forget(self, now: float) -> None:
        """Nonces of tokens that are refused for their age are not needed."""
        oldest = now - KEEP_S
        old = [key for key, issued_at in self._used.items() if issued_at < oldest]
        for key in old:
            self._after = max(self._after, self._used.pop(key))

    # --- the file; in a thread --------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        if not self._read():
            # Any token that was used before was issued at most `skew_s` after its use. With a new folder none was used
            # here; what was issued before it may have been used with one that is gone, as a container's is at its end.
            self._used, self._after = {}, int(now) - 1 if self._is_first else int(now + self._skew_s)
        self._forget(now)
        self._rewrite(self._used)

    def _read(self) -> bool:
        """False if there is no journal, or if it is damaged. A line that was not finished was never consumed."""
        try:
            data = read_plain(self._path, JOURNAL_BYTES_MAX)
        except (FileNotFoundError, NotPlainFile, FileTooLarge):
            return False
        head, *lines = data.split(b"\n")
        begins = _HEAD.fullmatch(head)
        found = [_LINE.fullmatch(line) for line in lines[:-1]]
        if begins is None or not lines or not all(found):
            return False
        self._after = int(begins[1])
        self._used = {one[2].decode(): int(one[1]) for one in found if one is not None}
        return True

    def _rewrite(self, used: Mapping[str, int]) -> None:
        """Write what is still needed to a new file, which takes the old one's place at once."""
        lines = [f"greenroom nonces 1 after {self._after}\n", *(_line(*one) for one in used.items())]
        fd = replaced(self._path, "".join(lines).encode())
        try:
            sync_folder(self._path.parent)
        except BaseException:
            os.close(fd)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._lines = fd, len(used)

    def _append(self, key: str, issued_at: int) -> None:
        with self._writing:
            # Looked at here, where no other line is being written: a new file holds every nonce that has a line.
            used = self._used.copy()
            if self._lines > len(used) + SLACK:
                self._rewrite(used)
            else:
                self._add_line(key, issued_at)

    def _add_line(self, key: str, issued_at: int) -> None:
        if self._fd is None:
            raise OSError("it is closed")
        append_whole(self._fd, _line(key, issued_at).encode())
        self._lines += 1


def _line(key: str, issued_at: int) -> str:
    return f"{issued_at} {key}\n"
