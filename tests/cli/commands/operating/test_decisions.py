"""`greenroom decisions` shows why models came and left."""

from __future__ import annotations

import json

import pytest

from greenroom.cli.main import main
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error

PATH = "/api/v1/decisions"
LEFT = {"seq": 7, "at": 1_700_000_000.5, "what": "unload", "model": "qwen", "slot": "s1", "move": "m9"}
WHY = {"why": "leaving", "cause": "evicted", "for_model": "llama", "for_request": "r-1"}


def test_the_last_decisions_of_a_model_are_shown_with_their_reasons(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on("GET", PATH, answer({"decisions": [{**LEFT, **WHY}]}))
    assert main(["decisions", "qwen", "-n", "5"]) == 0
    assert gateway.asked[-1].target == f"{PATH}?limit=5&model=qwen"
    titles, shown = capsys.readouterr().out.splitlines()
    assert titles.split() == ["AT", "WHAT", "MODEL", "WHY"]
    assert shown.split()[1:] == ["unload", "qwen", "leaving", "cause=evicted", "for_model=llama", "for_request=r-1"]


def test_recalls_have_no_model_and_json_is_the_gateways_answer(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"decisions": [{"seq": 1, "at": 1.0, "what": "recall", "lease": "l-1", "why": "evicted"}]}
    gateway.on("GET", PATH, answer(told))
    assert main(["decisions"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["recall", "-", "evicted", "lease=l-1"]
    assert main(["decisions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told


@pytest.mark.parametrize(
    "logs", [answer({"model": "qwen", "lines": []}), error(403, "not_allowed", "This key may not see logs.")]
)
def test_a_model_without_decisions_is_said_to_have_none(
    gateway: FakeGateway, logs: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on("GET", PATH, answer({"decisions": []}))
    gateway.on("GET", "/api/v1/models/qwen/logs", logs)
    assert main(["decisions", "qwen"]) == 0
    assert capsys.readouterr().err == "nothing was decided about qwen lately\n"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_unknown_model_is_refused(
    gateway: FakeGateway, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on("GET", PATH, answer({"decisions": []}))
    gateway.on("GET", "/api/v1/models/qwne/logs", error(404, "model_not_found", "There is no model qwne."))
    assert main(["decisions", "qwne", *options]) == 1
    assert capsys.readouterr() == ("", "greenroom: There is no model qwne. `greenroom ps` lists those there are.\n")


@pytest.mark.parametrize("wrong", ["0", "-1", "1001", "all"])
def test_how_many_is_a_number_that_the_gateway_takes(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["decisions", f"--last={wrong}"])
    assert "1,000" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["decisions", "explain"])
def test_a_name_that_no_model_can_have_is_wrong_usage(
    gateway: FakeGateway, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, ""]) == 2
    assert capsys.readouterr() == ("", "greenroom: '' is no name of a model: it is empty\n")
    assert main([command, "a\tb"]) == 2
    assert "control or invisible characters" in capsys.readouterr().err
    assert gateway.asked == []
