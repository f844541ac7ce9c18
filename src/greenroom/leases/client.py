"""`greenroom.lease(…)`: GPU memory for a program, as a context manager for plain and async code.

Owns the handle that programs use (`LeaseHandle`), the renewals behind it (`LeaseKeeper`) and the choice of the store
(`open_store`). Renewals run in a thread with its own event loop for `with`, so that a program may compute for hours,
and in a task for `async with`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from greenroom.errors import BadRequest, GreenroomError, LeaseDenied, LeaseLost, LeaseUnknown
from greenroom.leases.http_store import HttpStore
from greenroom.leases.records import Lease, LeaseAsk, LeaseStore, holder_of

Result = TypeVar("Result")

PRIORITIES: Final = {"high": 0, "normal": 1, "low": 2}
WAIT_S: Final = 60.0
# A thread that does not end in this time is left behind; it is a daemon.
THREAD_END_S: Final = 5.0
# A year; anything longer is a mistake.
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
    op_token: str | None = None,
) -> LeaseHandle:
    """GPU memory, held while the block runs: `with greenroom.lease(mib=20_000) as held:` or `async with`.

    `mib` on each of `gpus` different GPUs, all or nothing. Idle models are evicted for it, and it waits up to `wait_s`.
    A `preemptible` lease may be recalled for a more urgent one: see `held.recall_in_s`. `op_token` permits it where
    operations are signed.
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
    return LeaseHandle(ask, url, api_key, op_token)


class LeaseHandle:
    """One lease. Use it once, as `with` or as `async with`."""

    def __init__(
        self, ask: LeaseAsk, url: str | None = None, api_key: str | None = None, op_token: str | None = None
    ) -> None:
        self._ask = ask
        self._url = url
        self._key = api_key
        self._op_token = op_token
        self._keeper: LeaseKeeper | None = None
        self._loop: _Loop | None = None
        self._beating: asyncio.Task[None] | None = None
        # The process that holds it: a fork has this object too, and must not release the lease of its parent.
        self._pid = 0

    # --- its state --------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self._ask.id

    @property
    def token(self) -> int:
        """A fencing token, which grows with every grant: lets other services refuse a late holder."""
        return self._lease.token

    @property
    def devices(self) -> dict[str, int]:
        """MiB by device."""
        return dict(self._lease.claim)

    @property
    def cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES to set before CUDA is first used."""
        return self._lease.cuda_visible_devices

    @property
    def lost(self) -> bool:
        """Whether another holder may have the memory by now: stop using it. True also while the store has not answered
        for longer than the lease lasts, until it does and still has it."""
        return self._kept.is_lost

    @property
    def is_over(self) -> bool:
        """Whether the store said that the lease is lost, which is final."""
        return self._kept.verdict is not None

    @property
    def recall_in_s(self) -> float | None:
        """Seconds left to release it after a recall; negative if overdue, None if it was not recalled."""
        return self._kept.recall_in_s

    def raise_if_lost(self) -> None:
        """Raises LeaseLost."""
        self._kept.raise_if_lost()

    @property
    def _kept(self) -> LeaseKeeper:
        if self._keeper is None:
            raise BadRequest("The lease is not held yet; use it in a `with` or `async with` block.")
        return self._keeper

    @property
    def _lease(self) -> Lease:
        return self._kept.lease

    def _begin(self) -> LeaseKeeper:
        if self._keeper is not None:
            raise BadRequest("A lease is used once; ask for another with greenroom.lease(…).")
        self._pid = os.getpid()
        ask = replace(self._ask, holder=holder_of(self._pid))
        return LeaseKeeper(open_store(self._url, self._key, op_token=self._op_token), ask)

    # --- with -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> LeaseHandle:
        """Wait for it. Raises LeaseDenied, StoreDown or BadRequest."""
        self._loop = _Loop()
        try:
            self._keeper = self._loop.call(self._acquired())
        except BaseException:
            self._loop.end()
            raise
        return self

    async def _acquired(self) -> LeaseKeeper:
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
        self._keeper = await self._acquired()
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
        if self._keeper is not None:
            await self._keeper.release()


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
        """Run the coroutine there and return or raise its result. An interrupt of the caller cancels it."""
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
    """Raises BadRequest. Checked here because the errors of sockets and stores are harder to read."""
    for param, seconds in said.items():
        if not 0 <= seconds <= SECONDS_MAX:
            raise BadRequest(f"{param} is a number of seconds from 0 to {SECONDS_MAX:,}.", param=param)


# A store that does not answer is tried again after this.
RETRY_S: Final = 1.0
PAUSE_MIN_S: Final = 0.1
# The longest attempt to release: without one, the lease expires in the store.
RELEASE_MAX_S: Final = 10.0


class LeaseKeeper:
    """Acquires one lease, renews it, and releases it."""

    def __init__(self, store: LeaseStore, ask: LeaseAsk, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._ask = ask
        self._clock = clock
        self._lease: Lease | None = None
        self._lasts_until = 0.0
        self._recall_at: float | None = None
        # The store said that the lease is lost.
        self.verdict: LeaseLost | None = None

    @property
    def lease(self) -> Lease:
        if self._lease is None:
            raise LeaseUnknown("The lease was not acquired yet.")
        return self._lease

    @property
    def is_lost(self) -> bool:
        """Whether it may have another holder: the store said so, or has not answered for a whole TTL."""
        return self.verdict is not None or self._clock() >= self._lasts_until

    @property
    def recall_in_s(self) -> float | None:
        return None if self._recall_at is None else self._recall_at - self._clock()

    def raise_if_lost(self) -> None:
        """Raises LeaseLost unless it is certainly held."""
        if self.verdict is not None:
            raise self.verdict
        if self.is_lost:
            raise LeaseLost(f"The lease {self._ask.name} could not be renewed for {self.lease.ttl_s:g} s.")

    async def acquire(self) -> None:
        """Wait for it up to `wait_s`. Raises LeaseDenied, LeaseLost, StoreDown or BadRequest."""
        sent = self._clock()
        self._take(await self._store.acquire(self._ask), sent)
        if self._clock() - sent > self._pause_s():
            # After a long wait it is not known when the TTL began.
            await self._renew()
            if self.verdict is not None:
                raise self.verdict

    async def keep(self) -> None:
        """Renew it until it is lost."""
        was_heard = True
        while self.verdict is None:
            await asyncio.sleep(self._pause_s() if was_heard else min(RETRY_S, self._pause_s()))
            was_heard = await self._renew()

    async def release(self) -> None:
        """Release it, if it is held. In a store that is down it expires."""
        with contextlib.suppress(GreenroomError, TimeoutError):
            async with asyncio.timeout(RELEASE_MAX_S):
                if self._lease is not None and self.verdict is None:
                    await self._store.release(self._ask.id, self._lease.token)
        await self._store.close()

    def _pause_s(self) -> float:
        """Time between renewals: short enough to miss one or two, and to learn of a recall in time to act."""
        pause_s = self.lease.ttl_s / 3
        if self._ask.preemptible:
            pause_s = min(pause_s, self._ask.grace_s / 3)
        return max(PAUSE_MIN_S, pause_s)

    async def _renew(self) -> bool:
        """Renew once. False if the store did not answer."""
        sent = self._clock()
        try:
            async with asyncio.timeout(max(1.0, self.lease.ttl_s / 3)):
                self._take(await self._renewed(), sent)
        except LeaseLost as lost:
            self.verdict = lost
        except LeaseDenied as denied:
            self.verdict = LeaseLost(f"The lease {self._ask.name} cannot be had again: {denied.message}")
        except (GreenroomError, TimeoutError):
            # No verdict on the lease: the store is away, the gateway is overloaded, or the key was changed.
            return False
        return True

    async def _renewed(self) -> Lease:
        lease = self.lease
        try:
            return await self._store.renew(lease.id, lease.token)
        except LeaseUnknown:
            # A store that lost its data gets the lease again, unless another holder has the memory by now.
            ask = replace(self._ask, devices=tuple(sorted(lease.claim)), wait_s=0.0)
            return await self._store.acquire(ask)

    def _take(self, lease: Lease, sent: float) -> None:
        self._lease = lease
        self._lasts_until = sent + lease.ttl_s
        self._recall_at = None if lease.recall_in_s is None else sent + lease.recall_in_s


LEASES_NAME: Final = "GREENROOM_LEASES"
URL_NAME: Final = "GREENROOM_URL"
HOST_NAME: Final = "GREENROOM_HOST"
KEY_NAME: Final = "GREENROOM_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8210"


def store_url(url: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The address of the store: `url`, else GREENROOM_LEASES, else GREENROOM_URL, else this machine."""
    said = url or environ.get(LEASES_NAME) or environ.get(URL_NAME) or DEFAULT_URL
    return said if "://" in said else f"http://{said}"


def open_store(
    url: str | None = None,
    key: str | None = None,
    environ: Mapping[str, str] = os.environ,
    op_token: str | None = None,
) -> LeaseStore:
    """The store at this address. Raises BadRequest if it is no such address, or its client is not installed."""
    whole = store_url(url, environ)
    if whole.startswith(("http://", "https://")):
        return HttpStore(whole, key or environ.get(KEY_NAME) or None, op_token=op_token)
    if whole.startswith(("redis://", "rediss://", "unix://")):
        return _redis_store(whole, environ.get(HOST_NAME) or os.uname().nodename)
    raise BadRequest(f"{whole.partition('://')[0]}:// is no kind of lease store; it is http, https, redis or rediss.")


def _redis_store(url: str, host: str) -> LeaseStore:
    try:
        from greenroom.leases.shared.redis_store import RedisStore
    except ImportError:
        raise BadRequest("Leases in Redis need its client: pip install 'greenroom[redis]'.") from None
    return RedisStore(url, host)
