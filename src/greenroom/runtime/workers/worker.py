"""One worker: a process of ours that hosts slots, its control connection, and the slots in it.

Owns its start, its end and the check that it still answers. A worker that says hello has imported what it needs and has
touched no GPU yet. Never decides which slot lives where: `pool.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from greenroom.core.model import SlotId
from greenroom.engines.base import HostedEngine, HostKey
from greenroom.errors import LoadFailed
from greenroom.process.logs import START_LINES_MAX, LogRing, SharedLog, telling_line
from greenroom.process.spawn import Child, Exit, spawn
from greenroom.process.state_dir import StateDir
from greenroom.runtime.clocks import running_timeout
from greenroom.runtime.timeouts import TIMEOUTS, WorkerTimeouts
from greenroom.runtime.workers.control_link import Answer, ControlLink, OpFailed, Progress, WorkerLost, connect
from greenroom.telemetry.logs import get_logger

# Importing torch takes seconds, and minutes from a cold network disk.
START_MAX_S: Final = 300.0
# How often a connection to a starting worker is tried: often at first, then less.
CONNECT_FIRST_S: Final = 0.01
CONNECT_SLOWEST_S: Final = 0.1
CONNECT_GROWTH: Final = 1.3
# A worker has nothing to finish: its slots were closed, or are no longer used.
STOP_S: Final = 5.0
# The end of a connection is seen before the end of the process.
EXIT_FOLLOWS_S: Final = 5.0
# Log lines that go with the error of a failed start.
LAST_LINES: Final = 20


class Worker:
    """Made by `start_worker`. `slots` are the slots that live in it or are about to."""

    def __init__(
        self, id: str, child: Child, log: SharedLog, socket: str, timeouts: WorkerTimeouts = TIMEOUTS.workers
    ) -> None:
        self.id = id
        self.child = child
        self.log = log
        self.socket = socket
        self.timeouts = timeouts
        self.key: HostKey | None = None
        self.slots: dict[SlotId, LogRing] = {}
        # The slot that came last, and whether another one was ever here.
        self._latest: SlotId | None = None
        self._was_shared = False
        # Slots that it was asked to let go of, and has not yet.
        self._going: set[SlotId] = set()
        # Set when it has ended and the loss of its slots is reported.
        self.gone = asyncio.Event()
        self.is_stopping = False
        self._is_ending = False
        self.device = ""
        self._link: ControlLink | None = None

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def is_lost(self) -> bool:
        """It has ended, or no longer answers and is being ended."""
        is_mute = self._link is not None and not self._link.is_open
        return self.is_stopping or self._is_ending or is_mute or not self.child.is_running

    def let_in(self, slot: SlotId, log: LogRing) -> None:
        self.slots[slot] = log
        self._was_shared = self._was_shared or self._latest not in (None, slot)
        self._latest = slot
        self._tell_log()

    def let_out(self, slot: SlotId) -> None:
        self.slots.pop(slot, None)
        self._tell_log()

    def lines_of(self, slot: SlotId, count: int) -> list[str]:
        """The last log lines of this slot. Empty if another slot was ever here: lines do not name their slot."""
        return self.log.tail(count) if not self._was_shared and self._latest in (None, slot) else []

    def _tell_log(self) -> None:
        # Slots of one model share a log, which gets each line once.
        self.log.listeners = list({id(ring): ring for ring in self.slots.values()}.values())

    async def ask(
        self, op: str, *, fd: int | None = None, on_progress: Progress | None = None, **said: object
    ) -> Answer:
        """Raises OpFailed or WorkerLost."""
        if self._link is None:
            raise WorkerLost("the worker is not there yet")
        return await self._link.ask(op, fds=() if fd is None else (fd,), on_progress=on_progress, **said)

    async def let_go_of(self, slot: SlotId, op: str, *, alone_s: float, shared_s: float) -> Answer:
        """Ask it to free what this slot holds. Raises OpFailed, WorkerLost, or TimeoutError if it is stuck. The slot
        may be in a foreign call that cannot be stopped. While other slots stay here, it has `shared_s`: they are served
        meanwhile, and ending the worker would end them too. Else it has `alone_s`."""
        self._going.add(slot)
        asking = asyncio.ensure_future(self.ask(op, slot=slot))
        waited_s = 0.0
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with running_timeout(alone_s):
                        await asyncio.wait((asking,))
                if asking.done():
                    return asking.result()
                waited_s += alone_s
                if waited_s >= shared_s or not self.slots.keys() - self._going:
                    raise TimeoutError
        finally:
            asking.cancel()
            self._going.discard(slot)

    async def greet(self) -> None:
        """Connect as soon as it listens, and wait until its imports are done."""
        pause_s = CONNECT_FIRST_S
        while self._link is None:
            try:
                self._link = await connect(self.socket, self.end)
            except OSError:
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * CONNECT_GROWTH, CONNECT_SLOWEST_S)
        self.device = str((await self.ask("hello")).get("device", ""))

    def end(self) -> None:
        """Kill it: it no longer answers, or not as it should. Its exit is reported like any other."""
        self._is_ending = True
        self.child.kill()

    async def stop(self) -> None:
        """End it, and wait until nothing of it is left."""
        self.is_stopping = True
        if self._link is not None:
            self._link.close()
        await self.child.stop(STOP_S)
        self._unlink()

    def _unlink(self) -> None:
        Path(self.socket).unlink(missing_ok=True)


async def start_worker(
    engine: HostedEngine, key: HostKey, number: int, state_dir: StateDir, log: LogRing, timeouts: WorkerTimeouts
) -> Worker:
    """Start a worker and wait until it can take slots. Raises LoadFailed, and leaves nothing behind. `log` is the log
    of the model for which it starts; it gets the lines of the start."""
    id, socket = f"worker{number}", str(state_dir.run_dir / f"w{number}.sock")
    shared = SharedLog()
    shared.listeners = [log]
    child = await spawn(engine.launch_worker(key, socket), identity=state_dir.identity(f"{id}.1"), log=shared)
    worker = Worker(id, child, shared, socket, timeouts)
    try:
        await _until_ready(worker)
    except BaseException:
        await worker.stop()
        raise
    shared.listeners = []
    return worker


async def _until_ready(worker: Worker) -> None:
    ended = asyncio.ensure_future(worker.child.wait())
    ready = asyncio.ensure_future(worker.greet())
    try:
        await asyncio.wait((ended, ready), timeout=START_MAX_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() or not ready.done():
            raise _failed(worker, ended.result() if ended.done() else None)
        ready.result()
    except (OpFailed, WorkerLost) as error:
        # A worker that closes the connection has ended, or is being ended: its exit follows in a moment.
        await asyncio.wait((ended,), timeout=EXIT_FOLLOWS_S)
        raise _failed(worker, worker.child.exit, str(error)) from error
    finally:
        ended.cancel()
        ready.cancel()


def _failed(worker: Worker, exit: Exit | None, why: str = "") -> LoadFailed:
    said = why or f"it was not ready after {START_MAX_S:g} s"
    if exit is not None:
        said = f"it ended while it started ({exit})"
    if reason := telling_line(worker.log.tail(START_LINES_MAX)):
        said = f"{reason.rstrip('.')}; {said}"
    details = "\n".join(worker.log.tail(LAST_LINES))
    return LoadFailed(f"the worker could not be started: {said}", details=details or None)


_log = get_logger("workers")


async def watch_liveness(worker: Worker) -> None:
    """Ask the worker from time to time, and kill it if it does not answer. Returns when it has ended."""
    while not await _is_gone(worker):
        try:
            async with running_timeout(worker.timeouts.answer_s):
                await worker.ask("look")
        except OpFailed:
            continue
        except WorkerLost:
            return
        except TimeoutError:
            _log.warning("a worker does not answer and is ended", worker=worker.id, after_s=worker.timeouts.answer_s)
            worker.end()
            return


async def _is_gone(worker: Worker) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(worker.timeouts.look_every_s):
            await worker.gone.wait()
    return worker.gone.is_set()
