"""Rules about which models may be ready together: accepted, refused, and translated for the core."""

from __future__ import annotations

import pytest

from greenroom.config.problems import problems
from greenroom.config.sections.scheduler import rules_of
from greenroom.core.model import ModelId
from greenroom.core.policy import matrix
from greenroom.core.policy.coresidency import Group
from greenroom.core.policy.matrix import Matrix
from tests.config.conftest import Complaints, Loads

MODELS = "models: {qwen: {path: q.gguf, aliases: [chat]}, llama: {path: l.gguf}, a/b c: {path: a.gguf}}\n"


def test_without_rules_there_are_none(loads: Loads) -> None:
    scheduler = loads(MODELS).scheduler
    assert scheduler.fit_memory
    assert rules_of(scheduler.company) is None


def test_groups_become_groups_of_the_core(loads: Loads) -> None:
    company = loads(f"""{MODELS}
scheduler:
  fit_memory: false
  company:
    groups:
      one: {{members: [llama, a/b c]}}
      two: {{members: [qwen], swap: false, exclusive: false, persistent: true}}
""").scheduler.company
    one = Group("one", (ModelId("llama"), ModelId("a/b c")))
    two = Group("two", (ModelId("qwen"),), swap=False, exclusive=False, persistent=True)
    assert rules_of(company) == (one, two)


def test_no_groups_at_all_is_a_rule_too(loads: Loads) -> None:
    assert rules_of(loads("scheduler: {company: {groups: {}}}").scheduler.company) == ()


def test_matrix_becomes_a_matrix_of_the_core_in_the_order_of_its_sets(loads: Loads) -> None:
    company = loads(f"""{MODELS}
scheduler:
  company:
    matrix:
      vars: {{x: a/b c}}
      evict_costs: {{x: 3, qwen: 2}}
      sets:
        z: +y & qwen
        y: x | llama
""").scheduler.company
    sets = (("z", "+y & qwen"), ("y", "x | llama"))
    assert rules_of(company) == Matrix(sets, {"x": 3, "qwen": 2}, {"x": ModelId("a/b c")})


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("company: {}", "3: scheduler.company: give groups or matrix"),
        ("company: {groups: {}, matrix: {sets: {}}}", "3: scheduler.company: give groups or matrix, not both"),
        (
            "fit_memory: false",
            "3: scheduler.fit_memory: may only be false with company; "
            "nothing else says which models may be ready together",
        ),
        (
            "company:\n    groups:\n      g:\n        member: [qwen]\n        members: [qwen]",
            "6: scheduler.company.groups.g.member: unknown key, did you mean members?",
        ),
        ("company: {group: {}}", "3: scheduler.company.group: unknown key, did you mean groups?"),
        ("company: {groups: {g: {swap: true}}}", "3: scheduler.company.groups.g.members: is needed"),
        ("company: {matrix: {vars: {}}}", "3: scheduler.company.matrix.sets: is needed"),
        (
            "company: {matrix: {evict_costs: {qwen: 0}, sets: {}}}",
            "3: scheduler.company.matrix.evict_costs.qwen: must be at least 1, not 0",
        ),
        ("groups: {}", "3: scheduler.groups: unknown key here; groups belongs under scheduler.company"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_line(complaints: Complaints, keys: str, told: str) -> None:
    complained = complaints(f"{MODELS}scheduler:\n  {keys}\n")
    assert f"my.yaml:{told}" in complained


def test_members_must_be_models_and_in_one_group(complaints: Complaints) -> None:
    assert complaints(f"""{MODELS}
scheduler:
  company:
    groups:
      one:
        members:
          - qwem
          - chat
          - llama
          - xyz
      two: {{members: [qwen, qwen, llama]}}
""") == [
        "my.yaml:8: scheduler.company.groups.one.members[0]: there is no model qwem, did you mean qwen?",
        "my.yaml:9: scheduler.company.groups.one.members[1]: chat is an alias; name the model itself, qwen",
        "my.yaml:11: scheduler.company.groups.one.members[3]: there is no model xyz",
        "my.yaml:12: scheduler.company.groups.two.members[1]: qwen is in group two already",
        "my.yaml:12: scheduler.company.groups.two.members[2]: llama is in group one already",
    ]


def matrix_complaints(complaints: Complaints, keys: str) -> list[str]:
    prefix = "scheduler.company.matrix."
    told = complaints(f"{MODELS}scheduler:\n  company:\n    matrix:\n      {keys}\n")
    assert all(line.startswith("my.yaml:") and prefix in line for line in told)
    return [line.removeprefix("my.yaml:").replace(prefix, "") for line in told]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("qwen & llma", "there is no model llma, did you mean llama?"),
        ("qwen & chat", "chat is an alias; name the model itself, qwen"),
        ("qwen & shrt", "there is no model shrt, did you mean short?"),
        ("qwen & all", "there is no model all, did you mean +all?"),
    ],
)
def test_name_in_a_set_must_be_a_model(complaints: Complaints, text: str, told: str) -> None:
    keys = f"vars: {{short: a/b c}}\n      sets:\n        s: {text}\n        all: qwen | short"
    assert matrix_complaints(complaints, keys) == [f"7: sets.s: character 8: {told}"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("qwen & +al", "character 9: there is no set al, did you mean +all?"),
        ("qwen & +llama", "character 9: there is no set llama; a model is written without +"),
        ("qwen & +short", "character 9: there is no set short; a model is written without +"),
        ("qwen llama", 'character 6: "llama" is where | or & should be'),
        ("(qwen", "character 6: the end is where |, & or ) should be"),
        ("''", "character 1: the end is where a model, +set or ( should be"),
    ],
)
def test_set_that_cannot_be_read_is_told_with_line_and_character(complaints: Complaints, text: str, told: str) -> None:
    keys = f"vars: {{short: a/b c}}\n      sets:\n        s: {text}\n        all: qwen | short"
    assert matrix_complaints(complaints, keys) == [f"7: sets.s: {told}"]


def test_every_wrong_name_of_every_set_is_told(complaints: Complaints) -> None:
    told = matrix_complaints(complaints, "sets:\n        s: x1 & y2\n        t: +u1 | +s")
    assert told == [
        "6: sets.s: character 1: there is no model x1",
        "6: sets.s: character 6: there is no model y2",
        "7: sets.t: character 2: there is no set u1",
    ]


def test_sets_in_a_circle_are_refused(complaints: Complaints) -> None:
    told = matrix_complaints(complaints, "sets:\n        s: qwen & +t\n        t: +s | llama")
    assert told == ["7: sets.t: character 2: sets may not go round in a circle: s → t → s"]


def test_sets_that_are_too_much_together_are_refused(complaints: Complaints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "NODES_MAX", 2)
    told = matrix_complaints(complaints, "sets:\n        s: qwen\n        t: +s")
    assert told == ["7: sets.t: character 1: the sets have more than 2 parts together"]


def test_short_names_and_costs_must_be_of_models(complaints: Complaints) -> None:
    keys = """\
vars:
        q: qwen
        l l: llama
        x: lama
      evict_costs:
        q: 1
        qwen: 2
        lamma: 3
      sets: {}"""
    assert matrix_complaints(complaints, keys) == [
        '7: vars."l l": a short name is made of letters, digits and _ - . / : @',
        "8: vars.x: there is no model lama, did you mean llama?",
        "11: evict_costs.qwen: is qwen, whose cost is given already as q",
        "12: evict_costs.lamma: there is no model lamma, did you mean llama?",
    ]


def test_models_kept_out_by_those_pinned_are_warned_of(loads: Loads) -> None:
    models = """\
models:
  a: {cmd: "sh ${PORT}", pinned: true}
  b: {cmd: "sh ${PORT}", pinned: true}
  c: {cmd: "sh ${PORT}"}
scheduler:
  company:
"""
    matrix = loads(models + "    matrix: {sets: {pair: a & b, other: c}}")
    assert problems(matrix) == ["models.c: scheduler.company keeps it out while these are pinned: a, b"]
    groups = loads(models + "    groups: {g: {members: [a, c], swap: false, exclusive: false}}")
    assert problems(groups) == ["models.b: scheduler.company keeps it out while these are pinned: a"]
    assert problems(loads(models + "    matrix: {sets: {all: a & b & c}}")) == []
