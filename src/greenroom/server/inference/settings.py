"""The numbers a running request goes by, taken from the configuration and replaced as a whole when it is reloaded."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.schema import Heartbeat, Server
from greenroom.http.headers import REQUEST_ALLOWED


@dataclass(frozen=True, slots=True)
class Settings:
    heartbeat: Heartbeat
    heartbeat_after_s: float
    heartbeat_every_s: float
    wait_max_s: float
    stream_wait_max_s: float
    answer_idle_max_s: float
    forward_headers: frozenset[bytes]
    body_max: int
    upload_max: int

    @classmethod
    def of(cls, server: Server) -> Settings:
        return cls(
            heartbeat=server.heartbeat,
            heartbeat_after_s=server.heartbeat_after_s,
            heartbeat_every_s=server.heartbeat_every_s,
            wait_max_s=server.wait_max_s,
            stream_wait_max_s=server.stream_wait_max_s,
            answer_idle_max_s=server.answer_idle_max_s,
            forward_headers=REQUEST_ALLOWED | {name.lower().encode("latin-1") for name in server.forward_headers},
            body_max=server.body_max_mib * 1024 * 1024,
            upload_max=server.upload_max_mib * 1024 * 1024,
        )
