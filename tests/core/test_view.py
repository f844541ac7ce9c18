"""What others see of the core: facts and answers, and nothing that writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from inspect import isfunction
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from greenroom.core import events as ev
from greenroom.core.contract import Scheduler
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, LeaseId, ModelId, ModelSpec, Move, MoveKind, Need, OtherLease, lease_name
from greenroom.core.view import LEASE_MARK, Forecasts, HoldingFacts, Shares, SlotFacts, Tables
from tests.core.queue.test_order import ready

from .world import HOST, World, gpu, host, model

GPU0 = DeviceId("gpu0")
A, B = ModelId("a"), ModelId("b")


def told(world: World, mib: int, is_down: bool | None = None) -> None:
    """Another gateway holds so much."""
    leases = (OtherLease(LeaseId("l"), "train", {GPU0: mib}),)
    world.scheduler.handle(ev.MemoryChanged(world.now, {}, leases=leases, store_is_down=is_down))


def test_the_view_is_the_same_object_throughout() -> None:
    world = World([model("a", 4_000)])
    scheduler: Scheduler = world.scheduler
    view = scheduler.view
    ready(world, "a")
    assert scheduler.view is view and [slot.model for slot in view.slots_of(A)] == [A]


def test_facts_are_those_of_the_scheduler() -> None:
    world = World([model("a", 4_000), model("b", 3_000)])
    ready(world, "a")
    view, state = world.scheduler.view, world.scheduler.state
    assert view.slots == state.slots and view.models == state.models
    assert [*view.ledger.devices.values()] == state.devices
    assert view.ledger is state.ledger and view.waitlist is state.waitlist and view.counters == asdict(state.counters)
    assert view.limits is state.limits and view.avg_wait_s == state.avg_wait_s
    assert view.slots_of(A) == state.slots_of(A) and view.most_mib() == state.most_mib(None)


def test_callers_are_requests_that_wait_and_neither_operators_nor_leases() -> None:
    world = World([model("a", 4_000)], plays=False)
    world.arrive("r", "a")
    world.ask("op", MoveKind.LOAD, "a")
    world.ask_lease("train", 99_000, within_s=10.0)
    view = world.scheduler.view
    assert [caller.id for caller in view.callers()] == ["r"] and view.waitlist.depth == 1
    assert view.is_waited_for(A) and not view.is_waited_for(B)


def test_a_lease_is_found_by_its_own_id_and_is_not_movable() -> None:
    world = World([model("a", 2_000), model("fixed", 1_000, pinned=True)])
    ready(world, "a")
    ready(world, "fixed")
    world.ask_lease("train", 1_000)
    view = world.scheduler.view
    assert [slot.lease for slot in view.slots_of(lease_name(LeaseId("train")))] == ["train"]
    assert [one.model for one in view.movable(world.now)] == ["a"]
    assert lease_name(LeaseId("train")).removeprefix(LEASE_MARK) == "train"


def test_a_model_that_can_never_sleep_is_told_by_how_much() -> None:
    devices = (gpu(0, 8_000), host(1_000))
    world = World([model("a", 4_000, asleep=Need(0, 2_000)), model("b", 4_000)], devices=devices)
    short = world.scheduler.view.green_room_shortfall(A)
    assert short is not None and (short.needs_mib, short.size_mib) == (2_000, 1_000)
    assert world.scheduler.view.green_room_shortfall(B) is None


def test_models_that_others_keep_out_are_known_after_a_while() -> None:
    world = World([model("a", 6_000), model("b", 1_000), model("huge", 90_000)], plays=False)
    told(world, 5_000)
    world.arrive("r", "a", priority=0)
    world.arrive("s", "b")
    world.ask_lease("train", 7_000, within_s=50.0)
    view = world.scheduler.view
    assert view.kept_out_by_others(1.0, world.now) == {}, "no request has waited for long"
    found = view.kept_out_by_others(1.0, world.now + 1.0)
    assert {name: (one.spec.id, one.priority, one.place) for name, one in found.items()} == {
        A: (A, 0, {GPU0: 6_000}),
    }
    told(world, 5_000, is_down=True)
    assert view.kept_out_by_others(1.0, world.now + 1.0) == {}


def test_a_model_that_would_not_fit_without_others_either_is_not_kept_out_by_them() -> None:
    world = World(
        [model("a", 6_000), model("small", 0, host_mib=100)], plays=False, devices=(gpu(0, 8_000), host(9_000))
    )
    world.arrive("r", "a")
    world.arrive("s", "small")
    told(world, 5_000)
    assert world.scheduler.view.kept_out_by_others(0.0, world.now) == {}, "it has a slot already, or needs no GPU"
    assert HOST in world.scheduler.view.ledger.devices


def test_a_model_that_waits_for_one_of_ours_is_not_kept_out_by_others() -> None:
    world = World([model("a", 6_000), model("b", 6_000)])
    ready(world, "b")
    world.arrive("long", "b", takes_s=1_000.0)
    world.arrive("r", "a")
    assert world.scheduler.view.is_waited_for(A) and not world.scheduler.view.slots_of(A)
    assert world.scheduler.view.kept_out_by_others(0.0, world.now) == {}


def hints_of(kind: type[Any]) -> Iterator[tuple[str, Any, bool]]:
    """What a class hands out: its fields, properties and answers; and whether it is an attribute."""
    if is_dataclass(kind):
        yield from ((name, hint, True) for name, hint in get_type_hints(kind).items())
    for name, member in vars(kind).items():
        if isinstance(member, property):
            assert member.fset is None and member.fdel is None, f"{kind.__name__}.{name} can be set"
            yield name, get_type_hints(member.fget)["return"], True
        elif isfunction(member) and not name.startswith("_"):
            yield name, get_type_hints(member).get("return"), False


def classes_in(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in (get_origin(hint), *get_args(hint)):
        if part is not None:
            yield from classes_in(part)


def handed_out() -> dict[type[Any], str]:
    """Every class of the core that the view hands out, directly or not, with the way to it."""
    # An explanation is made for each question, so that nothing is lost if it is written to.
    queue: list[type[Any]] = [Tables, Forecasts, Shares]
    found = dict.fromkeys(queue, "view")
    while queue:
        kind = queue.pop()
        for name, hint, is_attribute in hints_of(kind):
            for part in classes_in(hint):
                way = f"{found[kind]}.{name}"
                assert not (is_attribute and part in (dict, list, set) and kind is not Tables), way
                if part.__module__.startswith("greenroom.") and part not in found:
                    found[part] = way
                    queue.append(part)
    return found


@pytest.mark.pure
def test_nothing_that_the_view_hands_out_can_be_written() -> None:
    found = handed_out()
    assert {Limits, SlotFacts, Move, ModelSpec, HoldingFacts}.issubset(found), "the way through the view is followed"
    for kind, way in found.items():
        is_frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        is_read_only = issubclass(kind, Enum) or is_frozen or getattr(kind, "_is_protocol", False)
        assert is_read_only, f"{way} hands out {kind.__name__}, which can be written"
        if getattr(kind, "_is_protocol", False):
            assert not kind.__annotations__, f"{way}: {kind.__name__} has attributes that can be set"


@pytest.mark.pure
def test_slots_are_seen_as_read_only_facts() -> None:
    world = World([model("a", 4_000)])
    ready(world, "a")
    hints = get_type_hints(Tables.slots_of)
    assert hints["return"] == Sequence[SlotFacts]
    (slot,) = world.scheduler.view.slots_of(A)
    for name, _, _ in hints_of(SlotFacts):
        assert hasattr(slot, name), f"a slot has no {name}"
