"""What programs write down about their leases, one JSON line each, with the machine's monotonic time.

A line is written before an operation is sent and after its answer is known. Every line is one write, so that a program
killed at any moment leaves whole lines and at most one torn one, which is left out.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

# What the programs share: one host, two GPUs.
HOST = "box"
GPU_MIB = 10_000
DEVICES = {"gpu0": GPU_MIB, "gpu1": GPU_MIB}


@dataclass(frozen=True, slots=True)
class Event:
    """`phase` is invoke, ok, refused (the store said no), or unknown (no answer: it may have happened or not)."""

    at: float
    client: str
    op: str  # acquire, renew, release, seen, fault
    phase: str
    lease: str = ""
    token: int = 0
    ttl_s: float = 0.0
    claim: dict[str, int] = field(default_factory=dict)
    text: str = ""


class Log:
    """Appends to one file; made for one program."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, event: Event) -> None:
        os.write(self._file, json.dumps(asdict(event)).encode() + b"\n")


def read(folder: Path) -> list[Event]:
    """Everything that was written, in the order in which it happened."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().split("\n"):
            try:
                events.append(Event(**json.loads(line)))
            except ValueError:
                # Torn by a kill in the middle of its write, or the nothing after the last line.
                continue
    return sorted(events, key=lambda event: event.at)
