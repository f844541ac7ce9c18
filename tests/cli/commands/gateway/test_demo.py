from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from greenroom.cli.commands.gateway import demo
from greenroom.cli.commands.gateway.serve import Overrides
from greenroom.cli.demo_models import DemoModel
from greenroom.cli.failures import CommandFailed
from greenroom.config.problems import budget_mib, problems
from greenroom.errors import StateDirBusy
from greenroom.process.state_dir import StateDir
from tests.cli.command import Cli

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
