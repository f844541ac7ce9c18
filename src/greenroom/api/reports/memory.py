"""GPUs, host memory, caches and the green room as the management API shows them.

Owns the route, its published shapes, and how they are filled from the last look at memory and the scheduler's ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from greenroom.access.keys import Permission
from greenroom.api.declared import Routes, get
from greenroom.api.overview import Overview
from greenroom.api.views import CacheView, GpuView, GreenRoomView, ModelName, ProbeView, View
from greenroom.core.model import DeviceId, DeviceKind, MoveKind, Tier
from greenroom.core.view import SchedulerView, SlotFacts
from greenroom.engines.estimates.estimate import MIB
from greenroom.engines.estimates.estimate import mib as mib_of
from greenroom.leases.records import core_id
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.memory.readings import SIMULATED, GpuReading
from greenroom.runtime.shell import Shell
from greenroom.runtime.slots import LiveSlots

PATH = "/api/v1/gpus"
# A look this recent is shown again.
FRESH_S = 0.5
LEASE_WORD = core_id("")
_TO_SLEEP = (MoveKind.SLEEP, MoveKind.PREPARE)


class GpuHolderView(View):
    """A model or a lease that holds memory of this GPU."""

    slot: str
    model: ModelName | None
    lease: str | None
    claim_mib: int
    seen_mib: int | None
    """What its processes were seen to use; null where none was seen."""


class StrangerView(View):
    """A process that belongs to no model and no lease. The gateway never ends it."""

    pid: int
    name: str | None
    used_mib: int


class WholeGpuView(GpuView):
    holders: list[GpuHolderView]
    strangers: list[StrangerView]
    """Visible ones, the largest first."""


class HostMemoryView(View):
    total_mib: int
    """Of the machine, or of the container's limit."""
    available_mib: int
    shm_total_mib: int
    shm_free_mib: int
    """In /dev/shm."""


class GpuList(View):
    probe: ProbeView
    gpus: list[WholeGpuView]
    host: HostMemoryView


class Gpus(Routes):
    def __init__(self, gateway: Overview) -> None:
        self._gateway = gateway

    @get(PATH, needs=Permission.READ)
    async def list_gpus(self) -> GpuList:
        """Every GPU now: the driver's figures, what models and leases hold, and what other processes use."""
        watch = self._gateway.memory_watch
        if self._gateway.shell.clock() - watch.last.at > FRESH_S:
            await watch.look_now()
        return GpuPicture(self._gateway).whole()


class GpuPicture:
    """The GPUs as they were at the last look, with what the scheduler plans there now."""

    def __init__(self, gateway: Overview) -> None:
        self._gateway = gateway
        self._watched = gateway.memory_watch
        self._look = gateway.memory_watch.last
        self._state = state = gateway.shell.loop.scheduler.view
        self._split = memory_split(gateway)
        self._free = state.ledger.free_mib(frozenset())

    def probe(self) -> ProbeView:
        return ProbeView.model_validate(
            {
                "kind": self._watched.kind,
                "looked_s_ago": round(max(0.0, self._gateway.shell.clock() - self._look.at), 3),
                "failure": self._watched.failure,
                "pids_visible": self._watched.sees_pids,
            }
        )

    def gpus(self) -> list[GpuView]:
        return [GpuView.model_validate(self._figures(gpu)) for gpu in self._look.reading.gpus]

    def whole(self) -> GpuList:
        return GpuList(
            probe=self.probe(),
            gpus=[
                WholeGpuView.model_validate(
                    {**self._figures(gpu), "holders": self._holders(gpu.uuid), "strangers": self._strangers(gpu.uuid)}
                )
                for gpu in self._look.reading.gpus
            ],
            host=HostMemoryView.model_validate(self._look.reading.host, from_attributes=True),
        )

    def _figures(self, gpu: GpuReading) -> dict[str, object]:
        device = DeviceId(gpu.uuid)
        return {
            "id": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name,
            "total_mib": gpu.total_mib,
            "used_mib": gpu_used_mib(self._gateway, gpu),
            "foreign_mib": self._state.ledger.foreign.get(device, 0),
            "free_mib": max(0, self._free.get(device, 0)),
            **asdict(self._split[device]),
            "utilisation": gpu.utilisation,
            "temperature_c": gpu.temperature_c,
        }

    def _holders(self, uuid: str) -> list[GpuHolderView]:
        device, holdings = DeviceId(uuid), self._state.ledger.holdings
        held = [slot for slot in self._state.slots.values() if slot.id in holdings and holdings[slot.id].on(device)]
        return [self._holder(slot, device) for slot in held]

    def _holder(self, slot: SlotFacts, device: DeviceId) -> GpuHolderView:
        return GpuHolderView(
            slot=slot.id,
            model=slot.model if slot.lease is None else None,
            # The scheduler's id of a lease is the holder's id with a prefix.
            lease=None if slot.lease is None else slot.lease.removeprefix(LEASE_WORD),
            claim_mib=self._state.ledger.holdings[slot.id].claim.get(device, 0),
            seen_mib=self._look.shares.seen.get(slot.id, {}).get(device),
        )

    def _strangers(self, uuid: str) -> list[StrangerView]:
        by_pid = self._look.shares.strangers.get(DeviceId(uuid), {})
        return [
            StrangerView(pid=pid, name=self._look.names.get(pid), used_mib=mib)
            for pid, mib in sorted(by_pid.items(), key=lambda use: (-use[1], use[0]))
        ]


def gpu_used_mib(gateway: Overview, gpu: GpuReading) -> int:
    """MiB that all processes use of it. No process uses a simulated GPU: there it is what models and leases hold."""
    if gateway.memory_watch.kind != SIMULATED:
        return gpu.used_mib
    holdings = gateway.shell.loop.scheduler.view.ledger.holdings.values()
    return sum(holding.on(DeviceId(gpu.uuid)) for holding in holdings)


def green_room_view(state: SchedulerView) -> GreenRoomView:
    sleepers = [slot for slot in state.slots.values() if slot.lease is None and _is_there(slot)]
    size_mib, used_mib = state.limits.green_room_mib, green_room_used_mib(state)
    return GreenRoomView(
        size_mib=size_mib,
        used_mib=used_mib,
        free_mib=_free_mib(state, size_mib, used_mib),
        models=sorted({slot.model for slot in sleepers if slot.tier is Tier.ASLEEP}),
    )


def green_room_used_mib(state: SchedulerView) -> int:
    """Host MiB of slots that are asleep, falling asleep or waking."""
    return sum(_host_mib(state, slot) for slot in state.slots.values() if slot.lease is None and _is_there(slot))


def _is_there(slot: SlotFacts) -> bool:
    return slot.tier is Tier.ASLEEP or (slot.move is not None and slot.move.kind in _TO_SLEEP)


def _host_mib(state: SchedulerView, slot: SlotFacts) -> int:
    devices, held = state.ledger.devices, state.ledger.held_by(slot.id)
    return sum(mib for on, mib in held.items() if on in devices and devices[on].kind is DeviceKind.HOST)


def _free_mib(state: SchedulerView, size_mib: int | None, used_mib: int) -> int | None:
    """What is left of its size, or of the hosts' memory if that is less; None without a host to plan with."""
    free = state.ledger.free_mib(frozenset())
    hosts = [device.id for device in state.ledger.devices.values() if device.kind is DeviceKind.HOST]
    if not hosts:
        return None
    on_hosts = max(0, sum(free[host] for host in hosts))
    return on_hosts if size_mib is None else min(on_hosts, max(0, size_mib - used_mib))


# --- what the memory of GPUs is used for ------------------------------------------------------------------------------


@dataclass(slots=True)
class GpuSplit:
    """MiB of one GPU: weights and KV caches as far as engines let them be known, and all other use."""

    weights_mib: int = 0
    kv_mib: int = 0
    other_mib: int = 0


def memory_split(gateway: Overview) -> dict[DeviceId, GpuSplit]:
    """By GPU. Figures of models are planned ones; `other` is what remains of what is used."""
    shell, gpus = gateway.shell, gateway.memory_watch.last.reading.gpus
    found = {DeviceId(gpu.uuid): GpuSplit() for gpu in gpus}
    for slot in shell.loop.scheduler.view.slots.values():
        if slot.lease is None and slot.tier is Tier.READY:
            for device, weights_mib, kv in _parts_of(shell, slot, found):
                found[device].weights_mib += weights_mib
                found[device].kv_mib += kv
    for gpu in gpus:
        split = found[DeviceId(gpu.uuid)]
        split.other_mib = max(0, gpu_used_mib(gateway, gpu) - split.weights_mib - split.kv_mib)
    return found


def kv_mib(shell: Shell, entry: Entry) -> int | None:
    """MiB of its KV cache, on GPUs or the host, of all slots that are ready; None if it is not known."""
    slots = [slot for slot in shell.loop.scheduler.view.slots_of(entry.id) if slot.tier is Tier.READY]
    sizes = [_kv_of(shell, entry, slot) for slot in slots]
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def kv_bytes(shell: Shell, entry: Entry, tokens: int | None) -> int | None:
    """What so many tokens take of its KV cache, as planned; None if that is not known."""
    estimate = shell.catalog.needs.account_of(entry).estimate if shell.catalog.fits_memory else None
    if tokens is None or estimate is None or not estimate.kv_tokens:
        return None
    planned_mib = sum(part.gpu_mib + part.host_mib for part in estimate.parts if part.is_kv)
    return planned_mib * MIB * tokens // estimate.kv_tokens


def _parts_of(shell: Shell, slot: SlotFacts, gpus: dict[DeviceId, GpuSplit]) -> Iterator[tuple[DeviceId, int, int]]:
    """Weights and KV cache of a slot on each of its GPUs, shared out as its memory is."""
    entry = shell.catalog.find(slot.model)
    held = {device: mib for device, mib in shell.loop.scheduler.view.ledger.held_by(slot.id).items() if device in gpus}
    estimate = (
        None if entry is None or not shell.catalog.fits_memory else shell.catalog.needs.account_of(entry).estimate
    )
    if entry is None or estimate is None or not sum(held.values()):
        return
    weights_mib = sum(part.gpu_mib for part in estimate.parts if part.is_weights)
    kv = _kv_of(shell, entry, slot) or 0
    for device, mib in held.items():
        share = mib / sum(held.values())
        yield device, min(mib, int(weights_mib * share)), min(mib, int(kv * share))


def _kv_of(shell: Shell, entry: Entry, slot: SlotFacts) -> int | None:
    """MiB of a slot's KV cache: as its engine tells, by bytes or by tokens, else as planned; None if unknown."""
    live = shell.slots.live.get(slot.id)
    told = None if live is None else live.figures
    if told is not None and told.kv_bytes is not None:
        return mib_of(told.kv_bytes)
    estimate = shell.catalog.needs.account_of(entry).estimate if shell.catalog.fits_memory else None
    if estimate is None or not any(part.is_kv for part in estimate.parts):
        return None
    planned_mib = sum(part.gpu_mib + part.host_mib for part in estimate.parts if part.is_kv)
    if told is not None and told.kv_tokens is not None and estimate.kv_tokens:
        return round(planned_mib * told.kv_tokens / estimate.kv_tokens)
    known = shell.loop.scheduler.view.ledger.devices.values()
    on_gpus = [device.id for device in known if device.kind is DeviceKind.GPU]
    held_mib = sum(slot.claim.get(device, 0) for device in on_gpus)
    if entry.facts.fills_claim and held_mib:
        # Its cache takes what the rest leaves of its claim.
        return max(0, held_mib - sum(part.gpu_mib for part in estimate.parts if not part.is_kv))
    return planned_mib


def cache_view(live: LiveSlots, slots: Sequence[SlotFacts]) -> CacheView | None:
    """The figures of all slots of a model together; None if none has any."""
    found = [live.live[slot.id].figures for slot in slots if slot.id in live.live]
    told = [figures for figures in found if figures is not None]
    if not told:
        return None
    return CacheView(
        kv_used=max(one.kv_used for one in told),
        prefix_queries=_sum_of(one.prefix_queries for one in told),
        prefix_hits=_sum_of(one.prefix_hits for one in told),
        kv_tokens=_sum_of(one.kv_tokens for one in told),
    )


def _sum_of(figures: Iterable[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None
