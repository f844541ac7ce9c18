"""Rounds: which of the models that are waited for and not ready may come now, asked in the order of their rank.

Owns that order, the timer for the next look, and the devices kept for those who have waited too long. What happens to
each is decided in `decide.py` and done in `apply.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from greenroom.core import events as ev
from greenroom.core.apply import Actions
from greenroom.core.cast import Cast
from greenroom.core.decide import Plan, Wait, decide
from greenroom.core.effects import because
from greenroom.core.model import DeviceId, ModelId
from greenroom.core.stage import Stage
from greenroom.core.state import State
from greenroom.core.waitlist import Queue, Waiter

# How many models that are not ready are looked at in one round, the first in rank. Others wait for their turn there.
ASKED_MAX = 16
# With more waiting models than this there is a crowd: their order is kept for a moment, because it takes a microsecond
# for each of them; fewer are looked at in a round; and one more request for a model that is waited for already is
# looked at a little later, together with others.
RANKED_MANY = 64
ASKED_IN_CROWD = 4
LOOK_SOON_S = 0.1
RANKED_FRESH_S = 0.002  # For each of them: the more there are, the less a moment matters.
_SWITCH = ev.Timer(ev.TimerKind.SWITCH, "")


@dataclass(slots=True)
class Ranking:
    """The order in which models that are not ready come, as of some time."""

    models: list[ModelId] = field(default_factory=list)
    made_at: float = -inf
    deadline_at: float = inf

    def is_fresh(self, now: float, queues: int) -> bool:
        return 0.0 <= now - self.made_at < queues * RANKED_FRESH_S and now < self.deadline_at


class Rounds:
    def __init__(self, state: State, stage: Stage, act: Actions) -> None:
        self._state = state
        self._stage = stage
        self._act = act
        self._ranking = Ranking()

    def rank_anew(self) -> None:
        """Somebody urgent has come: an order that was kept no longer holds."""
        self._ranking.made_at = -inf

    def rest(self, now: float) -> None:
        """Nobody waits: nothing is to be looked at later."""
        state = self._state
        state.ask_again, state.oldest_cold = False, inf
        state.kept.clear()
        self.look_again_at(inf, now)

    def bring(self, now: float) -> None:
        """Ask for each waiting model that is not ready, the first in rank first, whether it may come now.

        The first few are asked for in any case. Further down only those may fare better who want less than anybody that
        had to wait for the same devices, or want others: so nobody is hidden behind those who wait for a busy device.
        """
        state = self._state
        state.ask_again = False
        state.kept.clear()
        ranking, cast, asked, until = self._ranked(now), Cast(state, now), 0, self._ranking.deadline_at
        few = ASKED_IN_CROWD if len(state.waitlist.queues) > RANKED_MANY else ASKED_MAX
        least: dict[tuple[DeviceId, ...], int] = {}
        for model in ranking:
            queue = state.waitlist.queues.get(model)
            if queue is None:
                continue
            record = state.models[model]
            devices, mib = record.spec.devices, record.need.gpu_mib + record.need.host_mib
            if asked >= few and mib >= least.get(devices, inf):
                continue
            if not self.is_away(model, now):
                continue
            if asked >= few + ASKED_MAX:
                break
            until_this, changed = self._ask_for(queue, cast, now)
            until, asked = min(until, until_this), asked + 1
            if changed:
                cast = Cast(state, now)
            else:
                least[devices] = min(mib, least.get(devices, mib))
        self.look_again_at(until, now)

    def _ranked(self, now: float) -> list[ModelId]:
        """Those who are away, in the order in which they may come.

        With very many the order is kept for a moment, because making it takes longer than all else.
        """
        state, ranking, queues = self._state, self._ranking, len(self._state.waitlist.queues)
        if queues <= RANKED_MANY or not ranking.is_fresh(now, queues):
            policy = state.policy
            cold = [queue for queue in state.waitlist.queues.values() if self.is_away(queue.model, now)]
            cold.sort(key=lambda queue: policy.rank(queue, now))
            later = (queue.deadline_at for queue in cold if queue.deadline_at > now)
            ranking.models, ranking.made_at = [queue.model for queue in cold], now
            ranking.deadline_at = min(later, default=inf) if len(cold) > ASKED_IN_CROWD else inf
            state.oldest_cold = min((queue.oldest for queue in cold), default=inf)
        return ranking.models

    def is_away(self, model: ModelId, now: float) -> bool:
        """Neither ready nor on its way in or out, nor pausing."""
        record = self._state.models[model]
        if record.pausing is not None and now < record.retry_at:
            return False
        return not any(
            slot.is_serving or slot.is_going or slot.move is not None or slot.planned is not None
            for slot in self._state.slots_of(model)
            if slot.spec.revision == record.spec.revision and not slot.lost
        )

    def _ask_for(self, queue: Queue, cast: Cast, now: float) -> tuple[float, bool]:
        """Decide on the first of this queue, and on the next if that one left; and on those who want it asleep.

        Returns when to ask again, and whether anything has changed.
        """
        until, changed, first = inf, False, self._act.first_of(queue, now)
        while first is not None:
            plan = self._decide_on(first, None if changed else cast, now)
            changed = changed or not isinstance(plan, Wait)
            stays = first.id in self._state.waitlist and first.model == queue.model
            if stays and isinstance(plan, Wait):
                self._keep_devices(queue, plan, now)
                until = plan.until
            first = None if stays else self._act.first_of(queue, now)
        for waiter in list(queue.preparing.values()):
            plan = self._decide_on(waiter, None if changed else cast, now)
            changed = changed or not isinstance(plan, Wait)
            until = min(until, plan.until) if isinstance(plan, Wait) else until
        return until, changed

    def _decide_on(self, waiter: Waiter, cast: Cast | None, now: float) -> Plan:
        plan = decide(self._state, waiter, now, cast)
        self._act.carry_out(waiter, plan, now)
        return plan

    def _keep_devices(self, queue: Queue, plan: Wait, now: float) -> None:
        """Who has been late for as long again, and only needs time or the end of a move, has its devices kept.

        Not before: what is kept serves nobody, and smaller models could have been fitted in.
        """
        if 2 * queue.late_at - queue.oldest <= now and (plan.until < inf or self._state.moves):
            self._state.kept[queue.model] = plan.on

    @property
    def looks_at(self) -> float:
        """When the next round is due without anything happening."""
        return self._state.timers.get(_SWITCH, inf)

    def look_again_at(self, at: float, now: float) -> None:
        """Have a round then; infinity: only when something happens."""
        if at == self.looks_at:
            return
        if at == inf:
            self._stage.forget_timer(_SWITCH)
        else:
            self._stage.set_timer(_SWITCH, max(at, now), because("switch"))
