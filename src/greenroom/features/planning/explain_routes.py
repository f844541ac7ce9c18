"""What would happen if a request came now. The scheduler itself makes the plan; nothing changes. Owns how the plan is
shown. The question has the same waiting time and budget as a real request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isinf
from typing import Annotated, Any, Final, Literal, assert_never

from fastapi import Request
from pydantic import Field

from greenroom.access.keys import Permission, parse_priority
from greenroom.api.declared import NEVER, Routes, post
from greenroom.api.views import ModelName, Order, Priority, Tier, View
from greenroom.config.kinds import ID_CHARS_MAX, NAME_CHARS_MAX
from greenroom.config.schema import Heartbeat
from greenroom.core.contract import Scheduler
from greenroom.core.effects import RejectCode
from greenroom.core.events import Choice, RequestArrived
from greenroom.core.explain import Explanation, Join, Option, Plan, Refuse, Serve, Swap, Victim, Wait
from greenroom.core.model import LeaseId, ModelId, RequestId, TenantId, lease_name
from greenroom.errors import PolicyFailed
from greenroom.features.leases.local import LocalLeasing
from greenroom.features.leases.routes import own_prefix
from greenroom.features.leases.sharing import SharedLeasing
from greenroom.leases.records import lease_names
from greenroom.runtime.known_models import OPERATOR
from greenroom.runtime.memory.devices import name_of, none_there
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell
from greenroom.serving.request import Settings, arrival, smaller
from greenroom.serving.tasks import Ladder, Tasks
from greenroom.telemetry.logs import get_logger

# How the scheduler names slots of leases, and why one leaves.
LEASE_PREFIX: Final = lease_name(LeaseId(""))
RECALLED: Final = "less urgent; its program is told to give it back"

Action = Literal["serve", "join", "wait", "swap", "refuse"]


class ExplainAsk(Order):
    """A request as it might come, without its prompt."""

    model: Annotated[str, Field(max_length=ID_CHARS_MAX)]
    """Its id, an alias, or a task."""
    priority: Priority | None = None
    """high, normal, low or a number; that of the model or task when not given."""
    tenant: Annotated[str, Field(max_length=NAME_CHARS_MAX)] = ""
    stream: bool = False
    """Whether the answer would be a stream; its caller can wait longer."""
    x_budget_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds the whole answer may take."""


class Evicted(View):
    model: ModelName
    """Its id; the name of a lease that would be recalled, `a lease` if this key may not see it."""
    is_lease: bool = False
    slot: str
    to: Tier
    """Where it would go: asleep, or cold."""
    why: str


class DeviceClaim(View):
    """What its model would hold of a device."""

    id: str
    name: str
    """gpu0, gpu1 … or host, as a model's `devices` may call it."""
    mib: int


Verdict = Literal["chosen", "refused", "left_out", "last_resort", "late", "not_sooner", "slower"]


class CandidateView(View):
    """One model of a task."""

    model: ModelName
    verdict: Verdict
    """refused: it cannot serve now. left_out: it cannot serve such a request. last_resort: it is remote, and used only
    if no other can serve in time. late: not within the budget. not_sooner: it comes later in the list and does not
    serve sooner by more than prefer_first_s, or pin_primary is set. slower: a later one serves sooner by more than
    that."""
    why: str | None = None
    """Why it cannot serve."""
    eta_s: float | None = None
    """Seconds until its answer would begin, if that is known."""


class Explained(View):
    """What would happen to a request. Asking changes nothing."""

    action: Action
    """serve: at once. join: its model is being loaded already. swap: its model would be loaded now. wait: nothing can
    be done now. refuse: it would be answered with an error."""
    model: ModelName
    task: str | None = None
    """The task that was asked for, if it was one."""
    candidates: list[CandidateView] = []
    """The models of the task, the best first, and which of them it would get."""
    slot: str | None = None
    """The slot that would serve it, if there is one already."""
    move: str | None = None
    """How its model would become ready: load, or wake."""
    devices: list[DeviceClaim] = []
    """Where it would be then; empty if there is no move, or if it takes no memory."""
    why: str | None = None
    """What it would wait for, or why it would be refused. leased: programs hold its memory by leases, whose end is not
    known."""
    detail: str | None = None
    """More about `why` in words, where there is more to say: of `too_large`, that none of its `devices` is there."""
    leases: list[str] = []
    """Names of the leases whose end would make room for it, as far as this key may see them."""
    behind: list[ModelName] = []
    """Models whose requests go first."""
    beside: list[ModelName] = []
    """Models beside which `scheduler.company` does not let it be ready."""
    evict: list[Evicted] = []
    """Models that would leave for it."""
    calls_off: list[ModelName] = []
    """Less urgent models that are about to load and would have to wait again."""
    too_late: bool = False
    """Its model would be loaded, but not within the caller's time: the request would be refused."""
    position: int | None = None
    """Its place in the queue; null if it would not wait."""
    eta_s: float | None = None
    """Seconds until its answer would begin; null while the time of its move or of answers ahead is not known, where
    leases or undeclared processes hold its memory, and while the lease store is away."""
    wait_max_s: float | None = None
    """Seconds after which it would be refused if it still waited: its budget, or the limit of the gateway; null if it
    would not wait."""
    retry_after_s: float | None = None
    """When a refused request may be worth another try, if that is known."""


PATH = "/api/v1/explain"
_log = get_logger("server")
# No request has this id: theirs begin with r-.
_NOBODY = RequestId("explain")


class Explaining(Routes):
    def __init__(
        self, shell: Shell, resolver: Resolver, tasks: Tasks, watch: MemoryWatch, leasing: LocalLeasing | SharedLeasing
    ) -> None:
        self._shell = shell
        self._resolver = resolver
        self._tasks = tasks
        self._watch = watch
        self._leasing = leasing

    @post(PATH, needs=Permission.READ, signed=NEVER)
    async def explain(self, request: Request, ask: ExplainAsk) -> Explained:
        """What would happen if this request came now: is it served, what does it wait for, which models leave?"""
        task, own = self._tasks.find(ask.model), own_prefix(request)
        if task is not None:
            return self._explain_task(ask, self._tasks.ladder(task, OPERATOR.sees), own)
        entry = await self._resolver.named(ask.model)
        event = self._arrival(ask, (entry.id,), entry.spec.priority, ask.x_budget_s)
        scheduler = self._shell.loop.scheduler
        with naming_policy(scheduler, event):
            said = scheduler.view.explanation(event)
        return self._told(event, said, entry.id, own)

    def _explain_task(self, ask: ExplainAsk, ladder: Ladder, own: str) -> Explained:
        models, section = tuple(one.id for one in ladder.models), ladder.task.section
        choice = ladder.choice({model: model for model in models})
        first = self._shell.catalog.find(models[0])
        priority = ladder.task.priority_or(1 if first is None else first.spec.priority)
        event = self._arrival(ask, models, priority, smaller(ask.x_budget_s, section.budget_s), choice)
        scheduler = self._shell.loop.scheduler
        with naming_policy(scheduler, event):
            options, place = scheduler.view.weigh(event)
            said = scheduler.view.explanation(event)
        told = self._told(event, said, options[place].model, own)
        seen = [_candidate(one, position, place) for position, one in enumerate(options)]
        left_out = [CandidateView(model=one.model, verdict="left_out", why=one.why) for one in ladder.left_out]
        return told.model_copy(update={"task": ladder.task.name, "candidates": [*seen, *left_out]})

    def _told(self, event: RequestArrived, said: Explanation, model: ModelId, own: str) -> Explained:
        plan, waits = said.plan, not isinstance(said.plan, Serve | Refuse)
        return Explained(
            action=action_of(plan),
            model=model,
            behind=[str(name) for name in said.behind],
            calls_off=[str(name) for name in said.calls_off],
            too_late=said.is_too_late,
            position=said.position or None,
            eta_s=None if said.eta_s is None else round(said.eta_s, 3),
            wait_max_s=round(event.give_up_at - event.now, 3) if waits and event.give_up_at is not None else None,
            **self._particulars(said, model, own),
        )

    def _particulars(self, said: Explanation, model: ModelId, own: str) -> dict[str, Any]:
        """Fields that only this kind of plan has."""
        match plan := said.plan:
            case Serve(slot) | Join(slot):
                return {"slot": slot}
            case Swap():
                devices, evict = self._devices(plan), self._evicted(said.evict, own)
                return {"slot": plan.wakes, "move": plan.kind.value, "devices": devices, "evict": evict}
            case Wait():
                names = self._lease_names(own)
                leases = [names[lease] for lease in said.leases if lease in names]
                return {"why": why_waits(plan, said), "beside": list(plan.beside), "leases": leases}
            case Refuse():
                why: dict[str, Any] = {"why": plan.code.value, "retry_after_s": plan.retry_after_s}
                return {**why, "beside": list(plan.beside), "detail": self._why_too_large(plan, model, own)}
            case _:
                assert_never(plan)

    def _why_too_large(self, plan: Refuse, model: ModelId, own: str) -> str | None:
        if plan.code is not RejectCode.TOO_LARGE:
            return None
        unpin = f"It would fit without pinned models: unpin {', '.join(plan.pinned)}." if plan.pinned else ""
        return self._no_device(model) or ("" if own else unpin) or None

    def _lease_names(self, own: str) -> dict[LeaseId, str]:
        others = self._shell.loop.scheduler.view.ledger.others
        return lease_names(self._leasing.known(), others, own)

    def _evicted(self, victims: Sequence[Victim], own: str) -> list[Evicted]:
        """Leases by the names that this key may see, not by their ids."""
        names = {lease_name(lease): name for lease, name in self._lease_names(own).items()}
        evict = []
        for one in victims:
            is_lease = one.model.startswith(LEASE_PREFIX)
            name, why = (names.get(one.model, "a lease"), RECALLED) if is_lease else (one.model, one.why)
            evict.append(Evicted(model=name, is_lease=is_lease, slot=one.slot, to=one.leaves_to.value, why=why))
        return evict

    def _devices(self, swap: Swap) -> list[DeviceClaim]:
        gpus = self._watch.last.reading.gpus
        held = [(device, mib) for device, mib in swap.claim.items() if mib > 0]
        return [DeviceClaim(id=device, name=name_of(device, gpus), mib=mib) for device, mib in held]

    def _no_device(self, model: ModelId) -> str:
        entry, there = self._shell.catalog.find(model), self._shell.loop.scheduler.view.ledger.devices
        return "" if entry is None else none_there(entry, there, self._watch.last.reading.gpus)

    def _arrival(
        self,
        ask: ExplainAsk,
        models: tuple[ModelId, ...],
        priority: int,
        budget_s: float | None,
        choice: Choice | None = None,
    ) -> RequestArrived:
        settings = Settings.of(self._shell.config)
        return arrival(
            settings,
            self._shell.clock(),
            _NOBODY,
            models,
            priority if ask.priority is None else parse_priority(ask.priority, param="priority"),
            TenantId(ask.tenant),
            ask.stream and settings.heartbeat is not Heartbeat.OFF,
            budget_s,
            choice=choice,
        )


@contextmanager
def naming_policy(scheduler: Scheduler, event: RequestArrived) -> Iterator[None]:
    """Around a question to the scheduler. If that raises, raises PolicyFailed, which names the policy."""
    try:
        yield
    except Exception as bug:
        limits, models = scheduler.view.limits, ", ".join(event.candidates)
        _log.bug("explanation failed", bug, policy=limits.policy, swapper=limits.swapper, model=models)
        why = f"{type(bug).__name__}: {bug}"
        raise PolicyFailed(
            f"The policy {limits.policy!r} (swapper {limits.swapper!r}) failed at a request for {models}: {why}. "
            "The log has the traceback."
        ) from bug


def _candidate(option: Option, position: int, chosen: int) -> CandidateView:
    eta_s = None if isinf(option.begins_s) else round(option.begins_s, 3)
    if isinstance(option.plan, Refuse):
        return CandidateView(model=option.model, verdict="refused", why=option.plan.code.value)
    verdict: Verdict = "not_sooner" if position > chosen else "slower"
    if position == chosen:
        verdict = "chosen"
    elif option.is_last_resort:
        verdict = "last_resort"
    elif option.is_late:
        verdict = "late"
    return CandidateView(model=option.model, verdict=verdict, eta_s=eta_s)


_ACTIONS: Final[Mapping[type[Plan], Action]] = {
    Serve: "serve",
    Join: "join",
    Wait: "wait",
    Swap: "swap",
    Refuse: "refuse",
}


def action_of(plan: Plan) -> Action:
    return _ACTIONS[type(plan)]


def why_waits(wait: Wait, said: Explanation) -> str:
    """The word for what it waits for. No model has to leave where leases hold the memory."""
    return "leased" if said.leases else wait.why.value
