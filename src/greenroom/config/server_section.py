"""The options of the server: its address, who may call, and limits on what one caller can cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from greenroom.config.kinds import (
    COUNT_MAX,
    Count,
    HeaderName,
    MibAboveZero,
    Name,
    NotBool,
    Port,
    Seconds,
    SecondsAboveZero,
    Section,
)
from greenroom.config.reader import Problem, break_on


class Heartbeat(StrEnum):
    COMMENT = "comment"
    CHUNK = "chunk"
    OFF = "off"


class ApiKey(Section):
    """One key that callers present as `Authorization: Bearer …` or `x-api-key: …`."""

    name: Name
    """Who holds this key; shown in logs and status instead of the key."""
    key: Annotated[str | None, Field(repr=False)] = None
    """The key itself, best given as `${env.NAME}`; it is hashed when read and never kept. Give this or sha256."""
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")] | None = None
    """The key's SHA-256 in hex, so that the file holds no secret (`greenroom key` makes a key and prints both)."""
    tenant: Name | None = None
    """The tenant its requests belong to; the key's name when not given."""
    priority_max: Literal["high", "normal", "low"] = "high"
    """The best priority its requests may ask for; anything better is lowered to this."""
    admin: bool = False
    """Whether it may manage the gateway (load, unload, logs, reload, all of /upstream) and sees engine output."""
    leases: bool = False
    """Whether it may take leases, which can evict models; a key with admin may anyway."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        break_on(_api_key_problems(self))
        return self


class Server(Section):
    """The address, who may call, and the limits on what one caller can cost."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs api_keys, or insecure: true."""
    port: Port = 8210
    """Port to listen on; 0 takes a free one."""
    insecure: bool = False
    """Allow listening beyond loopback without any API key."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that callers must present. Without any, every caller on the address is trusted."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names in the Host header, beyond loopback names and the listening address; "*" allows all."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server, such as https://chat.example.org; "*" allows all."""
    forward_headers: tuple[HeaderName, ...] = ()
    """Further request headers passed on to engines; without this only Content-Type and Accept are."""
    header_timeout_s: Seconds = 10
    """How long a caller may take to send its headers."""
    body_timeout_s: Seconds = 30
    """How long a caller may take to send its body; large bodies get as long as body_rate_min_kib_s allows."""
    body_rate_min_kib_s: Count = 8
    """The slowest upload that is still accepted."""
    keepalive_s: Seconds = 75
    """How long an idle connection is kept open for the next request."""
    write_timeout_s: Seconds = 30
    """A caller that takes no byte of its answer for this long is cut off."""
    connections_max: Count = 10_000
    """Open connections at once; more are closed at once."""
    connections_per_ip_max: Count = 1_000
    """Open connections from one address; loopback is exempt."""
    headers_max: Count = 100
    """Headers in one request."""
    header_bytes_max: Annotated[int, Field(ge=1024, le=COUNT_MAX), NotBool] = 32_768
    """Bytes of all headers of one request together."""
    request_line_max: Annotated[int, Field(ge=256, le=COUNT_MAX), NotBool] = 8_192
    """Bytes of the request line."""
    body_max_mib: MibAboveZero = 64
    """Largest JSON body."""
    upload_max_mib: MibAboveZero = 1_024
    """Largest multipart or pass-through body (audio, images)."""
    bodies_memory_mib: MibAboveZero = 512
    """Memory for all buffered bodies together; when it is full new bodies are refused with 503."""
    bodies_spool_mib: MibAboveZero = 8_192
    """Disk for all spooled bodies together. Bodies above 256 KiB are spooled, to files without names in state_dir, of
    whose disk 32 MiB stay free; where that lies in memory (tmpfs) they count towards bodies_memory_mib too."""
    heartbeat: Heartbeat = Heartbeat.COMMENT
    """What a waiting streaming caller receives: an SSE comment, an empty chunk, or nothing."""
    heartbeat_after_s: Seconds = 10
    """Nothing is committed to a streaming caller before this, so that early failures keep their status."""
    heartbeat_every_s: SecondsAboveZero = 10
    """Seconds between heartbeats."""
    wait_max_s: Seconds = 290
    """How long a request waits for its model before it is answered 503 model_loading (most clients give up at 300)."""
    stream_wait_max_s: Seconds = 3_600
    """The same for streaming callers, which receive heartbeats meanwhile and can wait longer."""
    answer_idle_max_s: Seconds = 600
    """An answer is cut if its engine sends no byte for this long; 0 = never."""
    drain_s: Seconds = 30
    """How long running answers may go on after SIGTERM."""
    docs: bool = True
    """Serve the reference of the management API at /api/v1/docs."""
    record_activity: str | None = None
    """CSV file with a row per answered request (time, model, tokens, tenant, seconds); for greenroom simulate."""
    record_events: str | None = None
    """File for every event and effect of the scheduler, to replay its decisions elsewhere."""


def _api_key_problems(key: ApiKey) -> Iterator[Problem]:
    if (key.key is None) == (key.sha256 is None):
        yield Problem((), f"give exactly one of key and sha256 for {key.name}")
    if key.key is not None and (not key.key or not key.key.isascii() or any(c <= " " or c == "\x7f" for c in key.key)):
        # Such a key cannot be sent in a header, or is no secret.
        yield Problem(("key",), "must be visible ASCII characters without spaces, at least one")


def equal_api_keys(keys: Sequence[ApiKey]) -> Iterator[Problem]:
    """Keys with the same name or the same secret: which key's limits count would be undefined."""
    name_of: dict[str, str] = {}
    names_seen: set[str] = set()
    for position, key in enumerate(keys):
        digest = key.sha256 or hashlib.sha256((key.key or "").encode()).hexdigest()
        if key.name in names_seen:
            yield Problem((position, "name"), f"{key.name} names another key already")
        if digest in name_of:
            yield Problem((position,), f"is the same key as {name_of[digest]}")
        names_seen.add(key.name)
        name_of.setdefault(digest, key.name)
