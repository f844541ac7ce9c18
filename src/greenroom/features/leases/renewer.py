"""The process that renews this gateway's leases in a shared store while the gateway is busy, stopped or stalled.

Owns that process and the socket to it; `leases/shared/renewer.py` is its program. Nothing here waits: what the socket
does not take now is sent with the next beat. A process that has ended, or no longer reads, is replaced at a beat.
"""

from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from typing import Final

from greenroom.leases.shared import stored
from greenroom.leases.shared.redis_store import Renewer, frame
from greenroom.leases.shared.stored import Stored
from greenroom.telemetry.logs import get_logger

_log = get_logger("sharing")

# All that is held is some hundred KiB at most. A process that leaves more than this unread hangs.
UNREAD_MAX_BYTES: Final = 8 * 1024 * 1024
# Between two starts: one that always fails must not cost the gateway its CPU.
START_EVERY_S: Final = 5.0
_COMMAND: Final = (sys.executable, "-P", "-m", "greenroom.leases.shared.renewer")
_BEAT: Final = b"\n"
_S: Final = 1_000


class RenewerProcess(Renewer):
    def __init__(self, url: str, host: str, ttl_s: float) -> None:
        script = stored.source("renew")
        order = {"url": url, "keys": stored.keys(host), "script": script, "frame": frame(ttl_s), "ttl_s": ttl_s}
        self._order = stored.encode(order) + b"\n"
        # What each lease is told as, so that a new process can be told too.
        self._held: dict[str, bytes] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unsent = bytearray()
        self._start_at = -math.inf
        # Why there is none, so that it is logged once.
        self._failure: str | None = None

    def hold(self, lease: Stored) -> None:
        told = {"id": lease.id, "token": lease.token, "kind": lease.kind, "ttl_s": lease.ttl_ms / _S, "record": lease}
        self._held[lease.id] = stored.encode(told) + b"\n"
        self._send(self._held[lease.id])

    def forget(self, id: str) -> None:
        if self._held.pop(id, None) is not None:
            self._send(stored.encode({"id": id}) + b"\n")

    def beat(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end("it ended")
        if time.monotonic() >= self._start_at:
            if self._process is None:
                self._start()
            else:
                self._failure = None
        self._send(_BEAT)

    def close(self) -> None:
        self._held.clear()
        self._end(None)

    def _start(self) -> None:
        self._start_at = time.monotonic() + START_EVERY_S
        ours = None
        try:
            ours, its = socket.socketpair()
            with its:
                nothing = subprocess.DEVNULL
                self._process = subprocess.Popen(_COMMAND, stdin=its.fileno(), stdout=nothing, stderr=nothing)
        except OSError as error:
            if ours is not None:
                ours.close()
            self._note_failure(error.strerror or str(error))
            return
        ours.setblocking(False)
        self._socket = ours
        self._unsent = bytearray(self._order + b"".join(self._held.values()))

    def _send(self, line: bytes) -> None:
        if self._socket is None:
            return
        self._unsent += line
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > UNREAD_MAX_BYTES:
                self._end("it does not read what it is told")
        except OSError:
            self._end("it ended")

    def _end(self, why: str | None) -> None:
        """It ends when the socket closes; one that cannot is killed."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None
        self._unsent.clear()
        if why is not None:
            self._note_failure(why)

    def _note_failure(self, why: str) -> None:
        if why != self._failure:
            _log.warning("the process that renews leases while the gateway is busy is missing; it is replaced", why=why)
        self._failure = why
