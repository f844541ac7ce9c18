"""Rounds: which waiting models may come now, asked in order of rank.

Owns that order, the timer for the next round, and the devices kept for models that have waited too long.
`decide/` decides on each, and `apply.py` carries the plan out.
"""

from __future__ import annotations

from math import inf

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.decide.decision import Plan, Swap, Wait
from greenroom.core.decide.ladder import decide
from greenroom.core.decide.placement import Places
from greenroom.core.decide.residents import Residents
from greenroom.core.effects import because
from greenroom.core.model import DeviceId, ModelId
from greenroom.core.queue.index import LEADING_MIN
from greenroom.core.queue.waitlist import Queue, Waiter
from greenroom.core.slots import SlotWriter
from greenroom.core.state import State

# How many models one round asks for in order of rank, and how many more that might fit. Others wait. With very many
# waiting models a round asks for fewer.
ASKED_MAX = 16
# With more waiting models than this, the next deadline also sets the timer, because a round may not ask for all.
INSIST_MANY = 4
# With very many waiting models there is a round at least this often, so that no rank grows old.
ROUND_WITH_MANY_S = 0.5
# While a model waits for a busy one there is a round at least this often: what is served meanwhile may let it come
# sooner than the policy said.
ROUND_S = 5.0
_SWITCH = ev.Timer(ev.TimerKind.SWITCH, "")


class Rounds:
    def __init__(self, state: State, slots: SlotWriter, act: Actions, places: Places) -> None:
        self._state = state
        self._places = places
        self._slots = slots
        self._act = act

    def joined(self, until: float, now: float) -> None:
        """A request now waits for a model that is not ready; asking again may help at `until`."""
        self.look_again_at(min(until, self.looks_at), now)

    def rest(self, now: float) -> None:
        """Nothing waits: cancel the timer and release kept devices."""
        self._state.kept.clear()
        self.look_again_at(inf, now)

    def bring(self, now: float) -> None:
        """Ask, in order of rank, whether each waiting model that is not ready may come now.

        The first few are always asked for. After them only models that need less memory than every model that had to
        wait for the same devices, or that use other devices: so a busy device does not block the models behind.
        """
        state = self._state
        state.kept.clear()
        few = LEADING_MIN if state.waitlist.has_many_models else ASKED_MAX
        ranking, until = self._ranked(now)
        residents, asked = Residents(state, now, self._places, may_keep=True), 0
        least: dict[tuple[DeviceId, ...], int] = {}
        for model in ranking:
            # An earlier decision of this round may have emptied the queue or brought the model.
            queue = state.waitlist.queues.get(model)
            if queue is None or not state.is_away(queue, now):
                continue
            record = state.claimants[model]
            devices, mib = record.spec.devices, record.need.gpu_mib + record.need.host_mib
            smallest = least.get(devices)
            if asked >= few and smallest is not None and mib >= smallest:
                continue
            if asked >= few + ASKED_MAX:
                break
            asked += 1
            until_this, then = self._ask_for(queue, residents, now)
            until = min(until, until_this)
            if then is residents:
                least[devices] = mib if smallest is None else min(mib, smallest)
            residents = then
        self.look_again_at(until, now)

    def _ranked(self, now: float) -> tuple[list[ModelId], float]:
        """Models that are away, in order of rank, and when the next round is due in any case."""
        state = self._state
        queues = state.waitlist.ranking(state.policy.rank, state.is_away, now)
        models = [queue.model for queue in queues]
        if state.waitlist.has_many_models:
            return models, now + ROUND_WITH_MANY_S
        deadlines = (queue.deadline_at for queue in queues if queue.deadline_at > now)
        return models, min(deadlines, default=inf) if len(queues) > INSIST_MANY else inf

    def _ask_for(self, queue: Queue, residents: Residents, now: float) -> tuple[float, Residents]:
        """Decide on the first of this queue, on the next if that one has left, and on operators that want it asleep.

        Returns when to ask again, and the residents from then on: the same object if nothing has changed.
        """
        if self._is_kept_out(queue, residents, now):
            return inf, residents
        until, first = inf, self._act.first_of(queue, now)
        while first is not None:
            plan, residents = self._decide_on(first, residents, now)
            stays = first.id in self._state.waitlist and first.model == queue.model
            if stays and isinstance(plan, Wait):
                if plan.keeps:
                    self._state.kept[queue.model] = plan.keeps
                until = plan.until
            first = None if stays else self._act.first_of(queue, now)
        for waiter in list(queue.preparing.values()):
            plan, residents = self._decide_on(waiter, residents, now)
            until = min(until, plan.until) if isinstance(plan, Wait) else until
        return until, residents

    def _is_kept_out(self, queue: Queue, residents: Residents, now: float) -> bool:
        """True if every device that it could use is kept for others, so that asking would change nothing.

        Nothing is kept for the model itself yet: a round asks for each model once.
        """
        state, record = self._state, self._state.claimants[queue.model]
        if not state.kept or queue.preparing or state.waitlist.with_choice or record.retry_at > now:
            return False
        if queue.model in state.slots_by_model or record.spec.version_of is not None:
            # A coming version may also have to be refused because its own model stays where it is.
            return False
        kept = frozenset[DeviceId]().union(*(on for _, on in state.still_kept()))
        ways = residents.ways(record)
        return bool(ways) and not any(kept.isdisjoint(way.on) for way in ways)

    def _decide_on(self, waiter: Waiter, residents: Residents, now: float) -> tuple[Plan, Residents]:
        plan = decide(self._state, waiter, now, self._places, residents)
        self._act.carry_out(waiter, plan, now)
        if isinstance(plan, Wait):
            return plan, residents
        return plan, residents.after_swap() if isinstance(plan, Swap) else Residents(
            self._state, now, self._places, residents.may_keep
        )

    @property
    def looks_at(self) -> float:
        """When the next round is due if nothing happens."""
        return self._state.timers.get(_SWITCH, inf)

    def look_again_at(self, at: float, now: float) -> None:
        """Schedule a round; infinity: only when something happens."""
        at = min(at, now + ROUND_S) if at < inf else inf
        if at == self.looks_at:
            return
        if at == inf:
            self._slots.forget_timer(_SWITCH)
        else:
            self._slots.set_timer(_SWITCH, max(at, now), because("switch"))
