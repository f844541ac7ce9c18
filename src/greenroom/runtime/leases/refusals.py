"""What a lease can be given: the devices that are asked for, the memory there, and the errors that refuse it.

Owns these errors and their numbers. Never grants: the scheduler does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from greenroom.core.effects import RejectCode, Rejection
from greenroom.core.model import Claim, DeviceId, DeviceKind, SlotId
from greenroom.core.view import LedgerFacts, SchedulerView
from greenroom.errors import BadRequest, GreenroomError, LeaseDenied, LeaseTooLarge, ShuttingDown, StoreDown
from greenroom.leases.records import LeaseAsk
from greenroom.runtime.memory.devices import HOST

# The device that a name means; None if there is none.
DeviceNamed = Callable[[str], DeviceId | None]
# Waits until so much is really free, at most so long; returns what is missing then.
RoomFor = Callable[[Claim, float], Awaitable[Claim]]


class LeasableMemory:
    """The memory that leases can be given: by name, by the scheduler's ledger, and as it is really free."""

    def __init__(self, state: SchedulerView, device_named: DeviceNamed, room_for: RoomFor) -> None:
        self._state = state
        self.device_named = device_named
        self.room_for = room_for

    def claim_of(self, slot: SlotId) -> Claim:
        """What the scheduler gave this slot."""
        return self._state.slots[slot].claim

    def free_mib(self) -> dict[str, int]:
        """What leases can be given now: on each GPU, or on the host where there is none."""
        ledger = self._state.ledger
        free = ledger.free_mib(frozenset())
        return {str(device): max(0, free[device]) for device in _leasable(ledger)}

    def most_mib(self) -> dict[str, int]:
        """What leases could be given if every slot that may ever leave had left."""
        most = self._state.most_mib()
        return {str(device): max(0, most[device]) for device in _leasable(self._state.ledger)}


def _leasable(ledger: LedgerFacts) -> list[DeviceId]:
    return [one.id for one in ledger.devices.values() if one.kind is DeviceKind.GPU] or list(ledger.devices)


def devices_meant(ask: LeaseAsk, device_named: DeviceNamed) -> tuple[str, ...]:
    """The ids of the devices that this request names. Raises BadRequest."""
    meant = {name: device_named(name) for name in ask.devices}
    if unknown := [name for name, device in meant.items() if device is None]:
        raise BadRequest(f"There is no device {unknown[0]}; `greenroom gpus` lists them.", param="devices")
    if HOST in meant.values():
        raise BadRequest("A lease is for GPUs; the host's memory is not leased.", param="devices")
    devices = tuple(sorted({str(device) for device in meant.values()}))
    if devices and len(devices) < ask.gpus:
        raise BadRequest(f"{ask.gpus} GPUs are wanted and {len(devices)} named.", param="devices")
    return devices


# Models leave within seconds once they are idle; when they become idle is not known.
RETRY_AFTER_S = 5.0


def refusal(ask: LeaseAsk, rejection: Rejection, free_mib: Mapping[str, int]) -> GreenroomError:
    """The error that this rejection means to the caller of `acquire`."""
    match rejection.code:
        case RejectCode.TOO_LARGE if ask.gpus > len(free_mib):
            return _too_many(ask, len(free_mib), free_mib)
        case RejectCode.TOO_LARGE:
            return _too_much(ask, rejection.needs_mib, rejection.free_mib, free_mib)
        case RejectCode.SHUTTING_DOWN:
            return ShuttingDown("The gateway is shutting down; ask again when it is back.", retry_after_s=5.0)
        case RejectCode.STORE_DOWN:
            return StoreDown("The lease store does not answer; ask again.", retry_after_s=RETRY_AFTER_S)
        case _:
            return not_free(ask, free_mib)


def never_free(ask: LeaseAsk, most_mib: Mapping[str, int], free_mib: Mapping[str, int]) -> LeaseTooLarge | None:
    """The error of a request that no wait could satisfy; None if waiting may help."""
    most = sorted((mib for device, mib in most_mib.items() if not ask.devices or device in ask.devices), reverse=True)
    if ask.gpus > len(most):
        return _too_many(ask, len(most), free_mib)
    last = max(0, most[ask.gpus - 1])
    return _too_much(ask, ask.mib, last, free_mib) if ask.mib > last else None


def _too_many(ask: LeaseAsk, gpus: int, free_mib: Mapping[str, int]) -> LeaseTooLarge:
    return LeaseTooLarge(
        f"{_wanted(ask)} can never be had: there are {gpus}. Ask for fewer.", beside=_numbers(ask, free_mib)
    )


def _too_much(ask: LeaseAsk, needs_mib: int, most_mib: int, free_mib: Mapping[str, int]) -> LeaseTooLarge:
    return LeaseTooLarge(
        f"{_wanted(ask)} can never be had: {needs_mib:,} MiB are needed, at most {most_mib:,} MiB can be made free. "
        "Ask for less, or unpin a model.",
        beside=_numbers(ask, free_mib),
    )


def not_free(ask: LeaseAsk, free_mib: Mapping[str, int]) -> LeaseDenied:
    shown = ", ".join(f"{device} has {mib:,} MiB free" for device, mib in free_mib.items()) or "there is no GPU"
    waited = f"not free within {ask.wait_s:g} s" if ask.wait_s else "not free now"
    return LeaseDenied(
        f"{_wanted(ask)}: {waited}; {shown}. Wait longer, ask for less, or unload a model.",
        retry_after_s=RETRY_AFTER_S,
        beside=_numbers(ask, free_mib),
    )


def not_written(ask: LeaseAsk, error: OSError) -> LeaseDenied:
    return LeaseDenied(
        f"{_wanted(ask)} could be had, but cannot be written down in the state directory "
        f"({error.strerror or error}), so it would not survive a restart. Make room there and ask again.",
        retry_after_s=30.0,
    )


def _wanted(ask: LeaseAsk) -> str:
    where = f" on each of {ask.gpus} GPUs" if ask.gpus > 1 else ""
    return f"{ask.mib:,} MiB{where} for {ask.name}"


def _numbers(ask: LeaseAsk, free_mib: Mapping[str, int]) -> dict[str, object]:
    return {"needed_mib": ask.mib, "gpus": ask.gpus, "free_mib": dict(free_mib)}
