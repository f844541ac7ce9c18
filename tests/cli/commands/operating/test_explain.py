"""`greenroom explain` says in words what the gateway says it would do."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.features.planning.cli import words
from tests.cli.command import Cli
from tests.cli.fake_gateway import FakeGateway, answer

PATH = "/api/v1/explain"


def explained(action: str, **said: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("slot", "move", "why", "position", "eta_s", "retry_after_s"))
    return {"action": action, "model": "qwen", **nothing, "behind": [], "evict": [], **said}


def evicted(model: str, to: str, why: str) -> dict[str, str]:
    return {"model": model, "slot": "s1", "to": to, "why": why}


def on(*names: str) -> list[dict[str, Any]]:
    return [{"id": f"id-{name}", "name": name, "mib": 100} for name in names]


def test_the_question_carries_what_was_said(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("POST", PATH, answer(explained("serve", slot="s1")))
    assert cli("explain", "qwen").out == "qwen is ready: the request would be served at once\n"
    assert gateway.asked[-1].json == {"model": "qwen"}
    argv = ["explain", "qwen", "--priority", "high", "--tenant", "lab", "--stream", "--budget-s", "2.5"]
    assert "its answer would be cut after 2.5s: its budget" in cli(*argv).out
    said = {"model": "qwen", "priority": "high", "tenant": "lab", "stream": True, "x_budget_s": 2.5}
    assert gateway.asked[-1].json == said


WAKE, LOAD, WAIT = "qwen would be woken", "qwen would be loaded", "qwen would have to wait: "
NOT_KNOWN, LEASED = "  how long that takes is not known", f"{WAIT}its memory is leased to other programs"
REFUSED_THEN = "; after 2.5s it would be refused"
REFUSED_AT_ONCE = "  this caller would be refused at once: it may not wait (server.wait_max_s, stream_wait_max_s)"
TOO_LATE = "  this caller would be refused: its time is over by then; the model would be brought all the same"
BUSY = f"{WAIT}it is ready and answers as many requests at once as it can"
TOO_LARGE = "qwen would be refused: it does not fit on the devices there are"
IDLE = evicted("a", "cold", "idle for 3m")


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        (
            explained("join", slot="s1", position=2, eta_s=4.0),
            [
                "qwen is on its way already: the request would wait for it",
                "  place in the queue: 2",
                "  its answer would begin in about 4.0s",
            ],
        ),
        (
            explained("swap", move="load", evict=[IDLE, evicted("b", "asleep", "asked for seldom")], eta_s=21.0),
            [
                f"{LOAD} after a and b made room",
                "  a would be unloaded: idle for 3m",
                "  b would fall asleep: asked for seldom",
                "  its answer would begin in about 21s",
            ],
        ),
        (explained("swap", move="wake"), [WAKE, f"{NOT_KNOWN} yet"]),
        (explained("swap", move="wake", wait_max_s=2.5), [WAKE, f"{NOT_KNOWN} yet{REFUSED_THEN}"]),
        (
            explained("wait", why="no_room", behind=["a"], position=7),
            [
                f"{WAIT}the models that would have to leave for it may not do so yet",
                "  requests for a would go first",
                "  place in the queue: 7",
                f"{NOT_KNOWN} yet",
            ],
        ),
        (explained("wait", why="leased", leases=["train", "render"]), [f"{LEASED} (train and render)", NOT_KNOWN]),
        (explained("wait", why="leased", leases=[], wait_max_s=2.5), [LEASED, f"{NOT_KNOWN}{REFUSED_THEN}"]),
        (explained("wait", why="new_word", eta_s=1.0), [f"{WAIT}new word"]),
        (
            explained("wait", why="new_word", calls_off=["b"], eta_s=1.0),
            [f"{WAIT}new word", "  b would have to be planned again, being less urgent"],
        ),
        (explained("swap", move="load", too_late=True, eta_s=9.0), [LOAD, TOO_LATE]),
        (
            explained("swap", move="load", too_late=True, position=1, wait_max_s=0.0),
            [LOAD, REFUSED_AT_ONCE, "  the model would be brought all the same"],
        ),
        # Nothing is told of the place and time of a request that is refused at once.
        (explained("wait", why="busy", position=1, eta_s=1.0, wait_max_s=0.0), [BUSY, REFUSED_AT_ONCE, None]),
        (
            explained("wait", why="new_word", eta_s=9.0, wait_max_s=2.5),
            [f"{WAIT}new word", f"  its answer would begin in about 9.0s{REFUSED_THEN}"],
        ),
        (
            explained("wait", why="new_word", eta_s=2.0, wait_max_s=2.5),
            [f"{WAIT}new word", "  its answer would begin in about 2.0s"],
        ),
        (
            explained("refuse", why="load_failed", retry_after_s=5.0),
            [
                "qwen would be refused: its last load failed or its engine ended again, and it is not tried again yet",
                "  worth another try in about 5.0s",
            ],
        ),
        (
            explained("refuse", why="excluded", beside=["a", "b"]),
            [
                "qwen would be refused: scheduler.company does not let it be ready beside a pinned model",
                "  not beside: a and b",
            ],
        ),
        (explained("swap", move="load", evict=[IDLE], devices=on("gpu1")), [f"{LOAD} on gpu1 after a made room"]),
        (explained("swap", move="wake", devices=on("gpu0", "gpu1", "host")), [f"{WAKE} on gpu0 and gpu1"]),
        (explained("swap", move="load", devices=on("host")), [f"{LOAD} on host"]),
        (
            explained("refuse", why="too_large", detail="qwen may use only gpu7. Name what is there."),
            [TOO_LARGE, "  qwen may use only gpu7. Name what is there."],
        ),
        (explained("refuse", why="too_large"), [TOO_LARGE]),
    ],
)
def test_every_answer_is_told_in_words(told: dict[str, Any], lines: list[str | None]) -> None:
    """Up to these lines; None says that there are no more."""
    assert [*words(told), None][: len(lines)] == lines


def test_every_candidate_of_a_task_is_told_with_its_reason() -> None:
    candidates = [
        {"model": "large", "verdict": "slower", "why": None, "eta_s": 47.0},
        {"model": "qwen", "verdict": "chosen", "why": None, "eta_s": 0.0},
        {"model": "broken", "verdict": "refused", "why": "load_failed", "eta_s": None},
        {"model": "dumb", "verdict": "left_out", "why": "it does not do chat", "eta_s": None},
        {"model": "cloud", "verdict": "last_resort", "why": None, "eta_s": 0.0},
    ]
    assert words(explained("serve", slot="s1", task="coding", candidates=candidates)) == [
        "qwen is ready: the request would be served at once",
        "  candidate large: a later one serves sooner by more than prefer_first_s (could begin in about 47s)",
        "  candidate qwen: it is the one (could begin now)",
        "  candidate broken: its last load failed or its engine ended again, and it is not tried again yet",
        "  candidate dumb: passed over: it does not do chat",
        "  candidate cloud: it is remote, and used only if no other can serve in time (could begin now)",
    ]
