"""Takes in a changed configuration: new models, new revisions, changed specs, removed models, promoted versions.

Owns the reaction to `ConfigChanged` and `VersionPromoted`. A slot of the current revision keeps running, one of an old
revision drains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from greenroom.core.apply import Actions, preload_id
from greenroom.core.decide.plan import Refuse
from greenroom.core.effects import RejectCode, because
from greenroom.core.events import ConfigChanged, Limits, Timer, TimerKind, VersionPromoted
from greenroom.core.model import Device, DeviceId, DeviceKind, ModelId, ModelSpec, Need, Tier
from greenroom.core.policy.base import Pacing, Policy
from greenroom.core.slots import SlotWriter
from greenroom.core.state import ModelRecord, State

Rules = Callable[[Limits], Policy]


class Configuration:
    def __init__(self, state: State, slots: SlotWriter, act: Actions, rules: Rules) -> None:
        self._state = state
        self._slots = slots
        self._act = act
        self._rules = rules

    def changed(self, event: ConfigChanged) -> None:
        state = self._state
        if event.limits is not None:
            self._take_over(event.limits)
        if event.devices is not None:
            self._set_devices(event.devices)
        for spec in event.models:
            self._put(spec, event.now)
        for model, need in (event.needs or {}).items():
            self._set_need(model, need)
        # Their waiters turn to other candidates, as these are from now on.
        for model in event.removed:
            self._remove(model, event.now)
        for model, learned in (event.learned or {}).items():
            if record := state.models.get(model):
                record.learned_s.update(learned.moves_s)
                if learned.service_s is not None and record.service_s is None:
                    record.answered(learned.service_s)

    def _set_devices(self, devices: Iterable[Device]) -> None:
        """Where the first GPU comes or the last one goes, what has not started yet is planned anew."""
        ledger = self._state.ledger
        had_gpus = _has_gpus(ledger.devices)
        ledger.set_devices(devices)
        if had_gpus != _has_gpus(ledger.devices):
            for slot in list(ledger.promises):
                self._slots.call_off(self._state.slots[slot])

    def _set_need(self, model: ModelId, need: Need) -> None:
        """The need of its next load. Existing slots keep their claims."""
        record = self._state.models.get(model)
        if record is not None:
            record.need = need
            self._state.price_queue(model)

    def _take_over(self, limits: Limits) -> None:
        """Change the policy or its numbers. Waiters keep waiting, under the new rules."""
        state = self._state
        state.limits, state.policy, state.pacing = limits, self._rules(limits), Pacing(limits)
        state.accounts.weights = limits.tenant_weights
        state.waitlist.reclassify(state.policy.priority_class)
        for model in state.waitlist.queues:
            state.price_queue(model)

    def _remove(self, model: ModelId, now: float) -> None:
        record = self._state.models.get(model)
        if record is None:
            return
        self._slots.forget_timer(Timer(TimerKind.RETRY, model))
        self._act.reject_waiters(model, Refuse(RejectCode.REMOVED), now)
        self._state.drop_model(model)
        for slot in list(self._state.slots_of(model)):
            self._slots.leave(slot, Tier.COLD, record.spec.grace_s, because("removed", model=model), now)

    def _put(self, spec: ModelSpec, now: float) -> None:
        record = self._state.models.get(spec.id)
        was_preloaded = record is not None and record.spec.preload
        if record is not None and record.spec.revision == spec.revision:
            self._relabel(record, spec, now)
        else:
            self._renew(record, spec, now)
            was_preloaded = False
        if not spec.preload:
            self._act.forget(preload_id(spec.id))
        elif not was_preloaded:
            self._act.preload(spec.id, now)

    def _relabel(self, record: ModelRecord, spec: ModelSpec, now: float) -> None:
        """Take over a spec that needs no new process."""
        if record.spec.need != spec.need:
            record.need = spec.need
        record.preload_again = record.preload_again and spec.preload
        is_held, record.spec = spec.held and not record.spec.held, spec
        for slot in list(self._state.slots_of(spec.id)):
            if slot.spec.revision == spec.revision:
                self._slots.relabel(slot, spec)
                if is_held:
                    to = Tier.ASLEEP if slot.can_sleep else Tier.COLD
                    self._slots.retire(slot, to, because("held", model=spec.id), now)

    def _renew(self, old: ModelRecord | None, spec: ModelSpec, now: float) -> None:
        """A new process is needed. What was learned about the old revision is the best estimate for the new one."""
        record = ModelRecord(spec, spec.need, since=now)
        if old is not None:
            record.inherit(old)
            self._slots.forget_timer(Timer(TimerKind.RETRY, spec.id))
        self._state.add_model(record)
        for slot in list(self._state.slots_of(spec.id)):
            self._slots.leave(slot, Tier.COLD, spec.grace_s, because("new_revision", model=spec.id), now)

    # --- versions ---------------------------------------------------------------------------------------------------

    def promoted(self, event: VersionPromoted) -> None:
        """The coming version takes the model's name. Answers that were granted before end on the old slots, uncut."""
        state, spec, now = self._state, event.spec, event.now
        coming = state.models.get(event.coming)
        if coming is None or coming.spec.version_of != spec.id:
            state.counters.ignored += 1
            return
        self._act.reject_waiters(event.coming, Refuse(RejectCode.REMOVED), now)
        state.drop_model(event.coming)
        record, old = ModelRecord(spec, coming.need), state.models.get(spec.id)
        if old is not None:
            record.inherit(old)
            record.learned_s.update(coming.learned_s)
        else:
            record.inherit(coming)
        for model in (event.coming, spec.id):
            self._slots.forget_timer(Timer(TimerKind.RETRY, model))
        for slot in list(state.slots_of(spec.id)):
            self._slots.retire(slot, Tier.COLD, because("new_version", model=spec.id), now)
        state.add_model(record)
        for slot in list(state.slots_of(event.coming)):
            self._slots.adopt(slot, spec, state.waitlist.count(spec.id), now)
        state.price_queue(spec.id)
        if spec.preload:
            self._act.preload(spec.id, now)
        else:
            self._act.forget(preload_id(spec.id))


def _has_gpus(devices: Mapping[DeviceId, Device]) -> bool:
    return any(device.kind is DeviceKind.GPU for device in devices.values())
