"""`greenroom trainer`: which replicas it asks, what it prints, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from greenroom.cli.main import main
from greenroom.features.versions.cli_trainer import addresses_of
from tests.cli.command import Cli
from tests.trainer.fake_replica import FakeReplica
from tests.waiting import PATIENCE_S, until_now


@pytest.fixture
def pair() -> Iterator[list[FakeReplica]]:
    made = [FakeReplica(), FakeReplica()]
    yield made
    for one in made:
        one.close()


def words(pair: list[FakeReplica]) -> list[str]:
    return [word for one in pair for word in ("--replica", one.url)]


def test_update_prints_what_became_of_each(pair: list[FakeReplica], cli: Cli) -> None:
    said = cli("trainer", "update", "org/new", *words(pair)).lines
    assert said[0] == "All replicas serve org/new as version 2."
    assert said[1] == f"  {pair[0].url} serves version 2 of org/new (c1)"


def test_update_fails_with_1_and_says_why(pair: list[FakeReplica], cli: Cli) -> None:
    pair[1].fails_with = ("fetch_failed", "no such repository")
    told = cli("trainer", "update", "org/new", "--json", *words(pair), status=1).json
    assert told["ok"] is False and [one["outcome"] for one in told["replicas"]] == ["rolled_back", "failed"]
    cli("trainer", "update", "org/new", "--no-all-or-nothing", *words(pair), status=1)
    assert "differs" in cli("trainer", "verify", *words(pair), status=1).out


def test_prompt_prints_every_answer(pair: list[FakeReplica], cli: Cli) -> None:
    assert cli("trainer", "prompt", "hi", *words(pair)).lines == [f"{one.url} (version 1): hi!" for one in pair]


def test_the_environment_names_weights_and_every_address_of_a_name(
    pair: list[FakeReplica], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = pair[0].url.rpartition(":")[2]
    monkeypatch.setenv("INFERENCE_REPLICAS_HOST", "127.0.0.1")
    monkeypatch.setenv("INFERENCE_SERVICE_URL", f"inference:{port}")
    monkeypatch.setenv("MODEL_REPO_ID", "org/new")
    assert main(["trainer", "update"]) == 0
    assert pair[0].serves[1] == "org/new" and pair[1].serves[1] == "org/old"
    assert addresses_of("127.0.0.1", 80) == ["http://127.0.0.1:80"]


def test_wrong_usage_is_told(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.delenv("MODEL_REPO_ID", raising=False)
    assert "MODEL_REPO_ID" in cli("trainer", "update", status=2).err
    cli("trainer", "verify", "--replica", "ftp://x", status=2)
    monkeypatch.setenv("INFERENCE_REPLICAS_HOST", "127.0.0.1")
    for url in ("http://inference:tcp", "ftp://inference"):
        monkeypatch.setenv("INFERENCE_SERVICE_URL", url)
        assert "INFERENCE_SERVICE_URL" in cli("trainer", "verify", status=2).err


def test_keep_lets_one_that_was_replaced_catch_up_until_it_is_ended(pair: list[FakeReplica]) -> None:
    argv = [sys.executable, "-P", "-m", "greenroom", "trainer", "keep", "--every-s", "0.05", *words(pair)]
    env = {**os.environ, "MODEL_REPO_ID": "org/new"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "All replicas serve org/new as version 2.\n"
            pair[1].versions[:] = [(1, "org/old", "c0")]
            assert any("1 caught up" in line for line in keeper.stdout)
            assert pair[1].serves == (2, "org/new", "c1")
        finally:
            keeper.terminate()
        assert keeper.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("what", "number", "status"),
    [("update", signal.SIGINT, 130), ("keep", signal.SIGTERM, 0), ("keep", signal.SIGINT, 0)],
)
def test_it_ends_at_once_in_the_middle_of_an_update(
    pair: list[FakeReplica], what: str, number: signal.Signals, status: int
) -> None:
    pair[1].never_ends = True
    argv = [sys.executable, "-P", "-m", "greenroom", "trainer", what, "org/new", *words(pair)]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        until_now(lambda: any("/update-model/" in path for _, path, _ in pair[1].calls), "it waits for the update")
        running.send_signal(number)
        assert running.wait(PATIENCE_S) == status


@pytest.mark.parametrize("what", [["verify"], ["prompt", "hi"], ["update", "org/new"]])
def test_a_name_without_an_address_is_told(what: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("INFERENCE_REPLICAS_HOST", "nowhere.invalid")
    assert "the replicas cannot be asked" in cli("trainer", *what, status=1).err
