"""The scheduler's numbers reach the core as they are written."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from greenroom.config.limits import limits_of
from greenroom.config.schema import Config, SchedulerSection
from greenroom.core.events import Limits
from greenroom.core.model import ModelId, TenantId
from greenroom.core.policy.coresidency import Group

from .conftest import Loads

# What the core has under one name and the configuration under several.
DEADLINES = {"deadline_high_s", "deadline_normal_s", "deadline_low_s"}
# What is done before the core hears of it: which scheduler that is, and what the catalog does with the models' needs.
NOT_THE_CORES = {"implementation", "fit_memory", "keep_alive_max_s"}

# What no policy asks for, so that the page about the default one does not explain it.
NOT_THE_POLICYS = {"policy", "swapper", "company", "backoff_s", "backoff_max_s"}
SCHEDULING = Path(__file__).parents[2] / "docs" / "design" / "scheduling.md"

# What no key sets, and what has a test of its own below.
NOT_CONFIGURED = {"replan_s", "need_raise", "company"}


def test_without_a_word_the_core_keeps_its_own_defaults_but_no_deadline_is_after_the_longest_wait() -> None:
    high_s, normal_s, _ = Limits().deadlines_s
    wait_max_s = Config().server.wait_max_s
    assert limits_of(Config()) == replace(Limits(), wait_max_s=wait_max_s, deadlines_s=(high_s, normal_s, wait_max_s))


def test_every_number_reaches_the_core(loads: Loads) -> None:
    config = loads("""
        scheduler:
          policy: fifo
          swapper: coordinator
          queue_depth_max: 11
          away_share: 0.2
          lift_s: 13
          deadline_high_s: 14
          deadline_normal_s: 15
          deadline_low_s: 16
          recency_s: 17
          tenant_weights: {lab: 2}
          backoff_s: 18
          backoff_max_s: 19
        tenants: {lab: {queue_depth_max: 4}, small: {requests_per_minute: 9}}
        memory: {green_room_mib: 20}
        server: {wait_max_s: 21}
    """)
    limits = limits_of(config)
    assert limits == Limits(
        policy="fifo",
        swapper="coordinator",
        queue_depth_max=11,
        tenant_depths={TenantId("lab"): 4, TenantId("small"): 11},
        tenant_depth_max=11,
        others_share_depth=True,
        away_share=0.2,
        wait_max_s=21.0,
        lift_s=13.0,
        deadlines_s=(14.0, 15.0, 16.0),
        recency_s=17.0,
        tenant_weights={TenantId("lab"): 2.0},
        backoff_s=18.0,
        backoff_max_s=19.0,
        green_room_mib=20,
    )
    # Every number was set to another value than its default.
    same = {one.name for one in fields(Limits) if getattr(limits, one.name) == getattr(Limits(), one.name)}
    assert same == NOT_CONFIGURED


def test_no_key_of_the_configuration_is_forgotten() -> None:
    known = {field.name for field in fields(Limits)}
    assert set(SchedulerSection.model_fields) - DEADLINES - NOT_THE_CORES <= known


def test_every_number_of_the_policy_has_a_reason_in_its_page() -> None:
    table = SCHEDULING.read_text(encoding="utf-8").partition("## Parameters")[2].partition("\n## ")[0]
    explained = {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert set(SchedulerSection.model_fields) - NOT_THE_CORES - NOT_THE_POLICYS <= explained


@pytest.mark.parametrize(
    ("server", "latest_s"),
    [
        ("wait_max_s: 290, stream_wait_max_s: 120", 120.0),
        ("wait_max_s: 120, stream_wait_max_s: 290", 120.0),
        ("wait_max_s: 0, stream_wait_max_s: 120", 120.0),
        ("wait_max_s: 120, stream_wait_max_s: 0", 120.0),
        ("wait_max_s: 0, stream_wait_max_s: 0", 0.0),
    ],
)
def test_busy_models_are_closed_before_the_first_callers_are_refused(
    loads: Loads, server: str, latest_s: float
) -> None:
    limits = limits_of(loads(f"server: {{{server}}}"))
    assert (limits.wait_max_s, limits.deadlines_s[1]) == (latest_s, latest_s)


@pytest.mark.parametrize(
    ("wait_max_s", "deadlines_s"), [(600, (5.0, 240.0, 480.0)), (300, (5.0, 240.0, 300.0)), (3, (3.0, 3.0, 3.0))]
)
def test_deadlines_are_no_later_than_the_longest_wait(
    loads: Loads, wait_max_s: int, deadlines_s: tuple[float, float, float]
) -> None:
    assert limits_of(loads(f"server: {{wait_max_s: {wait_max_s}}}")).deadlines_s == deadlines_s


def test_limits_include_the_rules_of_coresidency(loads: Loads) -> None:
    config = loads("""
        models: {a: {path: a.gguf}, b: {path: b.gguf}}
        scheduler: {company: {groups: {pair: {members: [a, b], swap: false}}}}
    """)
    assert limits_of(config).company == (Group("pair", (ModelId("a"), ModelId("b")), swap=False),)
