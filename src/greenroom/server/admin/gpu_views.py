"""What the management API says of GPUs, as published shapes, and how a look at them becomes these.

Owns names and meaning of fields. Reads the last look and the scheduler's ledger; never looks itself.
"""

from __future__ import annotations

from greenroom.core.model import DeviceId, Slot
from greenroom.core.state import State
from greenroom.runtime.leases.entry import core_id
from greenroom.runtime.memory.probes.base import GpuReading
from greenroom.runtime.memory.watch import Look
from greenroom.server.admin.gateway import Watched
from greenroom.server.admin.views import GpuView, ProbeView, View

LEASE_WORD = core_id("")


class GpuHolderView(View):
    """A model or a lease that holds memory of this GPU."""

    slot: str
    model: str | None
    lease: str | None
    claim_mib: int
    seen_mib: int | None
    """What its processes were seen to use; null where none was seen."""


class StrangerView(View):
    """A process nobody declared. It is never ended by us."""

    pid: int
    name: str | None
    used_mib: int


class WholeGpuView(GpuView):
    holders: list[GpuHolderView]
    strangers: list[StrangerView]
    """Those that can be seen, the largest first."""


class HostMemoryView(View):
    total_mib: int
    """Of the machine, or of the container it is limited to."""
    available_mib: int
    shm_total_mib: int
    shm_free_mib: int
    """In /dev/shm."""


class GpuList(View):
    probe: ProbeView
    gpus: list[WholeGpuView]
    host: HostMemoryView


class GpuPicture:
    """The GPUs as they were at the last look, with what the scheduler plans there now."""

    def __init__(self, watched: Watched, state: State, now: float) -> None:
        self._watched = watched
        self._look: Look = watched.last
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

    def _holder(self, slot: Slot, device: DeviceId) -> GpuHolderView:
        return GpuHolderView(
            slot=slot.id,
            model=slot.model if slot.lease is None else None,
            # The scheduler's id of a lease has a word before the one its holder knows.
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
