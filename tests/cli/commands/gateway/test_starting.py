"""How serve, replicas and demo begin: options that win over the file, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from greenroom.cli.commands import demo
from greenroom.cli.commands.serve import Overrides
from greenroom.cli.demo_models import DemoModel
from greenroom.cli.failures import CommandFailed
from greenroom.cli.parser import parser
from greenroom.config.problems import budget_mib, problems
from greenroom.config.schema import Config, LogLevel, Server
from greenroom.errors import StateDirBusy
from greenroom.process.state_dir import StateDir
from tests.cli.command import Cli
from tests.standins import fake_gpu


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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\nmodels: {{}}\n")
    return file


def test_ports_must_be_there(config: Path, cli: Cli) -> None:
    assert "no 2 ports from 65535" in cli("replicas", "2", "--first-port", "65535", "--config", config, status=1).err


def test_files_that_all_would_write_are_refused(config: Path, cli: Cli) -> None:
    config.write_text(config.read_text() + "server: {record_events: events.jsonl}\n")
    assert (
        "server.record_events: replicas cannot write one file together"
        in cli("replicas", "2", "--config", config, status=1).err
    )


def test_gpus_are_shared_by_a_store_or_not_at_all(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    gpus = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-aaaa", 10_000))
    config.write_text(config.read_text() + f"memory: {{probe: file, file: {gpus}}}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "leases.store" in cli("replicas", "2", "--config", config, status=1).err
    assert not os.path.exists(tmp_path / "state-replicas")


MODELS = [
    DemoModel("smollm2", Path("/c/smollm2.gguf"), "chat", 300),
    DemoModel("minilm", Path("/c/minilm.gguf"), "embedding", 160),
]


def test_the_budget_holds_each_model_but_not_both() -> None:
    config = demo.configuration(MODELS, Overrides())
    budget = budget_mib(config)
    needs = [model.memory_mib or 0 for model in config.models.values()]
    assert budget is not None
    assert max(needs) <= budget < sum(needs)
    assert [text for text in problems(config) if "there is no file" not in text] == []


def test_only_the_embedding_model_serves_embeddings_and_only_the_chat_model_is_loaded_at_once() -> None:
    models = demo.configuration(MODELS, Overrides()).models
    assert {name: (model.embedding, model.preload) for name, model in models.items()} == {
        "smollm2": (False, True),
        "minilm": (True, False),
    }


def test_two_demos_on_two_ports_do_not_share_a_state_directory() -> None:
    one, two = (demo.configuration(MODELS, Overrides(port=port)) for port in (1, 2))
    assert one.state_dir != two.state_dir
    assert demo.configuration(MODELS, Overrides(state_dir="/mine")).state_dir == "/mine"


def test_without_llama_cpp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli("demo", status=1).err == "greenroom: the demo needs llama.cpp: pip install 'greenroom[demo]'\n"


@pytest.mark.usefixtures("own_signals")
def test_a_second_demo_on_the_same_port_is_told_to_take_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    taken = demo.configuration(MODELS, Overrides(port=8210)).state_dir
    first = StateDir.open(taken)
    try:
        with pytest.raises(CommandFailed) as told:
            demo.serve_models(MODELS, Overrides(port=8210), began=0.0)
        assert "a demo serves port 8210 already" in told.value.message and "make serve PORT=8211" in told.value.message
        assert f"pid {os.getpid()}" in (told.value.details or "")
        # A user who chose the directory chooses another one.
        with pytest.raises(StateDirBusy):
            demo.serve_models(MODELS, Overrides(state_dir=taken), began=0.0)
    finally:
        first.close()
