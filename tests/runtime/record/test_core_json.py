"""Events and effects survive being written down, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core import effects, events
from greenroom.core.effects import RejectCode, Rejection, because
from greenroom.core.events import ConfigChanged, Event, Learned, RequestArrived
from greenroom.core.model import ModelId, Move, MoveId, MoveKind, Outcome, RequestId
from greenroom.runtime.record.recording import decode, encode

EVENTS = get_args(Event)


def there_and_back(value: object) -> Any:
    return decode(json.loads(encode(value)))


def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Records of this kind with every field drawn, also those that have defaults."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})


def values(hint: Any) -> st.SearchStrategy[Any]:
    parts = get_args(hint)
    if get_origin(hint) is UnionType:
        return st.one_of([values(part) for part in parts])
    if get_origin(hint) is Mapping:
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=3)
    if get_origin(hint) is tuple and parts[-1] is Ellipsis:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    return records(hint) if isinstance(hint, type) and is_dataclass(hint) else st.from_type(hint)


@pytest.mark.parametrize(
    "kind", [*EVENTS, Rejection, effects.Reason, Move, events.Limits], ids=lambda kind: kind.__name__
)
@pytest.mark.pure
def test_every_kind_of_record_comes_back_as_it_was(kind: type[Any]) -> None:
    # A busy machine is slow to make records, which says nothing of them.
    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
    @given(records(kind))
    def check(record: Any) -> None:
        # By what they print, so that what is not equal to itself (nan) compares too, and 1 is not 1.0.
        assert repr(there_and_back(record)) == repr(record)

    check()


def test_floats_enums_and_the_order_of_mappings_are_exact() -> None:
    learned = Learned({MoveKind.WAKE: 0.1 + 0.2, MoveKind.LOAD: 1e-310}, None)
    event = ConfigChanged(1 / 3, learned={ModelId("b"): learned, ModelId("a"): learned})
    back = there_and_back(event)
    assert back == event
    assert list(back.learned) == ["b", "a"]
    assert list(back.learned["a"].moves_s) == [MoveKind.WAKE, MoveKind.LOAD]
    endless = RequestArrived(0.0, RequestId("r"), (ModelId("m"),), give_up_at=float("inf"))
    assert there_and_back(endless) == endless


def test_effects_come_back_with_their_reasons() -> None:
    asked = ("r-1", Rejection(RejectCode.EXPIRED, ModelId("m"), 2.5), because("late", eta_s=2.5, behind=None))
    assert there_and_back(asked) == asked


@pytest.mark.parametrize(
    "said", [{"_": "Nobody"}, {"no": "kind"}, {"_": "RequestGone"}, {"_": "Tier", "is": "upstairs"}, {"_": "map"}]
)
def test_what_is_no_record_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        decode(said)


def test_a_field_that_is_gone_is_passed_over_in_an_old_recording() -> None:
    old = '{"_":"MoveDone","now":1.0,"move":"m1","outcome":{"_":"Outcome","is":"done"},"seen":null,"concurrency":4}'
    assert decode(json.loads(old)) == events.MoveDone(1.0, MoveId("m1"), Outcome.DONE)


def test_limits_that_are_gone_are_passed_over_in_an_old_recording() -> None:
    old = json.loads(encode(events.Limits(lift_s=30.0)))
    del old["away_share"]
    old |= {"overtakes_max": 4, "residency_swaps": 1.0, "batch_swaps": 2.0}
    assert decode(old) == events.Limits(lift_s=30.0)
