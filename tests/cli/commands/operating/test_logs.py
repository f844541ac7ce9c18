from __future__ import annotations

import pytest

from tests.cli.command import Cli
from tests.cli.fake_gateway import FakeGateway, answer, events


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
