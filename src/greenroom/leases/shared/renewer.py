"""Renews a gateway's leases in Redis while the gateway itself cannot: a small process of its own.

One large request can hold a gateway's interpreter for many seconds, and a stopped gateway runs nothing at all; its
engines use their memory all the same. This process shares nothing with the gateway but a socket, by which it is told
what is held and, twice a second, that the gateway runs. While it is not told so, it renews. It ends with the gateway:
when the socket closes, as it does even after `kill -9`, so that the leases of a dead gateway end too.

    python -P -m greenroom.leases.shared.renewer       (standard input is the socket)

The first line is the order, as JSON: where the store is, and the script that renews. Each further line is a lease that
is held (`id`, `token`, `kind`, `ttl_s`, `record`), an `id` alone, which is forgotten, or empty: the gateway runs.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

# A terminal's Ctrl-C or a service manager's SIGTERM is for the gateway, which needs its leases while it drains.
DEAF_TO = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
READ_BYTES = 65_536
# A gateway that was not heard of for this long does not renew: it says that it runs every half second.
QUIET_S = 1.0
# Renewals within one TTL, and the pause after one that failed.
RENEWALS = 4
RETRY_S = 0.25
STORE_TIMEOUT_S = 1.0
NAME_IN_PS = "greenroom-renew"


class Renewer:
    def __init__(self, order: Mapping[str, Any], heard_at: float) -> None:
        # Imported here: signals for the gateway must be ignored before it, as it takes a moment.
        import redis

        self._failures = (redis.RedisError, OSError)
        timeouts = {"socket_timeout": STORE_TIMEOUT_S, "socket_connect_timeout": STORE_TIMEOUT_S}
        # Of the same kind as the gateway's, whose options the address may have.
        self._client = redis.Redis.from_pool(redis.BlockingConnectionPool.from_url(order["url"], **timeouts))
        self._script = self._client.register_script(order["script"])
        self._keys, self._frame = order["keys"], order["frame"]
        # By the shortest TTL there was.
        self._every_s = order["ttl_s"] / RENEWALS
        self._held: dict[str, dict[str, Any]] = {}
        # When the gateway was last heard of, and when to renew next if it stays quiet.
        self._heard_at = heard_at
        self._due_at = heard_at + QUIET_S

    def hear(self, line: bytes, now: float) -> None:
        if line:
            self._note(json.loads(line), now)
        self._heard_at, self._due_at = now, now + min(QUIET_S, self._every_s)

    def _note(self, told: Mapping[str, Any], now: float) -> None:
        if "token" in told:
            self._held[told["id"]] = {**told, "heard_at": now}
            self._every_s = min(self._every_s, told["ttl_s"] / RENEWALS)
        else:
            self._held.pop(told["id"], None)

    def wait_s(self) -> float:
        return max(0.0, self._due_at - time.monotonic())

    def renew_if_due(self) -> None:
        if time.monotonic() < self._due_at:
            return
        try:
            for kind in ("slot", "program"):
                self._renew(kind)
            self._due_at = time.monotonic() + self._every_s
        except self._failures:
            self._due_at = time.monotonic() + RETRY_S

    def _renew(self, kind: str) -> None:
        leases = [one for one in self._held.values() if one["kind"] == kind and self._counts(one)]
        if leases:
            known = [{name: one[name] for name in ("id", "token", "record")} for one in leases]
            floor = str(max(int(one["token"]) for one in leases))
            arguments = {**self._frame, "floor": floor, "leases": known, "kind": kind}
            self._script(keys=self._keys, args=[json.dumps(arguments)])

    def _counts(self, lease: Mapping[str, Any]) -> bool:
        """A program renews through the gateway: it lives as far as is known if it was in time when that fell quiet."""
        return bool(lease["kind"] == "slot" or lease["heard_at"] + lease["ttl_s"] > self._heard_at)


class Control:
    """The gateway's end of the socket, line by line."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=0)
        self._unread = b""
        self.is_closed = False

    def lines(self, wait_s: float) -> list[bytes]:
        """All that has come, after waiting for something to come. After a pause of this process that may be much."""
        select.select([self._socket], [], [], wait_s)
        while (more := self._received()) is not None:
            self.is_closed = self.is_closed or not more
            if self.is_closed:
                return []
            self._unread += more
        *whole, self._unread = self._unread.split(b"\n")
        return whole

    def _received(self) -> bytes | None:
        """None if nothing has come, no bytes if the gateway is gone."""
        try:
            return self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""


def main() -> None:
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    control = Control()
    lines: list[bytes] = []
    while not lines and not control.is_closed:
        lines = control.lines(wait_s=60.0)
    if control.is_closed:
        return
    renewer = Renewer(json.loads(lines.pop(0)), time.monotonic())
    with open("/proc/self/comm", "w") as name:
        name.write(NAME_IN_PS)
    while not control.is_closed:
        now = time.monotonic()
        for line in lines:
            renewer.hear(line, now)
        renewer.renew_if_due()
        lines = control.lines(renewer.wait_s())


if __name__ == "__main__":
    main()
