"""What would happen if this request came now: the plan as it is then carried out, and nothing changed by asking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from greenroom.core.apply import ROUND_S
from greenroom.core.decide.plan import Join, Plan, Refuse, Serve, Swap, Wait, WaitReason
from greenroom.core.events import Limits, Timer, TimerKind
from greenroom.core.explain import Explanation
from greenroom.core.model import ModelId, MoveKind, Need, Tier
from tests.core.queue.test_order import ready

from .world import Fate, World, gpu, host, model, picture


def explained(world: World, *candidates: str, priority: int = 1) -> Explanation:
    """The answer, after which nothing has changed."""
    before, said = picture(world.scheduler.state), len(world.calls)
    answer = world.scheduler.view.explanation(world.asking("?", *candidates, priority=priority))
    assert picture(world.scheduler.state) == before and len(world.calls) == said
    plan = world.scheduler.view.explanation(world.asking("?", *candidates, priority=priority)).plan
    assert picture(plan) == picture(answer.plan)
    return answer


def one_ready() -> World:
    """Two models that do not fit together, both known, b ready."""
    world = World([model("a", 6_000), model("b", 6_000)])
    for name in ("a", "b"):
        world.arrive(f"first-{name}", name, takes_s=2.0)
        world.run(30.0)
    return world


def test_a_ready_model_serves_at_once() -> None:
    world = one_ready()
    answer = explained(world, "b")
    assert answer == Explanation(Serve(world.slot_of("b")), 0, 0.0)


def test_what_can_only_be_refused_has_no_estimate() -> None:
    answer = explained(one_ready(), "nope")
    assert isinstance(answer.plan, Refuse) and (answer.position, answer.eta_s) == (0, None)


def test_a_load_under_way_is_joined() -> None:
    world = one_ready()
    world.arrive("r", "a")
    world.run(3.0)
    answer = explained(world, "a")
    assert isinstance(answer.plan, Join) and answer.plan.model == "a"
    assert answer.position == 2 and answer.eta_s == pytest.approx(3.0 + 2.0), "three of five seconds and one answer"


@pytest.mark.parametrize("patient", [True, False])
def test_a_request_that_may_not_wait_is_too_late_for_the_model_that_it_brings(patient: bool) -> None:
    world = one_ready()
    arrival = replace(world.asking("?", "a"), give_up_at=world.now, patient=patient)
    answer = world.scheduler.view.explanation(arrival)
    assert isinstance(answer.plan, Swap) and answer.is_too_late
    call = world.arrive("r", "a", within_s=0.0, patient=patient)
    world.run(0.0)
    assert call.fate is Fate.REJECTED
    world.run(10.0)
    assert world.tier("a") is Tier.READY


def test_a_swap_names_its_victims_their_next_tier_and_why() -> None:
    world = one_ready()
    answer = explained(world, "a", priority=0)
    assert isinstance(answer.plan, Swap) and answer.plan.kind is MoveKind.LOAD and answer.eta_s == 5.0
    (victim,) = answer.evict
    assert (victim.model, victim.slot, victim.leaves_to, victim.is_busy) == ("b", world.slot_of("b"), Tier.COLD, False)
    assert victim.why.startswith("less urgent, idle for 2") and "times a minute, 5.0 s to bring back" in victim.why
    assert victim.loss > 0.0


@pytest.mark.parametrize(("priority", "says"), [(0, "less urgent"), (1, "as urgent"), (2, "more urgent")])
def test_a_victim_is_said_to_be_less_as_or_more_urgent(priority: int, says: str) -> None:
    (victim,) = explained(one_ready(), "a", priority=priority).evict
    assert victim.why.startswith(f"{says}, ")


def test_a_busy_resident_that_may_be_asked_to_leave_is_waited_for() -> None:
    world = one_ready()
    world.config(limits=Limits(deadlines_s=(0.0, 0.0, 0.0)))
    world.arrive("runs", "b")
    (victim,) = explained(world, "a", priority=0).evict
    assert victim.is_busy and "its running answers end first" in victim.why
    assert moves_begun(world, lambda: world.arrive("r", "a", priority=0)) == []
    assert moves_begun(world, lambda: world.finish("runs")) == ["unload b"]


def test_a_busy_resident_that_may_not_be_asked_yet_is_waited_for_until_it_may() -> None:
    world = one_ready()
    world.arrive("runs", "b")
    answer = explained(world, "a")
    assert isinstance(answer.plan, Wait) and answer.plan.why is WaitReason.NO_ROOM and answer.evict == ()
    assert world.now + ROUND_S < answer.plan.until < float("inf")
    world.arrive("r", "a")
    assert world.timers == {Timer(TimerKind.SWITCH, ""): world.now + ROUND_S}
    world.run(answer.plan.until - world.now - 1.0)
    assert isinstance(explained(world, "a").plan, Wait)
    world.run(1.0)
    assert world.scheduler.state.ledger.promises, "it is closed when it was said"


def test_a_victim_is_said_to_fall_asleep_only_if_the_green_room_has_room() -> None:
    for host_mib, tier in ((4_000, Tier.ASLEEP), (2_000, Tier.COLD)):
        specs = [model("a", 6_000, asleep=Need(0, 3_000)), model("b", 6_000)]
        world = World(specs, devices=(gpu(0, 8_000), host(host_mib)))
        ready(world, "a")
        (victim,) = explained(world, "b").evict
        assert victim.leaves_to is tier
        world.arrive("r", "b", takes_s=0.0)
        world.run()
        assert world.tier("a") is tier, "and so it does"


def test_a_wait_names_the_models_that_go_first() -> None:
    world = World([model(name, 6_000) for name in "abcd"])
    ready(world, "d", "c", "b", "a")
    world.arrive("runs", "a")
    world.arrive("first", "b")
    world.arrive("low", "c", priority=2)
    assert explained(world, "d").behind == ("b",)
    assert explained(world, "d", priority=2).behind == ("b", "c")
    assert explained(world, "b").behind == ()
    assert explained(world, "d").position == 2 and explained(world, "d", priority=2).position == 3


def test_the_second_candidate_that_serves_at_once_is_named() -> None:
    world = one_ready()
    answer = explained(world, "a", "b")
    assert answer.plan == Serve(world.slot_of("b"))


# --- it agrees with what then happens -------------------------------------------------------------------------------


def moves_begun(world: World, action: Callable[[], object]) -> list[str]:
    before = len(world.moves)
    action()
    return [f"{move.kind.value} {move.model}" for move in world.moves[before:]]


def agrees(world: World, name: str, plan: Plan, *candidates: str, priority: int = 1) -> None:
    """The request comes, and what was said happens."""
    begun = moves_begun(world, lambda: world.arrive(name, *candidates, priority=priority))
    call, waiters = world.calls_by_id[name], world.scheduler.state.waitlist
    match plan:
        case Serve(slot):
            assert (call.fate, call.slot) == (Fate.GRANTED, slot)
        case Refuse(code):
            assert world.code(name) is code
        case Join(_, wanted) | Wait(_, wanted):
            assert call.fate is Fate.WAITING and waiters[name].model == wanted and not begun
        case Swap():
            leaving = {world.scheduler.state.slots[one.slot].leaving_to for one in plan.evict}
            assert call.fate is Fate.WAITING and waiters[name].model == plan.model
            assert None not in leaving and len(begun) <= len(plan.evict) + 1
            assert any(slot.is_arriving for slot in world.scheduler.state.slots_of(ModelId(plan.model)))


@pytest.mark.untraced
def test_whatever_was_said_happens_all_through_a_busy_day() -> None:
    specs = [model(name, 2_500 + 500 * number, concurrency=2) for number, name in enumerate("abcde")]
    world = World([*specs, model("huge", 50_000)], devices=(gpu(0, 8_000), gpu(1, 5_000)))
    kinds = set()
    for number in range(150):
        wanted = [*"abcde"][number * 7 % 5] if number % 29 else "huge"
        candidates = (wanted, "a") if number % 6 == 0 and wanted != "a" else (wanted,)
        answer = explained(world, *candidates, priority=number % 3)
        kinds.add(type(answer.plan))
        agrees(world, f"r{number}", answer.plan, *candidates, priority=number % 3)
        if world.calls_by_id[f"r{number}"].fate in (Fate.WAITING, Fate.GRANTED):
            world.calls_by_id[f"r{number}"].takes_s = 3.0
        for call in list(world.calls_by_id.values()):
            if call.fate is Fate.GRANTED and world.now - call.granted_at > 4.0:
                world.finish(call.id)
        world.run(1.3)
    assert kinds == {Serve, Join, Wait, Swap, Refuse}


def test_a_request_that_cannot_wait_for_the_swap_it_causes_is_told_so() -> None:
    world = one_ready()
    asking = world.asking("?", "a")
    hurried = replace(asking, answer_by=asking.now + 3.0)
    assert world.scheduler.view.explanation(hurried).is_too_late, "five seconds to bring it, two to answer"
    patient = replace(asking, answer_by=asking.now + 30.0)
    assert not world.scheduler.view.explanation(patient).is_too_late
    assert not world.scheduler.view.explanation(asking).is_too_late


@pytest.mark.untraced
def test_urgent_request_tells_whose_coming_it_calls_off() -> None:
    """A tenant floods one model, and it is closed for the request of another before the deadline of that one."""
    world = World([model("a", 6_000, concurrency=4), model("b", 6_000), model("c", 6_000)])
    for number in range(400):
        world.arrive(f"a-{number}", "a", takes_s=3.0, tenant="flood")
    world.later(20.0, partial(world.arrive, "b", "b", takes_s=1.0, tenant="other"))
    while not world.scheduler.state.ledger.promises:
        world.run(0.5)
        assert world.now < 100.0, "no slot was promised memory"
    (promised,) = world.scheduler.state.ledger.promises
    assert explained(world, "c", priority=0).calls_off == ("b",)
    assert explained(world, "c", priority=1).calls_off == ()
    world.arrive("urgent", "c", priority=0)
    assert promised not in world.scheduler.state.slots, "its plan is over, whichever slot gets the memory now"
