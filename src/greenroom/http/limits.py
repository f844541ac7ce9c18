"""What all connections of one edge share: its bounds, its counters, the time, and whether it is draining.

Owns every number the edge is limited by, each with its reason. Never enforces one: `client.py` and `edge.py` do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from greenroom.config.schema import Server

KIB: Final = 1024
MIB: Final = 1024 * KIB
# What an operator can set has its default in the configuration and nowhere else.
DEFAULTS: Final = Server()


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """How long the edge waits for a client, and how much it takes from one. There is no deadline for answering."""

    # From accept, or from the first byte of a later request, to the end of its headers.
    header_timeout_s: float = DEFAULTS.header_timeout_s
    # A body may take this long, or as long as its bytes take at the slowest rate we accept, whichever is longer.
    body_timeout_s: float = DEFAULTS.body_timeout_s
    body_rate_min_bytes_s: int = DEFAULTS.body_rate_min_kib_s * KIB
    # Longer than the idle time of common client pools, so that they close first and never meet our close half-way.
    keepalive_s: float = DEFAULTS.keepalive_s
    # A client that accepts no byte for this long while we have bytes for it is cut.
    write_timeout_s: float = DEFAULTS.write_timeout_s
    # After an early refusal this much is read and dropped, so that the client can read the answer.
    linger_s: float = 5.0
    linger_bytes_max: int = 16 * MIB

    headers_max: int = DEFAULTS.headers_max
    header_bytes_max: int = DEFAULTS.header_bytes_max
    request_line_max: int = DEFAULTS.request_line_max
    # Bytes of sizes, extensions and trailers that a chunked body may have, beyond as many as its content.
    chunk_overhead_bytes_max: int = 16 * KIB

    connections_max: int = DEFAULTS.connections_max
    # Loopback is exempt: there all clients have the same address.
    connections_per_ip_max: int = DEFAULTS.connections_per_ip_max
    backlog: int = 2048

    # A body above this goes to an unlinked temporary file.
    body_in_memory_max: int = 256 * KIB
    bodies_total_max: int = DEFAULTS.bodies_memory_mib * MIB
    spool_total_max: int = DEFAULTS.bodies_spool_mib * MIB
    # This much stays free on the disk of the spool, which also holds leases and learned times.
    spool_leaves_bytes: int = 32 * MIB

    # Requests sent ahead wait as raw bytes: above this many we stop reading until the answers before them are done.
    pipelined_bytes_max: int = 64 * KIB
    # So many are answered in one turn of the loop before other connections get theirs.
    pipelined_per_turn_max: int = 16
    # Above this many unsent bytes the source of an answer is asked to pause.
    write_buffer_bytes_max: int = 256 * KIB
    # How often deadlines are looked at; one sweep for all connections instead of a timer for each request.
    sweep_s: float = 0.5


@dataclass(slots=True)
class EdgeStats:
    """Counts since start. Plain integers, which the metrics and the management API read."""

    accepted: int = 0
    # Connections closed at accept because there were too many, in all or from one address.
    over_limit: int = 0
    # Requests received whole and handed on.
    requests: int = 0
    # Requests answered by the edge itself because they were malformed, too large or not admitted.
    refused: int = 0
    header_timeouts: int = 0
    body_timeouts: int = 0
    idle_closed: int = 0
    write_timeouts: int = 0
    # Clients that left before their answer was complete.
    gone: int = 0
    bugs: int = 0


class EdgeState:
    """Shared by an edge, its connections and their exchanges. Only the edge changes it, apart from the counters."""

    __slots__ = ("date", "draining", "limits", "now", "stats")

    def __init__(self, limits: EdgeLimits) -> None:
        self.limits = limits
        self.stats = EdgeStats()
        self.draining = False
        # Read for every request, so it is kept here and renewed by the sweep: the clock, and a finished Date header.
        self.now = 0.0
        self.date = b""


def limits_for(server: Server) -> EdgeLimits:
    return EdgeLimits(
        header_timeout_s=server.header_timeout_s,
        body_timeout_s=server.body_timeout_s,
        body_rate_min_bytes_s=server.body_rate_min_kib_s * KIB,
        keepalive_s=server.keepalive_s,
        write_timeout_s=server.write_timeout_s,
        headers_max=server.headers_max,
        header_bytes_max=server.header_bytes_max,
        request_line_max=server.request_line_max,
        connections_max=server.connections_max,
        connections_per_ip_max=server.connections_per_ip_max,
        bodies_total_max=server.bodies_memory_mib * MIB,
        spool_total_max=server.bodies_spool_mib * MIB,
    )
