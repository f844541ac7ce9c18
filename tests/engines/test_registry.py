"""Engines of other packages are found by name, what is wrong with one is said; what decides abilities."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from greenroom.config.schema import Ability, Model
from greenroom.engines.base import EngineFacts, ProcessEngine
from greenroom.engines.registry import engine_for, facts_of
from greenroom.errors import ConfigError
from tests.config.test_plugins import install

CODE = """
from greenroom.engines.base import EngineFacts, ProcessEngine

class Mine(ProcessEngine):
    name = "{name}"
    def launch(self, model_id, model, place):
        raise NotImplementedError

class Unfinished(ProcessEngine):
    name = "{name}"

class Stranger:
    name = "{name}"
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def installed(site: Path, name: str, kind: str = "Mine", called: str | None = None) -> Model:
    module = f"acme_{name}"
    code = CODE.format(name=called or name)
    install(site, f"[greenroom.engines]\n{name} = {module}:{kind}\n", **{module: code})
    return Model(engine=name, path="/somewhere", options={"any": ["thing"]})


def test_an_engine_of_a_package_is_used_by_its_name_and_knows_nothing_until_it_says_so(site: Path) -> None:
    model = installed(site, "loom")
    engine = engine_for(model)
    assert isinstance(engine, ProcessEngine) and engine.name == "loom" and engine_for(model) is engine
    assert facts_of(model) == EngineFacts() == EngineFacts(None, False, None, False, False, None)
    assert (engine.estimate(model, 1), engine.files(model), engine.concurrency(model)) == (
        None,
        [Path("/somewhere")],
        8,
    )


def test_an_unknown_name_is_refused_with_those_there_are(site: Path) -> None:
    installed(site, "lathe")
    with pytest.raises(ValidationError, match=r"there is no engine 'lath'; there are comfyui, command, diffusers, "):
        Model(engine="lath", path="/somewhere")


def test_an_engine_that_is_not_named_is_not_imported(site: Path) -> None:
    install(site, "[greenroom.engines]\nbroken = acme_broken_engine:Mine\n", acme_broken_engine="raise RuntimeError\n")
    assert engine_for(Model(path="/a.gguf")).name == "llamacpp"


@pytest.mark.parametrize(
    ("name", "kind", "called", "why"),
    [
        ("saw", "Nobody", None, r"'saw' of acme_saw:Nobody does not load: .*no attribute"),
        ("axe", "Unfinished", None, r"engine 'axe' cannot be made: .*abstract.* launch"),
        ("awl", "Stranger", None, r"engine 'awl' extends neither ProcessEngine nor HostedEngine"),
        ("vice", "Mine", "virtue", r"engine 'vice' calls itself 'virtue'"),
    ],
)
def test_an_engine_that_cannot_be_used_is_told_with_its_reason(
    site: Path, name: str, kind: str, called: str | None, why: str
) -> None:
    model = installed(site, name, kind, called)
    with pytest.raises(ConfigError, match=why):
        engine_for(model)


def test_the_operator_then_the_engine_then_the_category_says_what_a_model_can_do() -> None:
    command = "serve ${PORT}"
    assert facts_of(Model(cmd=command)).abilities is None
    assert facts_of(Model(cmd=command, category="vision")).abilities is None
    assert facts_of(Model(cmd=command, category="speech")).abilities == {Ability.SPEECH}
    assert facts_of(Model(cmd=command, category="speech", abilities=("chat",))).abilities == {Ability.CHAT}
    assert facts_of(Model(path="/a.gguf", category="speech")).abilities == {Ability.CHAT, Ability.COMPLETIONS}


def test_category_embedding_serves_embeddings_unless_something_else_is_said() -> None:
    assert Model(path="/a.gguf", category="embedding").embedding
    assert Model(path="/a", category="embedding").engine == "transformers"
    assert not Model(path="/a.gguf", category="embedding", embedding=False).embedding
    assert not Model(path="/a.gguf", category="embedding", reranking=True).embedding
    assert facts_of(Model(cmd="serve ${PORT}", category="embedding")).abilities == {Ability.EMBEDDINGS}
