"""GPUs, host memory and the green room as the management API shows them.

Owns the route, its published shapes, and how they are filled from the last look at memory and the scheduler's ledger.
"""

from __future__ import annotations

from fastapi import FastAPI

from greenroom.core.model import DeviceId, DeviceKind, MoveKind, Tier
from greenroom.core.view import SchedulerView, SlotFacts
from greenroom.runtime.leases.entry import core_id
from greenroom.runtime.memory.readings import GpuReading
from greenroom.runtime.memory.watch import MemoryLook
from greenroom.server.admin.gateway import Gateway, WatchedMemory
from greenroom.server.admin.views import GpuView, GreenRoomView, ProbeView, View

PATH = "/api/v1/gpus"
# A look this recent is shown again.
FRESH_S = 0.5
LEASE_WORD = core_id("")
_TO_SLEEP = (MoveKind.SLEEP, MoveKind.PREPARE)


class GpuHolderView(View):
    """A model or a lease that holds memory of this GPU."""

    slot: str
    model: str | None
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


class Gpus:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.get(PATH)(self.list_gpus)

    async def list_gpus(self) -> GpuList:
        """Every GPU now: the driver's figures, what models and leases hold, and what other processes use."""
        gateway = self._gateway
        if gateway.clock() - gateway.memory_watch.last.at > FRESH_S:
            await gateway.memory_watch.look_now()
        return GpuPicture(gateway.memory_watch, gateway.loop.scheduler.view, gateway.clock()).whole()


class GpuPicture:
    """The GPUs as they were at the last look, with what the scheduler plans there now."""

    def __init__(self, watched: WatchedMemory, state: SchedulerView, now: float) -> None:
        self._watched = watched
        self._look: MemoryLook = watched.last
        self._state = state
        self._now = now
        self._free = state.ledger.free_mib(frozenset())

    def probe(self) -> ProbeView:
        return ProbeView.model_validate(
            {
                "kind": self._watched.kind,
                "looked_s_ago": round(max(0.0, self._now - self._look.at), 3),
                "failure": self._watched.failure,
                "pids_visible": self._watched.sees_pids,
            }
        )

    def gpus(self) -> list[GpuView]:
        return [GpuView.model_validate(self._figures(gpu)) for gpu in self._look.reading.gpus]

    def whole(self) -> GpuList:
        host = self._look.reading.host
        return GpuList(
            probe=self.probe(),
            gpus=[
                WholeGpuView.model_validate(
                    {**self._figures(gpu), "holders": self._holders(gpu.uuid), "strangers": self._strangers(gpu.uuid)}
                )
                for gpu in self._look.reading.gpus
            ],
            host=HostMemoryView(
                total_mib=host.total_mib,
                available_mib=host.available_mib,
                shm_total_mib=host.shm_total_mib,
                shm_free_mib=host.shm_free_mib,
            ),
        )

    def _figures(self, gpu: GpuReading) -> dict[str, object]:
        device = DeviceId(gpu.uuid)
        return {
            "id": gpu.uuid,
            "index": gpu.index,
            "name": gpu.name,
            "total_mib": gpu.total_mib,
            "used_mib": gpu.used_mib,
            "foreign_mib": self._state.ledger.foreign.get(device, 0),
            "free_mib": max(0, self._free.get(device, 0)),
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
