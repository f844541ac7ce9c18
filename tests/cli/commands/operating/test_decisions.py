"""`greenroom decisions` shows why models came and left."""

from __future__ import annotations

import pytest

from tests.cli.command import Cli
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error

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
