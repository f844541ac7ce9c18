"""What callers notice of many updates in a row: tiny models of llama.cpp change places while callers stream.

    python -m benchmarks.versions.under_load [--updates 200] [--clients 50]

Each caller asks again as soon as it was answered. Every answer must be whole and belong to the version that its header
names: the models say who they are. No request may fail, and no caller may see an older version after a newer one. The
scheduler's events are recorded and played again: the longest time in which a request waited though a place was free, or
the name had no version that serves, must not exceed one decision. The waits for a place, as the gateway tells them, and
the longest time without a first byte to any caller, which also shows what the engines' starts cost on a small machine,
are compared with those of the same callers before the first update.
"""

from __future__ import annotations

import http.client
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from benchmarks.rig.gateways import ASK_MAX_S, Gateway, gateway
from benchmarks.rig.result import Run, options_of
from greenroom.core.effects import Effects
from greenroom.core.events import Event, ShutdownAsked
from greenroom.core.model import ModelId
from greenroom.core.scheduler import Scheduler
from greenroom.runtime.record.recording import read_events
from tests.models import tiny

NAME, FIRST, SECOND = "m", "alpha", "bravo"
# The last is one decision of a busy scheduler.
GOALS = {"failed_max": 0, "mixed_max": 0, "went_back_max": 0, "grant_gap_ms_max": 5.0}
BEFORE_S = 5.0


@dataclass(slots=True)
class Heard:
    """What one caller was answered: versions in order, waits, and what was wrong."""

    versions: list[int] = field(default_factory=list)
    waits_ms: list[tuple[float, int]] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)


class Caller(threading.Thread):
    def __init__(self, port: int, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._port, self._is_over = port, is_over
        self.heard = Heard()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._ask()
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.heard.failed.append(repr(error)[:200])

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ASK_MAX_S)
        try:
            body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "stream": True}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self.heard.begun.append(time.monotonic())
            text, is_whole = _read(answer.read().decode())
        finally:
            connection.close()
        if answer.status != 200 or not is_whole:
            self.heard.failed.append(f"{answer.status} {text[:200]}")
            return
        # Odd versions are the first model's, even ones the second's.
        number = int(answer.headers["x-model-version"])
        if text.split() != [FIRST if number % 2 else SECOND, "says", "hello"]:
            self.heard.mixed.append(f"version {number} said {text[:100]!r}")
        self.heard.versions.append(number)
        self.heard.waits_ms.append((time.monotonic(), int(answer.headers["x-queue-wait-ms"])))


def _read(stream: str) -> tuple[str, bool]:
    """What was said, and whether the stream ended as it should."""
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return stream, False
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), True


def updated(gate: Gateway, paths: list[Path], count: int) -> list[float]:
    """Update so often, and how long each took."""
    took = []
    for number in range(count):
        began = time.monotonic()
        gate.fetch("/update-model?wait=true", {"model_repo_id": str(paths[(number + 1) % 2])})
        took.append(time.monotonic() - began)
    return took


def gap_ms(times: list[float]) -> float:
    """The longest time between two of these."""
    return round(1_000 * max((after - before for before, after in itertools.pairwise(sorted(times))), default=0.0), 1)


class NoEffects:
    """Stands for the gateway's side of the scheduler where a recording is played."""

    def __getattr__(self, name: str) -> object:
        return lambda *args, **options: None


def grant_gap_ms(events: list[Event]) -> float:
    """The longest time in which a request waited though a place was free, or, after the first, no version served."""
    scheduler, longest_s, has_served = Scheduler(cast(Effects, NoEffects())), 0.0, False
    since: float | None = None
    for event in itertools.takewhile(lambda one: not isinstance(one, ShutdownAsked), events):
        longest_s = max(longest_s, 0.0 if since is None else event.now - since)
        scheduler.handle(event)
        serving = [slot for slot in scheduler.view.slots_of(ModelId(NAME)) if slot.is_serving]
        has_served = has_served or bool(serving)
        has_place = any(len(slot.in_flight) < slot.concurrency for slot in serving)
        is_gap = has_served and (not serving or (has_place and scheduler.view.waitlist.count(ModelId(NAME)) > 0))
        since = (event.now if since is None else since) if is_gap else None
    return round(1_000 * longest_s, 3)


def measure(folder: Path, clients: int, updates: int) -> dict[str, float]:
    paths = [folder / f"{name}.gguf" for name in (FIRST, SECOND)]
    for path, name in zip(paths, (FIRST, SECOND), strict=True):
        shutil.copy(tiny(name), path)
    model = {"path": str(paths[0]), "ctx_size": 512, "threads": 1, "memory_mib": 100, "parallel": 4, "versions": {}}
    is_over, events = threading.Event(), folder / "events.jsonl"
    sections = {"library": {"roots": [str(folder)]}, "gpus": [{"memory_mib": 4_000}]}
    with gateway({NAME: model}, server={"record_events": str(events)}, **sections) as gate:
        callers = [Caller(gate.port, is_over) for _ in range(clients)]
        for caller in callers:
            caller.start()
        time.sleep(BEFORE_S)
        began = time.monotonic()
        took = updated(gate, paths, updates)
        is_over.set()
        for caller in callers:
            caller.join(ASK_MAX_S)
    heard = [caller.heard for caller in callers]
    for problem in [said for one in heard for said in (*one.failed, *one.mixed)][:10]:
        print(problem)
    before = [wait for one in heard for at, wait in one.waits_ms if at < began]
    during = [wait for one in heard for at, wait in one.waits_ms if at >= began]
    begun = [at for one in heard for at in one.begun]
    return {
        "updates": updates,
        "answers": sum(len(one.versions) for one in heard),
        "versions_seen": len({version for one in heard for version in one.versions}),
        "failed": sum(len(one.failed) for one in heard),
        "mixed": sum(len(one.mixed) for one in heard),
        "went_back": sum(one.versions != sorted(one.versions) for one in heard),
        "grant_gap_ms": grant_gap_ms(read_events(events)),
        "update_s": round(statistics.median(took), 3),
        "gap_before_ms_max": gap_ms([at for at in begun if at < began]),
        "gap_during_ms_max": gap_ms([at for at in begun if at >= began]),
        "wait_before_ms_max": max(before, default=0),
        "wait_during_ms_max": max(during, default=0),
        "wait_before_ms": round(statistics.median(before or [0]), 1),
        "wait_during_ms": round(statistics.median(during or [0]), 1),
    }


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    run = Run("versions_under_load", options)
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as folder:
        figures = measure(Path(folder), options.clients, options.updates)
    for name, value in figures.items():
        print(f"{name:>20} {value:>10,}")
    met = not (figures["failed"] or figures["mixed"] or figures["went_back"])
    met = met and figures["grant_gap_ms"] <= GOALS["grant_gap_ms_max"]
    run.report(figures, GOALS, met)


if __name__ == "__main__":
    main()
