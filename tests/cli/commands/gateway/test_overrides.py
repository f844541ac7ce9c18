from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.cli.commands.gateway.serve import Overrides
from greenroom.cli.parser import parser
from greenroom.config.schema import Config, LogLevel, Server


def said(*argv: str) -> Overrides:
    return Overrides.of(parser().parse_args(["serve", *argv]))


def test_what_is_not_said_is_left_as_the_file_has_it() -> None:
    config = Config(server=Server(host="::1", port=9, insecure=True), state_dir="/s")
    assert said().applied(config) == config


def test_what_is_said_wins_and_nothing_else_changes() -> None:
    config = Config(server=Server(host="::1", port=9, drain_s=3), state_dir="/s")
    changed = said(
        "--host", "0.0.0.0", "--port", "0", "--insecure", "--state-dir", "/t", "--log-level", "debug"
    ).applied(config)
    assert changed.server == Server(host="0.0.0.0", port=0, insecure=True, drain_s=3)
    assert (changed.state_dir, changed.log.level) == ("/t", LogLevel.DEBUG)


def test_a_lease_store_is_named_by_its_address() -> None:
    config = Config()
    assert said("--lease-store", "unix:///run/l.sock").applied(config).leases.store == "unix:///run/l.sock"
    assert said().applied(config).leases == config.leases


def test_beside_a_folder_of_models_the_cache_of_the_hub_is_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert Overrides().applied(Config()).roots == ()
    asked = Overrides(roots=(str(tmp_path),)).applied(Config())
    assert asked.roots == (str(tmp_path), str(tmp_path / "hub"))
    assert Overrides(roots=(str(tmp_path),)).applied(asked).roots == asked.roots, "each once, after a reload too"
