"""Which models may serve a request for a task, which are passed over and why, and by which rule one is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.config.schema import Ability, Config
from greenroom.core.events import Choice
from greenroom.core.model import ModelId
from greenroom.errors import ModelNotFound, NoCandidate
from greenroom.serving.tasks import CandidateFacts, Ladder, Tasks

FACTS = {
    "large": CandidateFacts(ModelId("large"), frozenset({Ability.CHAT, Ability.VISION}), 32_768, keeps_json=True),
    "small": CandidateFacts(ModelId("small"), frozenset({Ability.CHAT}), 4_096, keeps_json=True),
    "program": CandidateFacts(ModelId("program")),
    "cloud": CandidateFacts(ModelId("cloud"), frozenset({Ability.CHAT}), 200_000, is_remote=True),
    "cloud-json": CandidateFacts(ModelId("cloud-json"), keeps_json=True, is_remote=True),
}
NAMES = (*FACTS, "unborn")


def ladder_of(
    *candidates: str,
    sees: tuple[str, ...] = NAMES,
    ability: Ability | None = None,
    wants_json: bool = False,
    allows_remote: bool = True,
    **keys: Any,
) -> Ladder:
    models = {name: {"path": "m.gguf"} for name in NAMES}
    config = Config.model_validate({"models": models, "tasks": {"t": {"candidates": candidates, **keys}}})
    tasks = Tasks(FACTS.get, lambda: allows_remote)
    tasks.configure(config)
    task = tasks.find("t")
    assert task is not None
    return tasks.ladder(task, sees.__contains__, ability, wants_json=wants_json)


def names(ladder: Ladder) -> list[str]:
    return [one.id for one in ladder.models]


def test_all_candidates_in_their_order() -> None:
    assert names(ladder_of("small", "large", "program")) == ["small", "large", "program"]


TABLE = [
    ({"require": {"abilities": ["vision"]}}, ["large", "program"], "small", "it does not do vision"),
    ({"ability": Ability.EMBEDDINGS}, ["program"], "small", "it does not do embeddings"),
    ({"require": {"ctx_size": 8192}}, ["large", "program"], "small", "its context holds 4,096 tokens"),
    ({"require": {"strict_json": True}}, ["small", "large"], "program", "it does not promise strict JSON"),
    ({"wants_json": True}, ["small", "large"], "program", "it does not promise strict JSON"),
]


@pytest.mark.parametrize(("said", "left", "passed_over", "why"), TABLE)
def test_models_that_cannot_are_passed_over_and_why(
    said: dict[str, Any], left: list[str], passed_over: str, why: str
) -> None:
    ladder = ladder_of("small", "large", "program", **said)
    assert names(ladder) == left
    assert next(one.why for one in ladder.left_out if one.model == passed_over).startswith(why)


def test_json_goes_to_the_first_if_no_model_promises_it() -> None:
    assert names(ladder_of("program", "cloud", wants_json=True)) == ["program"]
    with pytest.raises(NoCandidate):
        ladder_of("small", "cloud", wants_json=True, require={"ctx_size": 8192})


def test_a_request_never_falls_to_a_remote_model_that_does_not_promise_json() -> None:
    assert names(ladder_of("small", "cloud", "cloud-json", wants_json=True)) == ["small", "cloud-json"]


def test_a_promise_of_the_last_resort_passes_no_local_model_over() -> None:
    assert names(ladder_of("program", "cloud-json", wants_json=True)) == ["program", "cloud-json"]
    assert names(ladder_of("program", "small", "cloud-json", wants_json=True)) == ["small", "cloud-json"]
    assert names(ladder_of("cloud", "cloud-json", wants_json=True)) == ["cloud-json"]


def test_the_guard_leaves_the_first_and_strips_remote_models_after_it() -> None:
    assert names(ladder_of("small", "cloud", "large", allows_remote=False)) == ["small", "large"]
    assert names(ladder_of("cloud", "cloud-json", "small", allows_remote=False)) == ["cloud", "small"]
    assert names(ladder_of("cloud", "cloud-json", allows_remote=False)) == ["cloud"]


def test_the_guard_goes_by_the_position_in_the_configuration() -> None:
    """A remote model does not become the first because the local one before it was passed over."""
    with pytest.raises(NoCandidate, match="remote models are no fallback now"):
        ladder_of("small", "cloud", allows_remote=False, require={"ctx_size": 8192})
    assert names(ladder_of("small", "cloud", require={"ctx_size": 8192})) == ["cloud"]


def test_models_that_the_caller_may_not_use_are_not_mentioned() -> None:
    ladder = ladder_of("large", "program", "small", sees=("small", "program"), require={"strict_json": True})
    assert names(ladder) == ["small"] and [one.model for one in ladder.left_out] == ["program"]
    with pytest.raises(ModelNotFound):
        ladder_of("large", "small", sees=("program",))


def test_a_task_none_of_whose_models_can_serve_says_why() -> None:
    with pytest.raises(NoCandidate) as caught:
        ladder_of("small", "unborn", ability=Ability.SPEECH)
    assert caught.value.message == (
        "No model of the task t can serve this request. small: it does not do speech; unborn: it has no version yet."
    )


def test_a_model_without_a_version_is_named_only_to_keys_that_may_use_it() -> None:
    with pytest.raises(NoCandidate) as caught:
        ladder_of("small", "unborn", sees=("small",), ability=Ability.SPEECH)
    assert "unborn" not in caught.value.message
    assert ladder_of("small", "unborn", sees=("small",)).left_out == ()


def test_a_task_of_models_without_a_version_is_not_there() -> None:
    with pytest.raises(ModelNotFound):
        ladder_of("unborn")


def test_remote_models_after_the_first_are_the_last_resort() -> None:
    ladder = ladder_of("small", "cloud", "large", prefer_first_s=7, pin_primary=True)
    served_as = {ModelId("small"): ModelId("small+tenant"), ModelId("cloud"): ModelId("cloud")}
    assert ladder.choice(served_as) == Choice(7.0, True, (ModelId("cloud"),))
    assert ladder_of("cloud", "small").choice({ModelId("cloud"): ModelId("cloud")}) == Choice(5.0)
    only = ladder_of("small", "cloud", require={"ctx_size": 8192})
    assert only.choice({ModelId("cloud"): ModelId("cloud")}) == Choice(5.0, last_resort=(ModelId("cloud"),))


def test_the_priority_is_the_tasks_or_else_another() -> None:
    assert ladder_of("small", priority="high").task.priority_or(1) == 0
    assert ladder_of("small", priority=7).task.priority_or(1) == 7
    assert ladder_of("small").task.priority_or(1) == 1
