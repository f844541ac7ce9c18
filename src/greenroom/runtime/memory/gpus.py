"""Which GPUs an engine may see at a start: those it was given, and no others where it is known what it needs.

Never decides where a slot goes; the claim says that already.
"""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.model import Claim, Device, DeviceId, DeviceKind
from greenroom.runtime.catalogue import Entry


def visible_gpus(entry: Entry, claim: Claim, devices: Iterable[Device]) -> tuple[DeviceId, ...] | None:
    """In the order of the claim. None: there are no GPUs to plan with, and nothing is to be said about them."""
    gpus = [device.id for device in devices if device.kind is DeviceKind.GPU]
    if not gpus:
        return None
    # 1. What it was given.
    if claimed := tuple(device for device in claim if device in gpus):
        return claimed
    # 2. Nobody knows what it needs: it may use what the operator allows, is measured there, and fitted the next time.
    if _is_unknown(entry, claim):
        return tuple(gpu for gpu in gpus if not entry.spec.devices or gpu in entry.spec.devices)
    # 3. It is known to need none.
    return ()


def _is_unknown(entry: Entry, claim: Claim) -> bool:
    """Also where host memory alone is known: a program may have been measured when it had no GPU to use."""
    config = entry.config
    if config.device == "cpu" or config.memory_mib == 0:
        return False
    return not claim or (config.engine == "command" and config.memory_mib is None)
