"""What callers notice of an update: a model of 8 B gets new weights beside itself while 32 of them stream.

    python -m benchmarks.hosted.update --models FOLDER [--python PYTHON] [--updates 4]

The callers ask again as soon as they are answered. Tokens a second while updates run are compared with those of the
same callers before. The flip is the longest time for which a request queued around the end of an update; there is a
place for every one, so without an update no request queues. Every answer must be whole, and no request sent after
the first answer of a version may get an older one.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hosted.gateway import PROMPT, HostedGateway, hosted_gateway, hosted_model, hosted_options
from benchmarks.hosted.hardware import Card
from benchmarks.hosted.models import EIGHT, make_models
from benchmarks.rig.gateways import ASK_MAX_S
from benchmarks.rig.result import Run
from benchmarks.versions.judge import went_back

NAME = "chat"
STREAMS = 32
# Not all of one length, so that answers do not begin together.
TOKENS = (96, 160)
PROCESSES = 8
BEFORE_S, REST_S, FLIP_S = 15.0, 3.0, 1.0
GOALS = {"rate_during_min": 0.9, "flip_ms_max": 50.0, "cut_max": 0, "went_back_max": 0}
SETTINGS = {"concurrency": STREAMS + 8, "ctx_size": 2048, "cache_tokens": 2 * STREAMS * 512}


@dataclass(slots=True)
class Told:
    """One answer: when it was asked for and begun, how long it queued, its version, and whether it was whole."""

    asked: float
    begun: float
    queued_ms: float
    version: int
    whole: bool = False


@dataclass(slots=True)
class Heard:
    """What callers were answered, and when each token came. The clock is the same in all processes."""

    answers: list[Told] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, other: Heard) -> None:
        self.answers += other.answers
        self.tokens += other.tokens
        self.errors += other.errors

    def rate(self, since: float, until: float) -> float:
        return sum(since <= at < until for at in self.tokens) / (until - since)

    def around(self, since: float, until: float) -> list[Told]:
        return [one for one in self.answers if since <= one.asked < until]


class Callers:
    """In processes of their own, so that the gateway is measured and not they."""

    def __init__(self, port: int) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._over, self._heard = spawned.Event(), spawned.SimpleQueue()
        shares = [range(first, STREAMS, PROCESSES) for first in range(PROCESSES)]
        self._processes = [
            spawned.Process(target=_ask_all, args=(port, share, self._over, self._heard)) for share in shares
        ]

    def begin(self) -> None:
        for process in self._processes:
            process.start()

    def end(self) -> Heard:
        self._over.set()
        heard = Heard()
        for _ in self._processes:
            heard.add(self._heard.get())
        for process in self._processes:
            process.join()
        return heard


def _ask_all(port: int, numbers: range, over: Any, told: Any) -> None:
    heard = Heard()
    threads = [threading.Thread(target=_ask_on, args=(port, number, over, heard)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.put(heard)


def _ask_on(port: int, number: int, over: Any, heard: Heard) -> None:
    dice, turn = random.Random(number), 0
    while not over.is_set():
        turn += 1
        _ask(port, f"w{1_000 + number} w{2_000 + turn} {PROMPT}", dice.randint(*TOKENS), heard)


def _ask(port: int, prompt: str, tokens: int, heard: Heard) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_MAX_S)
    try:
        asked = time.monotonic()
        said = json.dumps(body | {"max_tokens": tokens, "stream": True})
        connection.request("POST", "/v1/chat/completions", said, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            heard.errors.append(f"{response.status} {response.read(300)!r}")
            return
        queued_ms, version = float(response.headers["X-Queue-Wait-Ms"]), int(response.headers["X-Model-Version"])
        told = Told(asked, time.monotonic(), queued_ms, version)
        heard.answers.append(told)
        for line in response:
            if line.startswith(b"data: [DONE]"):
                told.whole = True
            elif b'"content":' in line:
                heard.tokens.append(time.monotonic())
    except (OSError, http.client.HTTPException) as error:
        heard.errors.append(repr(error))
    finally:
        connection.close()


def measure(folders: list[Path], gateway: HostedGateway, updates: int) -> dict[str, Any]:
    gateway.stream(NAME, 8)
    callers = Callers(gateway.port)
    callers.begin()
    # The first answers capture graphs of these sizes.
    time.sleep(BEFORE_S)
    calm = (time.monotonic(), time.monotonic() + BEFORE_S)
    time.sleep(BEFORE_S)
    spans = []
    for number in range(updates):
        since = time.monotonic()
        gateway.ask("/update-model?wait=true", {"model_repo_id": str(folders[(number + 1) % 2])})
        spans.append((since, time.monotonic()))
        print(f"update {number + 1} took {spans[-1][1] - since:.1f} s", flush=True)
        time.sleep(REST_S)
    heard = callers.end()
    for error in heard.errors[:5]:
        print(error)
    before = heard.rate(*calm)
    # The flip comes at the end of an update.
    flips = [heard.around(until - FLIP_S, until + FLIP_S) for _, until in spans]
    return {
        "before_per_s": round(before),
        "answers": len(heard.answers),
        "cut": len(heard.errors) + sum(not one.whole for one in heard.answers),
        "versions": sorted({one.version for one in heard.answers}),
        "went_back": went_back(heard.answers),
        "took_s": [round(until - since, 1) for since, until in spans],
        "rate_during": [round(heard.rate(*span) / before, 3) for span in spans],
        "flip_ms": [max(one.queued_ms for one in around) for around in flips],
        "first_token_ms": [round(_first_token_ms(around)) for around in flips],
        "first_token_before_ms": round(_first_token_ms(heard.around(*calm))),
    }


def _first_token_ms(answers: list[Told]) -> float:
    """The longest."""
    return 1000 * max(one.begun - one.asked for one in answers)


def main() -> None:
    parser = hosted_options(__doc__)
    parser.add_argument("--updates", type=int, default=4)
    args = parser.parse_args()
    run = Run("update_gpu", args, Card().name)
    make_models(args.python, args.models, *EIGHT[:2])
    folders = [args.models / name for name in EIGHT[:2]]
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as scratch:
        model = hosted_model(folders[0], args.python, **SETTINGS, versions={"keep": 2})
        with hosted_gateway(Path(scratch), {NAME: model}, library={"roots": [str(args.models)]}) as gateway:
            figures = measure(folders, gateway, args.updates)
    met = (
        min(figures["rate_during"]) >= GOALS["rate_during_min"]
        and max(figures["flip_ms"]) <= GOALS["flip_ms_max"]
        and figures["cut"] == figures["went_back"] == 0
        and figures["versions"] == list(range(1, args.updates + 2))
    )
    run.report(figures, GOALS, met)


if __name__ == "__main__":
    main()
