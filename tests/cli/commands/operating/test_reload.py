from __future__ import annotations

from tests.cli.command import Cli
from tests.cli.fake_gateway import FakeGateway, answer, error

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
