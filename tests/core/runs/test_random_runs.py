"""Anything may happen in any order: the invariants hold after every event, and when faults stop everything drains.

`hypothesis` draws the events and the outcomes; the world judges every effect. `HYPOTHESIS_PROFILE=long` looks longer.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greenroom.core import events as ev
from greenroom.core.decide.plan import Refuse, Serve
from greenroom.core.events import Limits, Timer, TimerKind
from greenroom.core.model import (
    Device,
    DeviceId,
    LeaseId,
    ModelId,
    ModelSpec,
    MoveId,
    MoveKind,
    Need,
    OtherLease,
    Outcome,
    RequestId,
    TenantId,
    Tier,
)
from greenroom.core.plain import PlainScheduler
from greenroom.core.policy.coresidency import Group, Rules
from greenroom.core.policy.matrix import Matrix
from greenroom.core.queue.waitlist import WaiterKind
from tests.core.world import HOST, Call, Fate, World, gpu, host, model, picture

# Small enough that things do not fit together, different enough that placement has choices.
DEVICES = (gpu(0, 8_000, 500), gpu(1, 6_000, 500), host(10_000))
MODELS = (
    model("small", 2_000, concurrency=2, asleep=Need(200, 2_000), ttl_s=20.0),
    model("middle", 4_000, concurrency=1, host_mib=500, ttl_s=5.0),
    model("large", 7_000, concurrency=3, asleep=Need(0, 6_000)),
    model("wide", 9_000, concurrency=1, can_split=True, asleep=Need(500, 4_000)),
    model("halves", 8_000, can_split=True, split_counts=(2,), sizes_itself=True, asleep=Need(600, 3_000)),
    model("fixed", 3_000, concurrency=2, devices=(DeviceId("gpu1"),), sizes_itself=True),
    model("kept", 1_000, concurrency=1, pinned=True, preload=True),
    model("remote", 0, concurrency=3),
    model("huge", 20_000, concurrency=1, can_split=True),
    model("hosted", 2_500, concurrency=2, host_mib=3_000, asleep=Need(0, 3_000)),
)
NAMES = [spec.id for spec in MODELS]
# Groups that take turns, that run alone, that stay beside any other; and a matrix in which one model has no place.
GROUPS = (
    Group("turns", (ModelId("small"), ModelId("middle")), exclusive=False),
    Group("kept", (ModelId("kept"),), exclusive=False, persistent=True),
    Group("alone", (ModelId("large"),)),
    Group("free", tuple(map(ModelId, ("fixed", "remote", "wide", "hosted"))), swap=False, exclusive=False),
)
MATRIX = Matrix(
    (("pair", "kept & remote & (small | fixed) & (middle | wide | hosted)"), ("big", "kept & large & remote"))
)
LIMITS = Limits(queue_depth_max=12, tenant_weights={TenantId("t"): 2.0}, tenant_depths={TenantId("t"): 5})
RULES: tuple[Rules | None, ...] = (None, None, GROUPS, MATRIX)
DRAIN_STEPS_MAX = 2_000

names = st.sampled_from(NAMES)
priorities = st.sampled_from([0, 1, 1, 1, 2])
patience = st.sampled_from([None, None, 3.0, 30.0])
policies = st.sampled_from(["default", "default", "fifo"])
swappers = st.sampled_from(["memory", "memory", "coordinator"])
green_rooms = st.sampled_from([None, 0, 3_000, 7_000])
keep_alives = st.sampled_from([None, None, 0.0, -1.0, 7.0])
OTHERS = (
    OtherLease(LeaseId("x-1"), "finetune", {DeviceId("gpu0"): 3_000}),
    OtherLease(LeaseId("x-2"), "render", {DeviceId("gpu0"): 1_000, DeviceId("gpu1"): 6_000}, 2, True),
)
rules = st.sampled_from(RULES)
CHOICES = (
    ev.Choice(prefer_first_s=5.0),
    ev.Choice(pin_primary=True),
    ev.Choice(2.0, last_resort=(ModelId("remote"),)),
    ev.Choice(pin_primary=True, last_resort=(ModelId("remote"), ModelId("small"))),
)
choices = st.sampled_from((None, None, *CHOICES))
ladders = st.lists(names, min_size=1, max_size=3, unique=True)


def version(name: ModelId) -> ModelId:
    return ModelId(f"{name}@next")


class AnythingMayHappen(RuleBasedStateMachine):
    scheduler: type[PlainScheduler] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.world = World(plays=False)
        self.ends_abruptly = False

    @initialize(ends_abruptly=st.booleans(), policy=policies, company=rules, green_room_mib=green_rooms)
    def begin(self, ends_abruptly: bool, policy: str, company: Rules | None, green_room_mib: int | None) -> None:
        self.ends_abruptly = ends_abruptly
        limits = replace(LIMITS, policy=policy, company=company, green_room_mib=green_room_mib)
        self.world = World(MODELS, DEVICES, limits, plays=False, scheduler=self.scheduler)

    def _next(self, letter: str) -> str:
        self.number += 1
        return f"{letter}{self.number}"

    def _calls(self, *fates: Fate, leases: bool = False) -> list[Call]:
        calls = self.world.calls_by_id.values()
        return [call for call in calls if call.fate in fates and call.is_lease == leases]

    # --- requests -----------------------------------------------------------------------------------------------------

    @rule(
        candidates=ladders,
        choice=choices,
        priority=priorities,
        tenant=st.sampled_from(["t", "u"]),
        within_s=patience,
        patient=st.booleans(),
        budget_s=patience,
        keep_alive_s=keep_alives,
    )
    def a_request_arrives(
        self,
        candidates: list[ModelId],
        choice: ev.Choice | None,
        priority: int,
        tenant: str,
        within_s: float | None,
        patient: bool,
        budget_s: float | None,
        keep_alive_s: float | None,
    ) -> None:
        name = self._next("r")
        self.world.arrive(
            name,
            *candidates,
            priority=priority,
            tenant=tenant,
            within_s=within_s,
            patient=patient,
            budget_s=budget_s,
            keep_alive_s=keep_alive_s,
            choice=choice,
        )

    @rule(name=names, times=st.integers(2, 6))
    def a_burst_arrives(self, name: ModelId, times: int) -> None:
        for _ in range(times):
            self.world.arrive(self._next("r"), name)

    @precondition(lambda self: self._calls(Fate.WAITING, Fate.GRANTED))
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        self.world.go(data.draw(st.sampled_from(self._calls(Fate.WAITING, Fate.GRANTED))).id)

    @precondition(lambda self: self._calls(Fate.GRANTED))
    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    def an_answer_ends(self, data: st.DataObject, lost: bool) -> None:
        self.world.finish(data.draw(st.sampled_from(self._calls(Fate.GRANTED))).id, lost=lost)

    @rule(candidates=ladders, choice=choices, priority=priorities)
    def an_explanation_changes_nothing_and_comes_true(
        self, candidates: list[ModelId], choice: ev.Choice | None, priority: int
    ) -> None:
        world, name = self.world, self._next("r")
        before, said = picture(world.scheduler.state), len(world.calls)
        asking = world.asking(name, *candidates, priority=priority, choice=choice)
        plan, (options, chosen) = world.scheduler.view.explanation(asking).plan, world.scheduler.view.weigh(asking)
        assert picture(world.scheduler.state) == before and len(world.calls) == said
        # What leaves for it may be judged differently: the one counts the request among those that wait, the other not.
        assert isinstance(plan, Refuse | Serve) or plan.model == options[chosen].model
        call = world.arrive(name, *candidates, priority=priority, choice=choice)
        if isinstance(plan, Serve):
            assert (call.fate, call.slot) == (Fate.GRANTED, plan.slot)
        elif isinstance(plan, Refuse):
            assert world.code(name) is plan.code
        else:
            assert call.fate is Fate.WAITING and world.scheduler.state.waitlist[name].model == plan.model

    # --- moves --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.moving)
    @rule(
        data=st.data(),
        fails=st.sampled_from([False, False, False, True]),
        outcome=st.sampled_from(list(Outcome)),
        share=st.sampled_from([None, None, 0.0, 0.3, 0.75, 1.2]),
    )
    def a_move_ends(self, data: st.DataObject, fails: bool, outcome: Outcome, share: float | None) -> None:
        move = data.draw(st.sampled_from(list(self.world.moving)))
        engine, claim = self.world.engines[self.world.moving[move].model], self.world.moving[move].claim
        # A sleeping engine may report what it takes: less than was planned for, or more.
        engine.seen_asleep = None if share is None else {on: int(mib * share) for on, mib in claim.items()}
        self.world.end_move(move, outcome if fails else Outcome.DONE)

    @precondition(lambda self: self.world.places)
    @rule(data=st.data(), left_in=st.sampled_from([Tier.COLD, Tier.ASLEEP]))
    def a_process_dies(self, data: st.DataObject, left_in: Tier) -> None:
        leases = {call.slot for call in self.world.calls_by_id.values() if call.is_lease}
        slots = [slot for slot in self.world.places if slot not in leases]
        if slots:
            dying = data.draw(st.lists(st.sampled_from(slots), min_size=1, max_size=2, unique=True))
            self.world.lose(*dying, left_in=left_in)

    @rule(
        name=names,
        kind=st.sampled_from(list(MoveKind)),
        grace_s=st.sampled_from([None, 0.0, 2.0]),
        evict=st.lists(names, max_size=1),
    )
    def an_operator_asks(self, name: ModelId, kind: MoveKind, grace_s: float | None, evict: list[ModelId]) -> None:
        self.world.ask(self._next("o"), kind, name, grace_s=grace_s, evict=tuple(evict))

    @rule()
    def strangers_speak(self) -> None:
        self.world.post(ev.MoveDone(self.world.now, MoveId("m?"), Outcome.DONE))
        self.world.post(ev.ServeDone(self.world.now, RequestId("r?")))
        self.world.post(ev.TimerFired(self.world.now, Timer(TimerKind.IDLE, "s?")))

    # --- memory and leases --------------------------------------------------------------------------------------------

    @rule(device=st.sampled_from(DEVICES), share=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def strangers_use_memory(self, device: Device, share: float) -> None:
        self.world.memory({device.id: int(device.capacity_mib * share)})

    @precondition(lambda self: self.world.places)
    @rule(data=st.data(), more=st.integers(0, 2_000))
    def a_slot_is_seen_to_use_more(self, data: st.DataObject, more: int) -> None:
        slot = data.draw(st.sampled_from(list(self.world.places)))
        holds = self.world.places[slot].holds
        self.world.memory({}, {slot: {device: mib + more for device, mib in holds.items()}})

    @rule(
        gpu_mib=st.sampled_from([1_000, 5_000, 12_000, 50_000]),
        priority=priorities,
        preemptible=st.booleans(),
        within_s=patience,
        gpus=st.sampled_from([1, 1, 2, 3]),
    )
    def a_lease_is_asked_for(
        self, gpu_mib: int, priority: int, preemptible: bool, within_s: float | None, gpus: int
    ) -> None:
        name = self._next("l")
        self.world.ask_lease(name, gpu_mib, priority=priority, preemptible=preemptible, within_s=within_s, gpus=gpus)

    @rule(leases=st.lists(st.sampled_from(OTHERS), max_size=2, unique_by=lambda lease: lease.id))
    def other_gateways_hold_memory(self, leases: list[OtherLease]) -> None:
        self.world.memory({}, leases=tuple(leases))

    @rule(name=names, gpu_mib=st.sampled_from([0, 1_500, 5_000, 9_000]))
    def a_need_is_measured(self, name: ModelId, gpu_mib: int) -> None:
        self.world.config(needs={name: Need(gpu_mib)})

    @precondition(lambda self: self._calls(Fate.WAITING, Fate.GRANTED, leases=True))
    @rule(data=st.data())
    def a_lease_ends(self, data: st.DataObject) -> None:
        self.world.end_lease(data.draw(st.sampled_from(self._calls(Fate.WAITING, Fate.GRANTED, leases=True))).id)

    # --- time and configuration ---------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @precondition(lambda self: self.world.timers)
    @rule(data=st.data())
    def a_timer_fires_early(self, data: st.DataObject) -> None:
        self.world.fire(data.draw(st.sampled_from(sorted(self.world.timers, key=repr))))

    @rule(
        name=names,
        renewed=st.booleans(),
        pinned=st.booleans(),
        preload=st.booleans(),
        ttl_s=st.sampled_from([0.0, 1.0]),
        concurrency=st.integers(1, 3),
    )
    def a_model_is_changed(
        self, name: ModelId, renewed: bool, pinned: bool, preload: bool, ttl_s: float, concurrency: int
    ) -> None:
        old = self.world.specs[name]
        revision = old.revision + renewed
        self.world.config(
            replace(old, revision=revision, pinned=pinned, preload=preload, ttl_s=ttl_s, concurrency=concurrency)
        )

    @rule(name=names, asked=st.booleans(), gpu_mib=st.sampled_from([None, 2_000, 6_000]))
    def a_version_comes(self, name: ModelId, asked: bool, gpu_mib: int | None) -> None:
        spec = self.world.specs[name]
        self.number += 1
        need = spec.need if gpu_mib is None else Need(gpu_mib)
        coming = replace(
            spec, id=version(name), revision=self.number, version_of=name, need=need, pinned=False, preload=False
        )
        self.world.config(coming)
        if asked:
            self.world.ask(self._next("o"), MoveKind.LOAD, coming.id)
        else:
            self.world.arrive(self._next("r"), coming.id)

    @rule(name=names)
    def a_version_is_promoted(self, name: ModelId) -> None:
        spec = self.world.specs[name]
        self.world.promote(version(name), replace(spec, revision=spec.revision + 1, held=False))

    @rule(name=names, held=st.sampled_from([True, False, False]))
    def a_model_is_held(self, name: ModelId, held: bool) -> None:
        if name in self.world.scheduler.state.models:
            self.world.config(replace(self.world.specs[name], held=held))

    @rule(name=names)
    def a_version_is_given_up(self, name: ModelId) -> None:
        self.world.config(removed=(version(name),))

    @rule(name=names)
    def a_model_is_removed(self, name: ModelId) -> None:
        self.world.config(removed=(name,))

    @rule(capacity_mib=st.sampled_from([8_000, 4_000]), there=st.booleans())
    def devices_change(self, capacity_mib: int, there: bool) -> None:
        self.world.config(devices=(gpu(0, capacity_mib, 500), *([gpu(1, 6_000, 500)] if there else []), host(10_000)))

    @rule(
        policy=policies,
        swapper=swappers,
        company=rules,
        away_share=st.sampled_from([0.1, 0.5, 1.0]),
        green_room_mib=green_rooms,
    )
    def the_policy_changes(
        self, policy: str, swapper: str, company: Rules | None, away_share: float, green_room_mib: int | None
    ) -> None:
        limits = replace(LIMITS, policy=policy, swapper=swapper, company=company, away_share=away_share)
        self.world.config(limits=replace(limits, green_room_mib=green_room_mib))

    # --- the end ------------------------------------------------------------------------------------------------------

    @invariant()
    def no_request_is_forgotten(self) -> None:
        """The scheduler knows exactly the requests that wait or are served in the world."""
        state = self.world.scheduler.state
        callers = {waiter.id for waiter in state.waitlist if waiter.kind in (WaiterKind.REQUEST, WaiterKind.LEASE)}
        waiting = {call.id for call in self.world.calls_by_id.values() if call.fate is Fate.WAITING}
        assert callers == waiting
        assert set(state.grants) == {call.id for call in self.world.calls_by_id.values() if call.fate is Fate.GRANTED}
        assert state.timers == self.world.timers
        tenants = {call.tenant for call in self._calls(Fate.WAITING, Fate.GRANTED)}
        assert set(state.accounts._active) == tenants

    def teardown(self) -> None:
        if not self.ends_abruptly:
            self._faults_stop()
            self._drain()
            assert not self._calls(Fate.WAITING) and not self._calls(Fate.WAITING, leases=True)
        self.world.shut_down(1.0)
        self._drain()
        assert not self.world.places and not self.world.scheduler.state.slots
        assert not self.world.scheduler.state.ledger.holdings and not self.world.scheduler.state.timers
        assert self.world.is_at_rest()
        assert not self.world.scheduler.state.accounts._active

    def _faults_stop(self) -> None:
        self.world.memory({HOST: 0, DeviceId("gpu0"): 0, DeviceId("gpu1"): 0}, leases=())
        # Rules about coresidency stay: a model that they keep out for good is refused.
        company = self.world.scheduler.view.limits.company
        self.world.config(*(replace(spec, held=False) for spec in self._held()))
        self.world.config(devices=DEVICES, limits=replace(LIMITS, company=company))

    def _held(self) -> list[ModelSpec]:
        state = self.world.scheduler.state
        return [record.spec for record in state.models.values() if record.spec.held]

    def _drain(self) -> None:
        """Moves end well, answers end, leases end, time passes: soon nothing is left to do."""
        for _ in range(DRAIN_STEPS_MAX):
            if not self._step():
                return
        raise AssertionError("it does not drain")

    def _step(self) -> bool:
        world = self.world
        if world.moving:
            world.end_move(next(iter(world.moving)), Outcome.DONE)
        elif running := self._calls(Fate.GRANTED):
            world.finish(running[0].id)
        elif held := self._calls(Fate.GRANTED, leases=True):
            world.end_lease(held[0].id)
        elif world.timers:
            world.now = max(world.now, min(world.timers.values()))
            world.fire(min(world.timers, key=lambda timer: (world.timers[timer], repr(timer))))
        else:
            return False
        return True


_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("quick", max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=_quiet)
settings.register_profile("slow", max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=_quiet)
settings.register_profile(
    "long", max_examples=5_000, stateful_step_count=100, deadline=None, suppress_health_check=_quiet
)

AnythingMayHappen.TestCase.settings = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
# A loaded machine may take long over it; it takes seconds on an idle one.
TestAnythingMayHappen = pytest.mark.untraced(pytest.mark.timeout(3_600)(AnythingMayHappen.TestCase))


class AnythingMayHappenPlainly(AnythingMayHappen):
    """The same to the plain scheduler."""

    scheduler = PlainScheduler


AnythingMayHappenPlainly.TestCase.settings = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
TestAnythingMayHappenPlainly = pytest.mark.untraced(pytest.mark.timeout(3_600)(AnythingMayHappenPlainly.TestCase))


class AnythingMayHappenForLong(AnythingMayHappen):
    """The same, more often."""


AnythingMayHappenForLong.TestCase.settings = settings.get_profile("slow")
TestAnythingMayHappenForLong = pytest.mark.slow(pytest.mark.timeout(3_600)(AnythingMayHappenForLong.TestCase))
