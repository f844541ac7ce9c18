from __future__ import annotations

from typing import Any

import pytest

from greenroom.cli.commands import ps
from tests.cli.command import Cli, in_terminal
from tests.cli.fake_gateway import FakeGateway, answer


def model(model_id: str, **fields: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "id": model_id,
        "tier": "cold",
        "status": "unloaded",
        "pinned": False,
        "in_flight": 0,
        "waiting": 0,
        "last_used_s_ago": None,
        "memory": {},
        "moving": None,
        "retry_in_s": None,
        "last_error": None,
        "pid": None,
    }
    return plain | fields


def status(*models: dict[str, Any]) -> dict[str, Any]:
    return {
        "uptime_s": 125.0,
        "queue": {"depth": 2, "max": 1000, "avg_wait_ms": None},
        "devices": [
            {"id": "gpu0", "kind": "gpu", "capacity_mib": 8192, "used_mib": 300},
            {"id": "host", "kind": "host", "capacity_mib": 64000, "used_mib": 0},
        ],
        "models": list(models),
    }


READY = model("smollm2", tier="ready", memory={"gpu0": 250, "host": 50}, last_used_s_ago=42.0, pid=4711, pinned=True)
LOADING = model("minilm", waiting=2, moving={"kind": "load", "since_s": 1.0, "eta_s": 3.2})
WAKING = model(
    "qwen", tier="asleep", memory={"host": 8000}, waiting=1, pid=4712, moving={"kind": "wake", "since_s": 0.1}
)
FAILED = model("broken", last_error={"code": "model_load_failed", "message": "no"})


LACKS = "xllamacpp is not installed in /a/python; type: /a/python -m pip install 'greenroom[llamacpp]'"


def broken(message: str) -> dict[str, Any]:
    last_error = {"code": "model_load_failed", "message": message}
    return model("tiny", tier="asleep", last_error=last_error, retry_in_s=9.7)


@pytest.mark.parametrize(
    ("shown", "note"),
    [
        ({**FAILED, "missing": LACKS}, f"cannot be loaded: {LACKS}"),
        ({**FAILED, "retry_in_s": 20.0}, "failed, again in 20s: no; greenroom logs broken"),
        (model("smollm2", tier="ready", last_used_s_ago=2.0, unload_in_s=42.0), "leaves in 42s"),
        (
            broken("tiny was lost: its worker ended (killed by SIGKILL)."),
            "failed, again in 9.7s: its worker ended (killed by SIGKILL); greenroom logs tiny",
        ),
        (broken("tiny could not be loaded: no such file."), "failed, again in 9.7s: no such file; greenroom logs tiny"),
    ],
)
def test_a_note_says_what_is_wrong_and_when_it_changes(shown: dict[str, Any], note: str) -> None:
    (row,) = ps.rows(status(shown))
    assert row[-1] == note


def test_a_note_is_one_short_line() -> None:
    (row,) = ps.rows(status(broken("tiny could not be loaded: " + "many words " * 50 + "\nand lines.")))
    assert len(row[-1]) < 150 and "\n" not in row[-1] and "words ma…; greenroom logs tiny" in row[-1]


def test_a_pipe_gets_one_stable_line_for_each_model(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", "/api/v1/status", answer(status(READY, LOADING, WAKING, FAILED)))
    out, err = cli("ps")
    assert err == ""
    assert out.splitlines() == [
        "MODEL    TIER     PLACE       MEMORY_MIB  IN_FLIGHT  WAITING  IDLE  PID   NOTE",
        "smollm2  ready    GPU         300         0          0        42s   4711  pinned",
        "minilm   loading  disk        -           0          2        -     -     about 3.2s to go",
        "qwen     waking   green-room  8000        0          1        -     4712  -",
        "broken   cold     disk        -           0          0        -     -     failed: no; greenroom logs broken",
    ]


def test_what_is_wrong_with_the_key_file_is_told_beside_the_table(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", "/api/v1/status", answer({**status(READY), "key_problems": ["the key file k.json is empty"]}))
    assert "warning: the key file k.json is empty" in cli("ps").err


def test_a_ready_model_is_where_its_memory_is_and_not_idle_while_it_answers() -> None:
    on_host, nowhere = model("m", tier="ready", memory={"host": 9}), model("n", tier="ready")
    assert [row[2] for row in ps.rows(status(on_host, nowhere))] == ["host", "-"]
    (row,) = ps.rows(status(model("m", tier="ready", in_flight=1, last_used_s_ago=3.0)))
    assert row[6] == "-"


@pytest.mark.parametrize("kind", ["load", "wake", "sleep", "prepare", "unload"])
def test_a_move_is_shown_in_one_word_instead_of_the_tier(kind: str) -> None:
    shown = ps.tier(model("m", moving={"kind": kind, "since_s": None, "eta_s": None}))
    assert shown.replace("-", "").isalpha() and shown.endswith(("ing", "asleep"))


def test_the_summary_lists_the_models_of_each_tier_and_their_memory() -> None:
    asleep = model("qwen", tier="asleep", memory={"host": 15_320})
    shown = ps.summary(status(READY, asleep, *(model(f"m{number}") for number in range(7))))
    assert shown[:3] == [
        "ready: smollm2 (GPU 250 MiB, host 50 MiB)",
        "asleep in the green room: qwen (host 15,320 MiB)",
        "cold: m0, m1, m2, m3, m4 and 2 more",
    ]


def test_the_summary_says_how_large_the_green_room_is_where_it_has_a_bound() -> None:
    bounded = status(model("qwen", tier="asleep", memory={"host": 15_320}))
    bounded["green_room"] = {"size_mib": 64_000, "used_mib": 15_320, "free_mib": 48_680, "models": ["qwen"]}
    assert ps.summary(bounded)[0] == "asleep in the green room: qwen (host 15,320 MiB, its size 64,000 MiB)"


def test_the_summary_leaves_out_a_host_that_nothing_uses() -> None:
    assert ps.summary(status()) == ["gpu0: 300 of 8,192 MiB used", "2 waiting; up for 2m"]


def test_a_terminal_gets_a_drawn_table_and_a_summary(gateway: FakeGateway) -> None:
    """In a real terminal, where a model's name cannot send it commands."""
    gateway.on("GET", "/api/v1/status", answer(status(READY, model("evil\x1b[2J[bold]"))))
    shown = in_terminal(["ps", "--url", gateway.url])
    assert "smollm2" in shown and "gpu0: 300 of 8,192 MiB used" in shown
    assert "\x1b[2J" not in shown and "[bold]" in shown
