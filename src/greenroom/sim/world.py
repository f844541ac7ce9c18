"""The simulated world: callers arrive, operators ask, programs want memory, machines and configurations change. Owns
how things begin. `player.py` plays and checks the scheduler's effects, and ends what was begun."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from greenroom.core import events as ev
from greenroom.core.model import (
    NO_TENANT,
    Device,
    DeviceId,
    LeaseId,
    ModelId,
    MoveKind,
    Need,
    OpId,
    OtherLease,
    RequestId,
    TenantId,
)
from greenroom.sim.config import SimConfig, SimModel
from greenroom.sim.hooks import Faults, Watcher
from greenroom.sim.player import Player
from greenroom.sim.records import Fate, SimArrival, SimCall, Violation

# A world that is not at rest after this many events, and this many more for each request, never will be.
EVENTS_MAX = 1_000_000
EVENTS_PER_REQUEST_MAX = 1_000


class World(Player):
    """Plays one configuration. `run` lets time pass; the other methods are what can happen in it."""

    def __init__(
        self, config: SimConfig, seed: int = 0, faults: Faults | None = None, watchers: Sequence[Watcher] = ()
    ) -> None:
        super().__init__(config, seed, faults, watchers)
        self._events_max = EVENTS_MAX
        self._configure()

    def _configure(self) -> None:
        config = self.config
        limits = replace(config.limits, policy=config.policy)
        self.change_config(config.models, devices=config.devices, limits=limits, learned=config.learned())

    @property
    def now(self) -> float:
        """Real time; the scheduler's clock may have been stepped."""
        return self.clock.now

    @property
    def is_at_rest(self) -> bool:
        """True if no request waits or is served, nothing moves and every operator was answered."""
        return not self.calls and not self.truth.moving and None not in self.ops.values()

    def waiting(self) -> list[SimCall]:
        return [call for call in self.calls.values() if call.fate is Fate.WAITING]

    # --- time ---------------------------------------------------------------------------------------------------------

    def run(self, until: float = float("inf")) -> None:
        """Run everything up to that time, or until nothing is scheduled any more."""
        advance = self.clock.advance
        while advance(until):
            if self.events_told > self._events_max:
                self._allow_more_events()
        if until != float("inf"):
            self.clock.pass_to(until)

    def _allow_more_events(self) -> None:
        requests = len(self.ended) + len(self.calls)
        self._events_max = EVENTS_MAX + EVENTS_PER_REQUEST_MAX * requests
        if self.events_told > self._events_max:
            raise Violation(f"the world does not come to rest within {self._events_max:,} events")

    def after(self, delay_s: float, action: Callable[[World], object]) -> None:
        """Let something happen later."""
        self.clock.arrange(delay_s, action, self)

    def step_clock(self, by_s: float) -> None:
        """The machine's clock jumps; timers keep to it."""
        self.clock.step(by_s)
        for timer, (at, number) in self._timers.items():
            self.clock.arrange_when_told(at, self._fire, (timer, number))

    # --- callers ------------------------------------------------------------------------------------------------------

    def feed(self, arrivals: Iterable[SimArrival]) -> None:
        """Let these requests arrive, each at its time. The iterable must be in order of time; it is read one by one."""
        self._arrange_next(iter(arrivals))

    def _arrange_next(self, arrivals: Iterator[SimArrival]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            self.clock.arrange_at(arrival.at, self._arrive_from, (arrival, arrivals))

    def _arrive_from(self, fed: tuple[SimArrival, Iterator[SimArrival]]) -> None:
        arrival, arrivals = fed
        self._arrange_next(arrivals)
        self.arrive(arrival.model, arrival.prompt_len, arrival.output_len, arrival.tenant, arrival.priority)

    def arrive(
        self,
        model: ModelId | tuple[ModelId, ...],
        prompt_len: int,
        output_len: int,
        tenant: TenantId = NO_TENANT,
        priority: int = 1,
        on_end: Callable[[SimCall], None] | None = None,
        patience_s: float | None = None,
        budget_s: float | None = None,
        keep_alive_s: float | None = None,
        choice: ev.Choice | None = None,
    ) -> SimCall:
        """A request arrives now."""
        number = self._next_number()
        candidates = model if isinstance(model, tuple) else (model,)
        call = SimCall(f"r{number}", number, candidates, self.clock.now, prompt_len, output_len, priority, tenant)
        call.on_end = on_end
        self.calls[call.id] = call
        told, patience_s = self.clock.told, self.config.patience_s if patience_s is None else patience_s
        give_up_at = None if patience_s is None else told + patience_s
        answer_by = None if budget_s is None else told + budget_s
        self.post(
            ev.RequestArrived(
                told,
                RequestId(call.id),
                candidates,
                priority,
                tenant,
                give_up_at=give_up_at,
                answer_by=answer_by,
                keep_alive_s=keep_alive_s,
                choice=choice,
            )
        )
        return call

    # --- operators, other programs, the machine -----------------------------------------------------------------------

    def change_config(
        self,
        models: Sequence[SimModel] = (),
        removed: Sequence[ModelId] = (),
        devices: Sequence[Device] | None = None,
        limits: ev.Limits | None = None,
        learned: Mapping[ModelId, ev.Learned] | None = None,
        needs: Mapping[ModelId, Need] | None = None,
    ) -> None:
        for model in models:
            self._put(model)
        for name in removed:
            self.models.pop(name, None)
        if devices is not None:
            self.truth.set_devices(devices)
        specs = tuple(model.told for model in models)
        told_devices = None if devices is None else tuple(devices)
        self.post(ev.ConfigChanged(self.clock.told, specs, tuple(removed), told_devices, limits, learned, needs))

    def _put(self, model: SimModel) -> None:
        spec = model.told
        self.models[spec.id] = model
        self._specs[spec.id, spec.revision] = spec
        for place in self.truth.places.values():
            if (place.model, place.revision) == (spec.id, spec.revision):
                place.concurrency = spec.concurrency or 1

    def promote(self, coming: ModelId, model: SimModel) -> None:
        """A version that was loaded beside a model takes its name."""
        spec = model.told
        self.models.pop(coming, None)
        self._put(model)
        for place in self.truth.places.values():
            if place.model == coming:
                place.model, place.revision = spec.id, spec.revision
        self.post(ev.VersionPromoted(self.clock.told, coming, spec))

    def change_memory(self, foreign_mib: Mapping[DeviceId, int]) -> None:
        """Foreign processes now use this much."""
        self.truth.set_foreign(foreign_mib)
        self.post(ev.MemoryChanged(self.clock.told, foreign_mib))

    def change_others(self, leases: Sequence[OtherLease]) -> None:
        """These leases, and no others, are now held through other gateways."""
        self.truth.set_others(leases)
        self.post(ev.MemoryChanged(self.clock.told, {}, leases=tuple(leases)))

    def ask_move(
        self, kind: MoveKind, model: ModelId, evict: tuple[ModelId, ...] = (), grace_s: float | None = None
    ) -> OpId:
        """An operator asks for a move."""
        op = OpId(f"o{self._next_number()}")
        self.ops[op] = None
        self.post(ev.MoveAsked(self.clock.told, op, kind, model, evict, grace_s))
        return op

    def ask_lease(
        self,
        need: Need,
        priority: int = 1,
        devices: tuple[DeviceId, ...] = (),
        preemptible: bool = False,
        grace_s: float = 30.0,
        patience_s: float | None = None,
        gpus: int = 1,
    ) -> LeaseId:
        """Another program asks for memory."""
        number = self._next_number()
        lease = LeaseId(f"l{number}")
        self.leases[lease] = self.calls[lease] = SimCall(
            lease, number, (), self.clock.now, priority=priority, is_lease=True
        )
        told = self.clock.told
        give_up_at = None if patience_s is None else told + patience_s
        self.post(ev.LeaseAsked(told, lease, need, priority, devices, preemptible, grace_s, give_up_at, gpus))
        return lease

    def shut_down(self, drain_s: float) -> None:
        self.post(ev.ShutdownAsked(self.clock.told, drain_s))
