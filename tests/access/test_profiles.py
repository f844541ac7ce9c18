"""Which profile counts, and that what a client says of itself can only narrow it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from greenroom.access.keys import ANYONE, Caller
from greenroom.access.profiles import REMEMBERED_MAX, Profiles, RequestProfile
from greenroom.config.schema import Config
from greenroom.config.sections.keys import ModelScope
from greenroom.errors import BadRequest

NONE: frozenset[str] = frozenset()
LEFT = Caller(name="left", tenant=None, priority_max=0, admin=False)


def profiles(**said: Any) -> Profiles:
    return Profiles(Config(profiles=said).profiles)


def one(client: str = "", **said: Any) -> RequestProfile:
    found = profiles(p={"keys": ["*"], **said}).of("key", "", client)
    assert found is not None
    return found


def sees(caller: Caller, *models: str) -> list[bool]:
    return [caller.sees(model) for model in models]


def switches(profile: RequestProfile, sent: object = None, of_model: object = None) -> dict[str, Any] | None:
    """What becomes of the switches that a caller sends and a model sets."""
    field = "chat_template_kwargs"
    fields = {} if sent is None else {field: msgspec.Raw(json.dumps(sent).encode())}
    puts = {} if of_model is None else {field: json.dumps(of_model).encode()}
    put = profile.template_switches(fields, puts, NONE)
    return json.loads(put[field]) if put else None


@pytest.mark.parametrize(
    ("key", "tenant", "wanted"),
    [
        ("team-a", "", "teams"),
        ("team-a", "lab", "teams"),
        ("solo", "lab", "labs"),
        ("solo", "lab-2", "labs"),
        ("solo", "", "rest"),
        ("solo", "elsewhere", "rest"),
    ],
)
def test_the_first_profile_counts_that_names_key_or_tenant(key: str, tenant: str, wanted: str) -> None:
    found = profiles(teams={"keys": ["team-*"]}, labs={"tenants": ["lab*"]}, rest={"keys": ["*"]}).of(key, tenant, "")
    assert found is not None and found.name == wanted


def test_without_a_profile_that_fits_there_is_none() -> None:
    assert profiles(teams={"keys": ["team-*"], "tenants": ["lab"]}).of("other", "", "") is None
    assert profiles(labs={"tenants": ["*"]}).of(ANYONE.name, "", "") is None


def test_of_several_patterns_of_clients_the_first_counts_and_no_id_fits_none() -> None:
    clients = {"bot-*": {"default_model": "small"}, "*": {"default_model": "any"}}
    said = profiles(p={"keys": ["*"], "default_model": "large", "clients": clients})
    found = [said.of("key", "", client) for client in ("bot-1", "editor", "")]
    assert [profile and profile.default_model for profile in found] == ["small", "any", "large"]


def test_a_client_sees_only_models_that_profile_and_key_allow_as_well() -> None:
    profile = one("bot", models=["a*", "b"], clients={"bot": {"models": ["*1", "c"]}})
    assert sees(profile.narrowed(LEFT), "a1", "a2", "b", "c", "x1") == [True, False, False, False, False]
    keyed = Caller(name="k", tenant=None, priority_max=0, admin=False, models=ModelScope(["a2", "a1"]))
    assert sees(profile.narrowed(keyed), "a1", "a2", "a11") == [True, False, False]
    # What was narrowed for one caller is not another's.
    assert sees(profile.narrowed(LEFT), "a11") == [True]
    assert one().narrowed(keyed) == keyed


@pytest.mark.parametrize(
    ("profile", "client", "said", "wanted"),
    [
        ("normal", None, None, 1),
        ("normal", None, 0, 1),
        ("normal", None, 2, 2),
        ("low", "high", None, 2),
        ("high", "low", None, 2),
        ("high", "low", -5, 2),
        (None, "low", None, 2),
        (None, None, None, 1),
        (None, None, 0, 0),
    ],
)
def test_priority_is_a_default_and_a_bound_and_a_client_can_only_worsen_it(
    profile: str | None, client: str | None, said: int | None, wanted: int
) -> None:
    assert one("c", priority=profile, clients={"c": {"priority": client}}).priority(said, 1) == wanted


@pytest.mark.parametrize(
    ("profile", "client", "said", "wanted"),
    [
        (600, None, None, 600),
        (600, None, 60, 60),
        (600, None, 6000, 600),
        (600, None, -1, 600),
        (-1, None, 60, 60),
        (-1, None, None, -1),
        (600, 60, None, 60),
        (60, 600, None, 60),
        (60, -1, None, 60),
        (None, 60, -1, 60),
        (None, None, 60, 60),
        (None, None, None, None),
        (0, 60, 60, 0),
    ],
)
def test_the_shortest_stay_counts(
    profile: float | None, client: float | None, said: float | None, wanted: float | None
) -> None:
    made = one("c", keep_alive_s=profile, clients={"c": {"keep_alive_s": client}})
    assert made.keep_alive_s(said) == wanted


def test_fields_of_the_profile_win_over_its_clients_and_those_of_the_model_over_both() -> None:
    profile = one("c", set_params={"a": 1, "b": [2]}, clients={"c": {"set_params": {"a": 9, "c": "3", "d": 4}}})
    assert profile.params({}, NONE) == {"a": b"1", "b": b"[2]", "c": b'"3"', "d": b"4"}
    assert profile.params({"b": b"0"}, frozenset({"d"})) == {"a": b"1", "c": b'"3"'}


def test_switches_are_set_one_by_one() -> None:
    clients = {"c": {"thinking": True, "chat_template_kwargs": {"y": 3}}}
    profile = one("c", thinking=False, chat_template_kwargs={"x": 1}, clients=clients)
    assert switches(profile) == {"enable_thinking": False, "x": 1, "y": 3}
    assert switches(profile, {"x": 0, "z": {"deep": []}}) == {
        "enable_thinking": False,
        "x": 1,
        "y": 3,
        "z": {"deep": []},
    }
    # The field is the model's own, as without a profile; what it does not say comes from the profile.
    assert switches(profile, {"z": 1}, {"enable_thinking": True}) == {"enable_thinking": True, "x": 1, "y": 3}
    assert profile.template_switches({}, {}, frozenset({"chat_template_kwargs"})) == {}
    assert switches(one(), {"x": 0}) is None


@pytest.mark.parametrize("sent", [5, "text", [1], {f"switch-{number}": 1 for number in range(20_000)}])
def test_switches_that_are_none_are_refused(sent: object) -> None:
    with pytest.raises(BadRequest) as refused:
        switches(one(thinking=True), sent)
    assert refused.value.param == "chat_template_kwargs"


def test_what_is_remembered_of_callers_is_bounded() -> None:
    said = profiles(p={"keys": ["*"], "clients": {"c-*": {"priority": "low"}}})
    for number in range(REMEMBERED_MAX + 10):
        found = said.of("key", "", f"c-{number}")
        assert found is not None and found.priority(None, 1) == 2
    assert said.of("key", "", "c-1") is said.of("key", "", "c-1")


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ({}, "names no caller"),
        ({"keys": ["*"], "set_params": {"model": "x"}}, "cannot be set"),
        ({"keys": ["*"], "set_params": {"chat_template_kwargs": {}}}, "a key of its own"),
        ({"keys": ["*"], "thinking": True, "chat_template_kwargs": {"enable_thinking": True}}, "the same as"),
        ({"keys": ["*"], "keep_alive_s": -0.5}, "0 or -1"),
        ({"keys": ["*"], "clients": {"c": {"clients": {}}}}, "Extra inputs"),
        ({"keys": ["*"], "clients": {"c": {"keys": ["*"]}}}, "Extra inputs"),
    ],
)
def test_mistakes_are_named(said: dict[str, Any], word: str) -> None:
    with pytest.raises((ValidationError, Exception), match=word):
        profiles(p=said)
