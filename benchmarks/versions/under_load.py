"""What callers notice of many updates in a row: tiny models of llama.cpp change places while callers stream.

    python -m benchmarks.versions.under_load [--updates 200] [--clients 50] [--limit-s 400]

Each caller asks again as soon as it was answered. Every answer must be whole and belong to the version that its header
names: models tell their version. No request and no update may fail, every version must be seen, and no request may be
answered by an older version than one that answered before it was sent. The scheduler's events are recorded and played
again: the longest time in which a request waited though a place was free, or the name had no version that serves, must
not exceed one decision.

The waits for a place, as the gateway tells them, and the longest time without a first byte to any caller, which also
shows what the engines' starts cost on a small machine, are compared with those of the same callers before the first
update. After --limit-s no further update begins: what was seen until then is told, and the goals are not met. Needs no
network: llama.cpp is the `llama-server` of the PATH or the package xllamacpp, and the models are made with gguf.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig.gateways import ASK_MAX_S, Gateway, gateway
from benchmarks.rig.result import Run, options_of
from benchmarks.versions.judge import grant_gap_ms, went_back
from greenroom.runtime.record.recording import read_events
from tests.models import tiny

NAME, FIRST, SECOND = "m", "alpha", "bravo"
# The last is one decision of a busy scheduler.
GOALS = {"failed_max": 0, "mixed_max": 0, "went_back_max": 0, "updates_failed_max": 0, "grant_gap_ms_max": 5.0}
BEFORE_S = 5.0
TOLD_EVERY = 10
# For an update that runs when the time is over, and then for the answers that run.
END_S = 30.0


@dataclass(slots=True)
class Told:
    """One whole answer: when it was asked for, begun and ended, how long it queued, and its version by the header."""

    asked: float
    begun: float
    ended: float
    queued_ms: int
    version: int


@dataclass(slots=True)
class Heard:
    """What callers were answered, and what was wrong."""

    answers: list[Told] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Updated:
    """How long each update took, and why the last one failed, if it did."""

    took_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Caller(threading.Thread):
    def __init__(self, port: int, is_over: threading.Event, heard: Heard) -> None:
        super().__init__(daemon=True)
        self._port, self._is_over, self._heard = port, is_over, heard

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._ask()
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                self._heard.failed.append(repr(error)[:200])

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ASK_MAX_S)
        try:
            body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "stream": True}
            asked = time.monotonic()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            begun = time.monotonic()
            text, is_whole = read_stream(answer.read().decode())
        finally:
            connection.close()
        if answer.status != 200 or not is_whole:
            self._heard.failed.append(f"{answer.status} {text[:200]}")
            return
        number, queued_ms = int(answer.headers["x-model-version"]), int(answer.headers["x-queue-wait-ms"])
        if not is_of(text, number):
            self._heard.mixed.append(f"version {number} said {text[:100]!r}")
        self._heard.answers.append(Told(asked, begun, time.monotonic(), queued_ms, number))


def read_stream(stream: str) -> tuple[str, bool]:
    """What was said, and whether the stream ended as it should."""
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return stream, False
    choices = [choice for event in events[:-1] for choice in json.loads(event).get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices), True


def is_of(text: str, number: int) -> bool:
    """Whether the model of this version said all of it. Odd versions are the first model's, even ones the second's."""
    return text.split() == [FIRST if number % 2 else SECOND, "says", "hello"]


def update(gate: Gateway, paths: list[Path], count: int, limit_at: float, heard: Heard) -> Updated:
    """Update so often, unless one fails or the time is over."""
    updated = Updated()
    while len(updated.took_s) < count and (left_s := limit_at - time.monotonic()) > 0:
        # Version 1 was there.
        number, began = len(updated.took_s) + 2, time.monotonic()
        try:
            got = ordered(gate.port, paths[(number + 1) % 2], left_s + END_S)
        except (OSError, http.client.HTTPException, ValueError) as error:
            updated.failed.append(f"version {number}: {error!r}"[:500])
            break
        if got.get("model_version") != number:
            updated.failed.append(f"version {number}: {got}"[:500])
            break
        updated.took_s.append(time.monotonic() - began)
        if number % TOLD_EVERY == 1 or number == count + 1:
            answers = f"{len(heard.answers)} answers, {len(heard.failed)} failed, {len(heard.mixed)} mixed"
            print(f"version {number} serves after {updated.took_s[-1]:.2f} s; {answers}", flush=True)
    return updated


def ordered(port: int, path: Path, timeout_s: float) -> Any:
    """What the gateway answers to an update, at its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        body = json.dumps({"model_repo_id": str(path)})
        connection.request("POST", "/update-model?wait=true", body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def gap_ms(times: list[float]) -> float:
    """The longest time between two of these."""
    return round(1_000 * max((after - before for before, after in itertools.pairwise(sorted(times))), default=0.0), 1)


def recorded_gap_ms(path: Path) -> float | None:
    """The longest gap in the grants; None if the recording is not whole."""
    try:
        return grant_gap_ms(read_events(path), NAME)
    except (OSError, ValueError) as error:
        print(error)
        return None


def measure(folder: Path, clients: int, updates: int, limit_s: float) -> dict[str, Any]:
    limit_at = time.monotonic() + limit_s
    paths = [folder / f"{name}.gguf" for name in (FIRST, SECOND)]
    for path, name in zip(paths, (FIRST, SECOND), strict=True):
        shutil.copy(tiny(name), path)
    model = {"path": str(paths[0]), "ctx_size": 512, "threads": 1, "memory_mib": 100, "parallel": 4, "versions": {}}
    is_over, heard, events = threading.Event(), Heard(), folder / "events.jsonl"
    sections = {"library": {"roots": [str(folder)]}, "gpus": [{"memory_mib": 4_000}]}
    with gateway({NAME: model}, server={"record_events": str(events)}, **sections) as gate:
        callers = [Caller(gate.port, is_over, heard) for _ in range(clients)]
        for caller in callers:
            caller.start()
        time.sleep(BEFORE_S)
        began = time.monotonic()
        updated = update(gate, paths, updates, limit_at, heard)
        is_over.set()
        end_by = time.monotonic() + END_S
        for caller in callers:
            caller.join(max(0.0, end_by - time.monotonic()))
        heard.failed += ["a request was not answered"] * sum(caller.is_alive() for caller in callers)
        # What the gateway's end does to such requests is no part of it.
        seen = Heard(list(heard.answers), list(heard.failed), list(heard.mixed))
    for problem in [*seen.failed, *seen.mixed, *updated.failed][:10]:
        print(problem)
    return {
        "updates": len(updated.took_s),
        "updates_failed": len(updated.failed),
        "clients": clients,
        "failed": len(seen.failed),
        "mixed": len(seen.mixed),
        "grant_gap_ms": recorded_gap_ms(events),
        **told(seen.answers, began),
        "update_s": round(statistics.median(updated.took_s or [0.0]), 3),
        "update_s_max": round(max(updated.took_s, default=0.0), 3),
    }


def told(answers: list[Told], began: float) -> dict[str, Any]:
    """What the answers say, of those before the first update began and of those after."""
    before, during = [one for one in answers if one.ended < began], [one for one in answers if one.ended >= began]
    return {
        "answers": len(answers),
        "answers_before": len(before),
        "versions_seen": len({one.version for one in answers}),
        "went_back": went_back(answers),
        "gap_before_ms_max": gap_ms([one.begun for one in before]),
        "gap_during_ms_max": gap_ms([one.begun for one in during]),
        "wait_before_ms_max": max((one.queued_ms for one in before), default=0),
        "wait_during_ms_max": max((one.queued_ms for one in during), default=0),
        "wait_before_ms": round(statistics.median([one.queued_ms for one in before] or [0]), 1),
        "wait_during_ms": round(statistics.median([one.queued_ms for one in during] or [0]), 1),
    }


def goals_of(updates: int) -> dict[str, float]:
    return {**GOALS, "updates_min": updates, "versions_seen_min": updates + 1}


def is_met(figures: Mapping[str, Any], goals: Mapping[str, float]) -> bool:
    """Whether every goal is; a figure that is not known meets none."""
    return all(
        (figure := figures[name[:-4]]) is not None and (figure <= goal if name.endswith("_max") else figure >= goal)
        for name, goal in goals.items()
    )


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=3_600.0, help="begin no update after so many seconds")
    options = parser.parse_args()
    run = Run("versions_under_load", options)
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as folder:
        figures = measure(Path(folder), options.clients, options.updates, options.limit_s)
    for name, value in figures.items():
        print(f"{name:>20} {value!s:>10}")
    goals = goals_of(options.updates)
    run.report(figures, goals, is_met(figures, goals))


if __name__ == "__main__":
    main()
