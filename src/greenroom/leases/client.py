"""`greenroom.lease(…)`: memory on GPUs for a program, as a context manager for both kinds of code.

Owns where the heartbeat runs: in `with` on an event loop in a thread of its own, so that a program that computes for
hours is heard of meanwhile; in `async with` as a task beside the program's others.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from greenroom.errors import BadRequest
from greenroom.leases.holder import holder_of
from greenroom.leases.keeping import Keeping
from greenroom.leases.records import Lease, LeaseAsk
from greenroom.leases.stores import open_store

Result = TypeVar("Result")

PRIORITIES: Final = {"high": 0, "normal": 1, "low": 2}
WAIT_S: Final = 60.0
# A thread that does not end when it is told to is left behind; it is a daemon.
THREAD_END_S: Final = 5.0
# A year; what is longer is a mistake.
SECONDS_MAX: Final = 31_536_000
_NUMBER: Final = re.compile(r"-?[0-9]{1,3}")


def lease(
    mib: int,
    gpus: int = 1,
    name: str | None = None,
    priority: str | int = "normal",
    *,
    preemptible: bool = False,
    wait_s: float = WAIT_S,
    devices: Sequence[str] = (),
    grace_s: float = 30.0,
    ttl_s: float = 30.0,
    url: str | None = None,
    api_key: str | None = None,
) -> LeaseHandle:
    """Memory on GPUs, held while the block runs: `with greenroom.lease(mib=20_000) as held:` or `async with`.

    `mib` on each of `gpus` different GPUs, all or nothing. Models that are idle leave for it, and it waits up to
    `wait_s`. A `preemptible` lease may be asked to leave for somebody more urgent: see `held.recall_in_s`.
    """
    _check_times(wait_s=wait_s, grace_s=grace_s, ttl_s=ttl_s)
    ask = LeaseAsk(
        id=f"l-{secrets.token_hex(8)}",
        name=name or Path(sys.argv[0] or "python").name or "python",
        mib=mib,
        gpus=gpus,
        devices=tuple(devices),
        priority=_priority(priority),
        preemptible=preemptible,
        grace_s=grace_s,
        ttl_s=ttl_s,
        wait_s=wait_s,
    )
    return LeaseHandle(ask, url, api_key)


class LeaseHandle:
    """One lease. Use it once, as `with` or as `async with`."""

    def __init__(self, ask: LeaseAsk, url: str | None = None, api_key: str | None = None) -> None:
        self._ask = ask
        self._url = url
        self._key = api_key
        self._keeping: Keeping | None = None
        self._loop: _Loop | None = None
        self._beating: asyncio.Task[None] | None = None
        # Whose it is: a fork has this object too, and must not give back what is its parent's.
        self._pid = 0

    # --- what can be asked of it ------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self._ask.id

    @property
    def token(self) -> int:
        """Grows with every grant: show it to whatever must not listen to a late holder."""
        return self._lease.token

    @property
    def devices(self) -> dict[str, int]:
        """MiB by device."""
        return dict(self._lease.claim)

    @property
    def cuda_visible_devices(self) -> str:
        """For the environment variable of that name, before CUDA is first used."""
        return self._lease.cuda_visible_devices

    @property
    def lost(self) -> bool:
        """Whether it may be somebody else's by now: stop using the memory. True also while the store cannot be asked
        for longer than the lease lasts; that ends when the store is back and still knows it."""
        return self._kept.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the store has said that it is lost, which is for good."""
        return self._kept.verdict is not None

    @property
    def recall_in_s(self) -> float | None:
        """Seconds in which to leave, once that was asked; below zero it is overdue."""
        return self._kept.recall_in_s

    def raise_if_lost(self) -> None:
        """Raises LeaseLost."""
        self._kept.raise_if_lost()

    @property
    def _kept(self) -> Keeping:
        if self._keeping is None:
            raise BadRequest("The lease is not held yet; use it in a `with` or `async with` block.")
        return self._keeping

    @property
    def _lease(self) -> Lease:
        return self._kept.lease

    def _begin(self) -> Keeping:
        if self._keeping is not None:
            raise BadRequest("A lease is used once; ask for another with greenroom.lease(…).")
        self._pid = os.getpid()
        ask = replace(self._ask, holder=holder_of(self._pid))
        return Keeping(open_store(self._url, self._key), ask)

    # --- with -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> LeaseHandle:
        """Wait for it. Raises LeaseDenied, StoreDown or BadRequest."""
        self._loop = _Loop()
        try:
            self._keeping = self._loop.call(self._acquired())
        except BaseException:
            self._loop.end()
            raise
        return self

    async def _acquired(self) -> Keeping:
        keeping = self._begin()
        try:
            await keeping.acquire()
        except BaseException:
            await keeping.release()
            raise
        self._beating = asyncio.get_running_loop().create_task(keeping.keep(), name="lease heartbeat")
        return keeping

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = self._loop
        if loop is None or os.getpid() != self._pid:
            return
        try:
            loop.call(self._released())
        finally:
            loop.end()

    # --- async with -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> LeaseHandle:
        self._keeping = await self._acquired()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() == self._pid:
            await self._released()

    async def _released(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait((self._beating,))
        if self._keeping is not None:
            await self._keeping.release()


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._is_running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="greenroom lease", daemon=True)
        self._thread.start()
        self._is_running.wait()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._is_running.set()
        await self._over.wait()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What the coroutine returns or raises. An interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(THREAD_END_S)


def _priority(priority: str | int) -> int:
    if isinstance(priority, int):
        return priority
    word = priority.strip().lower()
    if _NUMBER.fullmatch(word) is not None:
        return int(word)
    if word not in PRIORITIES:
        raise BadRequest(f"{priority!r} is no priority; it is high, normal, low or a number.", param="priority")
    return PRIORITIES[word]


def _check_times(**said: float) -> None:
    """Said here, because sockets and stores say it less well."""
    for param, seconds in said.items():
        if not 0 <= seconds <= SECONDS_MAX:
            raise BadRequest(f"{param} is a number of seconds from 0 to {SECONDS_MAX:,}.", param=param)
