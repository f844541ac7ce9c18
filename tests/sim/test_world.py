"""A world without and with faults, and its clock."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from greenroom.core import events as ev
from greenroom.core.effects import OpOutcome, RejectCode, Rejection, because
from greenroom.core.invariants import check
from greenroom.core.model import (
    LeaseId,
    ModelId,
    Move,
    MoveId,
    MoveKind,
    Need,
    OpId,
    Outcome,
    RequestId,
    SlotId,
    TenantId,
    Tier,
)
from greenroom.core.policy import BUILT_IN
from greenroom.sim.compute import Clock
from greenroom.sim.config import SimConfig
from greenroom.sim.hooks import Ending, Faults, MoveFate, ServeFate, Watcher
from greenroom.sim.records import Fate, SimArrival, SimCall, Violation
from greenroom.sim.workloads import Mix, Poisson, zipf
from greenroom.sim.world import World
from tests.sim.settings import GPU, HOST, Transcript, gpu, host, names, setting, sim_model, sleeper

A, B = ModelId("a"), ModelId("b")
WHY = because("test")


def slot_of(world: World, model: str) -> SlotId:
    return next(place.id for place in world.truth.places.values() if place.model == model)


def ran(
    config: SimConfig, output: int = 100, *, until: float = inf, faults: Faults | None = None
) -> tuple[World, SimCall]:
    """A world in which one request for `a` came, and what became of it."""
    world = World(config, faults=faults)
    call = world.arrive(A, 1, output)
    world.run(until)
    return world, call


# --- without faults ---------------------------------------------------------------------------------------------------


def test_a_request_waits_for_the_load_and_is_then_served() -> None:
    world = World(setting(sim_model("a")))
    call = world.arrive(A, 10, 200)
    world.run()
    assert (call.fate, call.wait_s, call.ended_at) == (Fate.SERVED, pytest.approx(5.0), pytest.approx(7.0))
    assert world.truth.tier_of(A) is Tier.READY and world.is_at_rest


def test_prompt_and_answer_both_take_time() -> None:
    model = sim_model("a")
    assert model.timings.service_s(0, 50) == pytest.approx(0.5)
    slow = sim_model("a", timings=type(model.timings)(prefill_tokens_per_s=100.0, tokens_per_s=10.0))
    assert slow.timings.service_s(50, 20) == pytest.approx(0.5 + 2.0)


def test_a_slot_serves_as_many_at_once_as_it_may_and_each_at_full_speed() -> None:
    world = World(setting(sim_model("a", concurrency=2)))
    calls = [world.arrive(A, 1, 100) for _ in range(3)]
    world.run()
    assert [round(call.granted_at, 2) for call in calls] == [5.0, 5.0, 6.0]


def test_a_swap_takes_the_time_of_leaving_and_of_coming() -> None:
    world, _ = ran(setting(sim_model("a"), sim_model("b")))
    began = world.now
    call = world.arrive(B, 1, 100)
    world.run()
    assert call.wait_s == pytest.approx(1.0 + 5.0)
    assert call.granted_at == pytest.approx(began + 6.0)
    assert world.truth.meters.moves[MoveKind.LOAD] == 2 and world.truth.meters.moves[MoveKind.UNLOAD] == 1


def test_a_model_that_sleeps_comes_back_quickly() -> None:
    world = World(setting(sleeper("a"), sleeper("b"), devices=(gpu(1_000), host(5_000))))
    for model in (A, B):
        world.arrive(model, 1, 100)
        world.run()
    assert world.truth.tier_of(A) is Tier.ASLEEP
    again = world.arrive(A, 1, 100)
    world.run()
    assert again.wait_s == pytest.approx(0.25 + 0.5)


def test_memory_is_counted_per_device_as_slots_come_sleep_and_go() -> None:
    world, _ = ran(setting(sleeper("a"), sleeper("b"), devices=(gpu(1_000), host(5_000))))
    assert world.truth.held_mib == {GPU: 1_000, HOST: 0}
    world.ask_move(MoveKind.SLEEP, A)
    world.run()
    assert world.truth.held_mib == {GPU: 0, HOST: 1_000}
    world.ask_move(MoveKind.UNLOAD, A)
    world.run()
    assert world.truth.held_mib == {GPU: 0, HOST: 0} and not world.truth.places


def test_loads_wait_for_the_disk_where_it_reads_one_at_a_time() -> None:
    world = World(setting(sim_model("a"), sim_model("b"), mib=2_000, loads_at_once=1))
    calls = [world.arrive(model, 1, 100) for model in (A, B)]
    world.run()
    assert [call.wait_s for call in calls] == [pytest.approx(5.0), pytest.approx(10.0)]


def test_moves_stray_from_their_usual_time_within_the_jitter() -> None:
    waits = []
    for seed in range(20):
        world = World(setting(sim_model("a"), jitter=0.2), seed)
        call = world.arrive(A, 1, 1)
        world.run()
        waits.append(call.wait_s)
    assert len(set(waits)) == 20 and 4.0 <= min(waits) < 4.9 and 5.1 < max(waits) <= 6.0


def test_callers_give_up_when_their_patience_ends() -> None:
    _, call = ran(setting(sim_model("a"), patience_s=3.0))
    assert (call.fate, call.code, call.ended_at) == (Fate.REJECTED, RejectCode.EXPIRED, pytest.approx(3.0))


def test_a_retry_after_a_refusal_arrives_after_the_scheduler_is_done() -> None:
    world = World(setting(sim_model("a")))
    seen: list[Fate] = []

    def again(call: SimCall) -> None:
        seen.append(call.fate)
        world.arrive(A, 1, 1)

    world.arrive(ModelId("stranger"), 1, 1, on_end=again)
    world.run()
    assert seen == [Fate.REJECTED] and world.is_at_rest and len(world.ended) == 2


def test_arrivals_are_asked_for_one_by_one_as_time_passes() -> None:
    asked: list[float] = []

    def rows() -> object:
        for at in (1.0, 2.0, 3.0):
            asked.append(at)
            yield SimArrival(at, A, 1, 1)

    world = World(setting(sim_model("a")))
    world.feed(rows())  # type: ignore[arg-type]
    world.run(until=1.5)
    assert asked == [1.0, 2.0] and world.now == 1.5
    world.run()
    assert [call.arrived for call in world.ended] == [1.0, 2.0, 3.0]


# --- what else can happen ---------------------------------------------------------------------------------------------


def test_operators_are_answered() -> None:
    world = World(setting(sim_model("a")))
    op = world.ask_move(MoveKind.LOAD, A)
    assert not world.is_at_rest
    world.run()
    assert world.ops[op] is OpOutcome.DONE and world.truth.tier_of(A) is Tier.READY and world.is_at_rest


def test_a_lease_takes_memory_and_gives_it_back() -> None:
    world = World(setting(sim_model("a"), mib=1_500))
    lease = world.ask_lease(Need(1_000))
    assert world.leases[lease].fate is Fate.GRANTED and world.truth.held_mib[GPU] == 1_000
    call = world.arrive(A, 1, 100)
    world.run()
    assert call.fate is Fate.WAITING
    world.end_lease(lease)
    world.end_lease(lease)
    world.run()
    assert call.fate is Fate.SERVED and world.is_at_rest


def test_the_holder_of_a_recalled_lease_leaves() -> None:
    world = World(setting(sim_model("a"), mib=1_500))
    world.ask_lease(Need(1_000), priority=2, preemptible=True, grace_s=10.0)
    call = world.arrive(A, 1, 100, priority=0)
    world.run()
    assert call.wait_s == pytest.approx(5.0 + 5.0) and not world.leases


def test_foreign_memory_keeps_models_out_until_it_is_gone() -> None:
    world = World(setting(sim_model("a")))
    world.change_memory({GPU: 600})
    call = world.arrive(A, 1, 100)
    world.run()
    assert call.fate is Fate.WAITING
    world.change_memory({GPU: 0})
    world.run()
    assert call.fate is Fate.SERVED


def test_a_removed_model_leaves_and_its_callers_are_told() -> None:
    world = World(setting(sim_model("a")))
    call = world.arrive(A, 1, 100)
    world.change_config(removed=[A])
    world.run()
    assert call.code is RejectCode.REMOVED and not world.truth.places


def test_a_changed_concurrency_counts_from_then_on() -> None:
    world, first = ran(setting(sim_model("a", concurrency=1)), 1_000, until=6.0)
    world.change_config([sim_model("a", concurrency=2)])
    second = world.arrive(A, 1, 100)
    assert first.fate is Fate.GRANTED and second.fate is Fate.GRANTED


def test_a_shutdown_drains() -> None:
    world, served = ran(setting(sim_model("a")), 100_000, until=6.0)
    world.shut_down(drain_s=20.0)
    world.run()
    assert served.fate is Fate.SERVED and served.was_cut and served.ended_at < 27.0
    assert not world.truth.places


@pytest.mark.parametrize(("step_s", "ended_at"), [(+80.0, 20.0), (-50.0, 150.0)])
def test_a_stepped_clock_moves_timers(step_s: float, ended_at: float) -> None:
    world = World(setting(sim_model("a"), patience_s=100.0))
    world.change_memory({GPU: 600})
    call = world.arrive(A, 1, 100)
    world.after(10.0, lambda world: world.step_clock(step_s))
    world.run()
    assert call.code is RejectCode.EXPIRED and call.ended_at == pytest.approx(ended_at, abs=0.1)


# --- with faults ------------------------------------------------------------------------------------------------------


class Plan(Faults):
    """The next moves and grants end like this, then all goes well."""

    def __init__(self, *fates: MoveFate | ServeFate) -> None:
        self.fates = list(fates)

    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        planned = [fate for fate in self.fates if isinstance(fate, MoveFate)][:1]
        if planned:
            self.fates.remove(planned[0])
        return planned[0] if planned else usual

    def on_grant(self, call: SimCall, usual_s: float) -> ServeFate | None:
        planned = [fate for fate in self.fates if isinstance(fate, ServeFate)][:1]
        if planned:
            self.fates.remove(planned[0])
        return planned[0] if planned else None


def test_a_failed_load_rejects_its_waiting_request() -> None:
    world, call = ran(setting(sim_model("a")), faults=Plan(MoveFate(Outcome.FAILED, 2.0)))
    assert (call.code, call.ended_at) == (RejectCode.LOAD_FAILED, pytest.approx(2.0)) and not world.truth.places


def test_a_client_that_goes_ends_its_answer() -> None:
    world, call = ran(setting(sim_model("a")), 1_000, faults=Plan(ServeFate(Ending.CLIENT_GOES, 0.5)))
    assert (call.fate, call.ended_at) == (Fate.GONE, pytest.approx(5.5)) and world.is_at_rest


def test_an_answer_lost_early_is_granted_again() -> None:
    _, call = ran(setting(sim_model("a")), faults=Plan(ServeFate(Ending.LOST_EARLY, 0.5)))
    assert (call.fate, call.grants, call.wait_s) == (Fate.SERVED, 2, pytest.approx(5.5))


def test_a_crash_breaks_answers_off_and_takes_the_slot_with_it() -> None:
    world = World(setting(sim_model("a")), faults=Plan(ServeFate(Ending.CRASH, 0.5)))
    calls = [world.arrive(A, 1, 1_000) for _ in range(2)]
    world.run()
    assert all(call.fate is Fate.SERVED and call.was_broken for call in calls)
    assert not world.truth.places and world.truth.held_mib[GPU] == 0


def test_a_crash_before_the_first_byte_sends_requests_back() -> None:
    slow = type(sim_model("a").timings)(load_s=5.0, prefill_tokens_per_s=10.0)
    world = World(setting(sim_model("a", timings=slow)), faults=Plan(ServeFate(Ending.CRASH, 0.5)))
    call = world.arrive(A, 100, 100)
    world.run()
    assert (call.fate, call.grants, call.was_broken) == (Fate.SERVED, 2, False)


def test_a_crash_may_leave_the_host_copy() -> None:
    fate = ServeFate(Ending.CRASH, 0.5, Tier.ASLEEP)
    world, _ = ran(setting(sleeper("a"), devices=(gpu(1_000), host(5_000))), 1_000, faults=Plan(fate))
    assert world.truth.tier_of(A) is Tier.ASLEEP and world.truth.held_mib == {GPU: 0, HOST: 1_000}


def test_a_process_that_dies_while_loading_never_becomes_ready() -> None:
    world = World(setting(sim_model("a")))
    call = world.arrive(A, 1, 100)
    world.after(1.0, lambda world: world.crash([slot_of(world, "a")]))
    world.run()
    assert call.code is RejectCode.LOAD_FAILED and not world.truth.places


def test_an_aborted_move_ends_soon_or_as_it_would_have() -> None:
    for can_be_stopped, ends in ((True, 1.01), (False, 6.0)):
        plan = Faults()
        plan.on_abort = lambda move, can=can_be_stopped: can  # type: ignore[method-assign, misc]
        transcript = Transcript()
        world = World(setting(sim_model("a")), faults=plan, watchers=[transcript])
        world.arrive(A, 1, 100)
        world.after(1.0, lambda world: world.change_config(removed=[A]))
        world.run()
        done = [event.now for event in transcript.events if isinstance(event, ev.MoveDone)]
        assert done[-1] == pytest.approx(ends) and not world.truth.places


# --- wrong orders -----------------------------------------------------------------------------------------------------


def move(world: World, kind: MoveKind, slot: str, claim: dict[object, int], model: ModelId = A) -> None:
    world.move(Move(MoveId(f"x{kind}{slot}"), kind, SlotId(slot), model, 1, claim, world.now), WHY)  # type: ignore[arg-type]


def running_world() -> tuple[World, SimCall]:
    """One request is being served by `a`, which fills the GPU."""
    world, call = ran(setting(sim_model("a", concurrency=1), sim_model("b")), 10_000, until=6.0)
    assert call.fate is Fate.GRANTED
    return world, call


def test_the_world_objects_to_wrong_grants() -> None:
    world, call = running_world()
    other = SimCall("other", 99, (B,), world.now)
    same = SimCall("same", 98, (A,), world.now)
    world.calls |= {"other": other, "same": same}
    slot = slot_of(world, "a")
    for request, where in ((call.id, slot), ("nobody", slot), ("other", slot), ("same", slot), ("same", "s999")):
        same.fate = other.fate = Fate.WAITING
        with pytest.raises(Violation):
            world.grant(RequestId(request), SlotId(where), WHY)


def test_the_world_objects_to_wrong_moves() -> None:
    world, _ = running_world()
    with pytest.raises(Violation, match="serves"):
        move(world, MoveKind.UNLOAD, slot_of(world, "a"), {})
    with pytest.raises(Violation, match="not free"):
        move(world, MoveKind.LOAD, "new", {GPU: 1_000}, B)
    with pytest.raises(Violation, match="is ready and is to load"):
        move(world, MoveKind.LOAD, slot_of(world, "a"), {GPU: 1_000})
    world = World(setting(sim_model("a")))
    world.arrive(A, 1, 1)
    with pytest.raises(Violation, match="while it still has to load"):
        move(world, MoveKind.UNLOAD, slot_of(world, "a"), {})


def test_the_world_objects_to_orders_about_what_is_not_there() -> None:
    world, call = running_world()
    rejection = Rejection(RejectCode.LOST, A)
    world.cut(RequestId(call.id), WHY)
    for order in (
        lambda: world.reject(RequestId(call.id), rejection, WHY),
        lambda: world.reject(RequestId("nobody"), rejection, WHY),
        lambda: world.cut(RequestId(call.id), WHY),
        lambda: world.cut(RequestId("nobody"), WHY),
        lambda: world.abort(MoveId("nothing"), WHY),
        lambda: world.answer(OpId("nobody"), OpOutcome.DONE, WHY),
        lambda: world.recall(LeaseId("nobody"), 0.0, WHY),
    ):
        with pytest.raises(Violation):
            order()


# --- all at once ------------------------------------------------------------------------------------------------------


class Trouble(Faults):
    """Everything goes wrong now and then for a while."""

    def __init__(self, seed: int, until: float) -> None:
        self._random = Random(f"{seed}:trouble")
        self._until = until
        self._now = 0.0

    def begin(self, world: World) -> None:
        self._stir(world)

    def _stir(self, world: World) -> None:
        self._now = world.now
        if world.now > self._until:
            world.change_memory({GPU: 0})
            for lease in list(world.leases):
                world.end_lease(lease)
            return
        self._disturb(world)
        world.after(self._random.expovariate(0.2), self._stir)

    def _disturb(self, world: World) -> None:
        random, places = self._random, list(world.truth.places)
        match random.randrange(7):
            case 0:
                world.change_memory({GPU: random.choice([0, 500, 1_500])})
            case 1:
                world.ask_lease(Need(700), random.randrange(3), preemptible=random.random() < 0.5)
            case 2 if world.leases:
                world.end_lease(random.choice(list(world.leases)))
            case 3:
                world.ask_move(random.choice(list(MoveKind)), ModelId(random.choice(names(5))))
            case 4:
                world.step_clock(random.choice([0.5, 5.0, 30.0]))
            case 5 if places:
                world.crash([random.choice(places)], random.choice([Tier.COLD, Tier.ASLEEP]))
            case _ if world.calls:
                world.leave(random.choice([call for call in world.calls.values() if not call.is_lease] or [None]))  # type: ignore[arg-type]

    def on_move(self, move: Move, usual: MoveFate) -> MoveFate:
        if self._now > self._until or self._random.random() < 0.8:
            return usual
        return usual._replace(outcome=self._random.choice(list(Outcome)))

    def on_grant(self, call: SimCall, usual_s: float) -> ServeFate | None:
        if self._now > self._until or self._random.random() < 0.9:
            return None
        left_in = self._random.choice([Tier.COLD, Tier.ASLEEP])
        return ServeFate(self._random.choice(list(Ending)), usual_s * self._random.random(), left_in)


class Checker(Watcher):
    def __init__(self) -> None:
        self.world: World | None = None

    def settled(self, event: ev.Event) -> None:
        if self.world is not None:
            check(self.world.scheduler, event.now)


@pytest.mark.parametrize("policy", BUILT_IN)
@pytest.mark.parametrize("seed", range(4))
def test_world_and_scheduler_stay_of_one_mind_whatever_happens(seed: int, policy: str) -> None:
    checker = Checker()
    models = [sleeper(name, 400 + 150 * number) for number, name in enumerate(names(5))]
    config = setting(*models, devices=(gpu(2_000), host(1_500)), jitter=0.3, policy=policy)
    trouble = Trouble(seed, until=300.0)
    world = checker.world = World(config, seed, trouble, [checker])
    trouble.begin(world)
    Poisson(Mix(zipf(names(5))), rate=1.0, seconds=400.0, seed=seed).begin(world)
    world.run()
    held = {slot: place.tier for slot, place in world.truth.places.items()}
    assert held == {slot.id: slot.tier for slot in world.scheduler.state.slots.values()}
    assert world.is_at_rest and world.events_told > 700


def test_what_has_ended_is_kept_packed_and_read_as_it_was() -> None:
    """A run may have millions of requests."""
    world = World(setting(sim_model("a"), sim_model("b")))
    served = world.arrive(A, 5, 100, TenantId("x"), priority=-3)
    refused = world.arrive(ModelId("stranger"), 1, 7, TenantId("y"))
    lease = world.ask_lease(Need(10))
    world.run(until=30.0)
    world.end_lease(lease)
    first, second, third = world.ended
    assert (first.fate, first.code, first.tenant, first.model) == (Fate.REJECTED, refused.code, "y", "stranger")
    assert (second.fate, second.code, second.priority, second.output_len) == (Fate.SERVED, None, -3, 100)
    assert (second.wait_s, second.ended_at, second.tenant) == (served.wait_s, served.ended_at, "x")
    assert third.is_lease and not (first.is_lease or second.is_lease or second.was_broken) and len(world.ended) == 3


def test_things_happen_in_order_of_time_and_then_of_arrangement() -> None:
    clock, seen = Clock(), []
    for after_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.arrange(after_s, seen.append, name)
    while clock.advance(10.0):
        pass
    assert seen == ["first", "second", "late"] and clock.now == 2.0 and not clock.advance(inf)


def test_nothing_beyond_the_given_time_happens() -> None:
    clock, seen = Clock(), []
    clock.arrange(5.0, seen.append, "later")
    assert not clock.advance(4.9) and not seen
    assert clock.advance(5.0) and seen == ["later"]


def test_what_is_arranged_for_the_past_happens_at_once() -> None:
    clock, seen = Clock(), []
    clock.pass_to(10.0)
    clock.arrange_at(3.0, seen.append, "overdue")
    assert clock.advance(10.0) and seen == ["overdue"] and clock.now == 10.0


def test_a_stepped_clock_tells_another_time_than_passes() -> None:
    clock, told = Clock(), []
    clock.pass_to(10.0)
    clock.step(-4.0)
    assert (clock.now, clock.told) == (10.0, 6.0)
    clock.arrange_when_told(8.1, lambda _: told.append(clock.told), None)
    clock.advance(100.0)
    assert 8.1 <= told[0] < 8.11 and 12.0 < clock.now < 12.2
