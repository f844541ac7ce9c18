"""Orders to a gateway that runs (load, unload, sleep, prepare, reload), its log lines and its decisions."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from greenroom.cli.address import parse
from greenroom.cli.client import Client
from greenroom.features.operations import cli as moves
from tests.cli.command import Cli, in_terminal
from tests.cli.commands.operating.test_ps import LOADING, model, status
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error, events

LOADED = {"model": "org/m", "tier": "ready", "took_s": 1.5, "memory": {"gpu0": 300}}


def test_load_says_what_it_does_and_how_it_ended(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("POST", "/api/v1/models/org%2Fm/load", answer(LOADED))
    out, err = cli("load", "org/m")
    assert out.startswith("org/m is ready after ") and err == "loading org/m\n"
    assert gateway.asked[-1].json == {}


@pytest.mark.parametrize(
    ("words", "tier", "told", "asked"),
    [
        ("load m --evict a --evict b/c", "ready", "loading m\n", {"evict": ["a", "b/c"]}),
        ("load m --evict a --force", "ready", "loading m\n", {"evict": ["a"], "force": True}),
        ("unload m --grace-s 2.5", "cold", "unloading m\n", {"grace_s": 2.5}),
        ("unload m --force", "cold", "unloading m\n", {"force": True}),
        ("sleep m --grace-s 0", "asleep", "putting to sleep m\n", {"grace_s": 0.0}),
        ("prepare m --evict a", "asleep", "preparing m\n", {"evict": ["a"]}),
    ],
)
def test_orders_pass_their_options_on_and_say_where_the_model_is(
    words: str, tier: str, told: str, asked: dict[str, Any], gateway: FakeGateway, cli: Cli
) -> None:
    moved = {"model": "m", "tier": tier, "took_s": 0.1, "memory": {}}
    gateway.on("POST", f"/api/v1/models/m/{words.split()[0]}", answer(moved))
    out, err = cli(*words.split())
    assert out.startswith(f"m is {tier} after ") and err == told
    assert gateway.asked[-1].json == asked


def test_sleep_of_a_cold_model_tells_how_to_bring_it_there(gateway: FakeGateway) -> None:
    gateway.on("POST", "/api/v1/models/m/sleep", answer({"model": "m", "tier": "cold", "took_s": 0.0, "memory": {}}))
    gateway.on("GET", "/api/v1/status", answer(status(LOADING)))
    shown = in_terminal(["sleep", "m", "--url", gateway.url])
    assert "m is cold after" in shown and "greenroom prepare m" in shown


def test_the_outlook_has_the_gateways_estimate(gateway: FakeGateway) -> None:
    client = Client(parse(gateway.url))
    gateway.on("GET", "/api/v1/status", answer(status(LOADING, model("quiet"))))
    assert moves.outlook(client, "minilm", 12.0) == "12s, about 3.2s to go"
    assert moves.outlook(client, "quiet", 12.0) == "12s"
    assert moves.outlook(client, "an-alias", 12.0) == "12s"


def test_the_outlook_survives_a_gateway_that_does_not_answer(gateway: FakeGateway) -> None:
    gateway.on("GET", "/api/v1/status", error(503, "shutting_down", "bye"))
    assert moves.outlook(Client(parse(gateway.url)), "m", 1.0) == "1.0s"


def test_a_terminal_sees_how_far_a_load_is(gateway: FakeGateway) -> None:
    def until_looked_at() -> None:
        """The load is done once the command has asked for the outlook, and a moment to show it."""
        for _ in range(3000):
            if sum("status" in asked.target for asked in gateway.asked) >= 2:
                return
            threading.Event().wait(0.01)

    loaded = answer(LOADED)
    loaded.before = until_looked_at
    gateway.on("POST", "/api/v1/models/minilm/load", loaded)
    gateway.on("GET", "/api/v1/status", answer(status(LOADING)))
    shown = in_terminal(["load", "minilm", "--url", gateway.url])
    assert "about 3.2s to go" in shown
    assert "org/m is ready after" in shown and "greenroom ps" in shown


NOTHING: dict[str, object] = {"added": [], "changed": [], "relabelled": [], "removed": [], "at_once": [], "took_s": 0.1}


def test_reload_prints_what_changed(gateway: FakeGateway, cli: Cli) -> None:
    changes = NOTHING | {
        "added": ["a"],
        "removed": ["b"],
        "changed": ["c"],
        "relabelled": ["d"],
        "at_once": ["log.level"],
    }
    gateway.on("POST", "/api/v1/reload", answer(changes))
    *lines, last = cli("reload").lines
    assert [line.partition(":")[0] for line in lines] == ["+ a", "- b", "~ c", "= d", "* log.level"]
    assert last.startswith("reloaded in ") and last.endswith(": 5 changes")


def test_reload_says_when_nothing_changed(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("POST", "/api/v1/reload", answer(NOTHING))
    assert cli("reload").out.endswith(": nothing changed\n")


def test_a_key_that_may_not_is_told_what_it_lacks(gateway: FakeGateway, cli: Cli) -> None:
    refusal = "The key chat may ask models, not manage them. Use a key with `admin: true`."
    gateway.on("POST", "/api/v1/reload", error(403, "not_allowed", refusal))
    said = cli("reload", status=1).err
    assert refusal in said and "`greenroom key new` makes one (--admin" in said


def test_the_last_lines_are_printed_as_they_are(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", "/api/v1/models/a%2Fb/logs", answer({"model": "a/b", "lines": ["one", "", "  two"]}))
    assert cli("logs", "a/b", "-n", "3") == ("one\n\n  two\n", "")
    assert gateway.asked[-1].target.endswith("/logs?lines=3")


def test_an_engine_that_said_nothing_is_explained_on_standard_error(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", "/api/v1/models/m/logs", answer({"model": "m", "lines": []}))
    out, err = cli("logs", "m")
    assert out == "" and err == "the engine of m has printed nothing; to see whether it runs: greenroom ps\n"


@pytest.mark.parametrize(("flags", "shown"), [([], "one\n\ntwo\n"), (["--json"], '"one"\n""\n"two"\n')])
def test_following_prints_lines_until_the_stream_ends(
    flags: list[str], shown: str, gateway: FakeGateway, cli: Cli
) -> None:
    stream = events("retry: 2000", "data: one", "data: ", ": still here", "data: two")
    gateway.on("GET", "/api/v1/models/m/logs/stream", stream)
    assert cli("logs", "m", "-f", "-n", "5", *flags) == (shown, "the gateway ended the stream\n")
    assert gateway.asked[-1].target.endswith("/logs/stream?lines=5")


PATH = "/api/v1/decisions"
LEFT = {"seq": 7, "at": 1_700_000_000.5, "what": "unload", "model": "qwen", "slot": "s1", "move": "m9"}
WHY = {"why": "leaving", "cause": "evicted", "for_model": "llama", "for_request": "r-1"}


def test_the_last_decisions_of_a_model_are_shown_with_their_reasons(gateway: FakeGateway, cli: Cli) -> None:
    gateway.on("GET", PATH, answer({"decisions": [{**LEFT, **WHY}]}))
    said = cli("decisions", "qwen", "-n", "5")
    assert gateway.asked[-1].target == f"{PATH}?limit=5&model=qwen"
    titles, shown = said.lines
    assert titles.split() == ["AT", "WHAT", "MODEL", "WHY"]
    assert shown.split()[1:] == ["unload", "qwen", "leaving", "cause=evicted", "for_model=llama", "for_request=r-1"]


def test_recalls_have_no_model_and_json_is_the_gateways_answer(gateway: FakeGateway, cli: Cli) -> None:
    told = {"decisions": [{"seq": 1, "at": 1.0, "what": "recall", "lease": "l-1", "why": "evicted"}]}
    gateway.on("GET", PATH, answer(told))
    assert cli("decisions").lines[1].split()[1:] == ["recall", "-", "evicted", "lease=l-1"]
    assert cli("decisions", "--json").json == told


@pytest.mark.parametrize(
    "logs", [answer({"model": "qwen", "lines": []}), error(403, "not_allowed", "This key may not see logs.")]
)
def test_a_model_without_decisions_is_said_to_have_none(gateway: FakeGateway, logs: Answer, cli: Cli) -> None:
    gateway.on("GET", PATH, answer({"decisions": []}))
    gateway.on("GET", "/api/v1/models/qwen/logs", logs)
    assert cli("decisions", "qwen").err == "nothing was decided about qwen lately\n"
