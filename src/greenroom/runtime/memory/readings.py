"""Readings of memory: each GPU with the processes on it, and the host; and to which owner that memory is attributed.

Owns the records of a reading, the protocol `Probe`, and the reading of this host: /proc/meminfo, cgroups, /dev/shm and
single processes. In a container the limit of its cgroup counts. `HostProbe` never raises: what cannot be read counts as
not limited, or as absent. The probes of simulated GPUs and of none look at the host alone, so they are here too.
`devices.py` says which GPUs to plan with.

`attribute` shares used GPU memory out among our slots, leases and strangers: pure arithmetic on one reading. Where
processes cannot be seen, use beyond all declared claims counts as strangers'.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from greenroom.config.schema import Gpu
from greenroom.core.model import Claim, DeviceId

BYTES_A_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU. `index` is its number in the order of the PCI bus, as NVML counts."""

    uuid: str
    index: int
    name: str
    total_mib: int
    used_mib: int
    processes: Mapping[int, int] | None  # MiB by pid. None: processes cannot be seen (permissions, a container).
    utilisation: int | None = None  # Percent of time in which something ran on it.
    temperature_c: int | None = None


@dataclass(frozen=True, slots=True)
class HostReading:
    """This machine's memory, or what its container may use of it; and its shared memory (/dev/shm)."""

    total_mib: int
    available_mib: int
    shm_total_mib: int
    shm_free_mib: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One look."""

    gpus: tuple[GpuReading, ...]
    host: HostReading

    def gpu(self, uuid: str) -> GpuReading | None:
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


class Probe(Protocol):
    @property
    def kind(self) -> str:
        """The source of its figures: nvml, file, simulated or none."""

    def look(self) -> Reading:
        """Read everything now. Blocks, so it is called in a thread. Raises ProbeFailed."""
        ...

    def glance(self, uuid: str) -> GpuReading | None:
        """The memory of one GPU now, as quickly as possible; None if there is no such GPU. Blocks and raises as `look`
        does, and may run at the same time."""
        return self.look().gpu(uuid)

    def close(self) -> None:
        """Release what it holds. It is not used again."""
        return


def named(gpus: Sequence[GpuReading], word: str) -> GpuReading | None:
    """The GPU with this index, UUID or beginning of a UUID; None if there is none, or more than one."""
    if word.isascii() and word.isdigit():
        meant = [gpu for gpu in gpus if gpu.index == int(word)]
    else:
        meant = [gpu for gpu in gpus if gpu.uuid == word] or [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
    return meant[0] if len(meant) == 1 else None


KIB_A_MIB = 1024
# A path in a cgroup's tree is not longer than this.
CGROUP_DEPTH_MAX = 32
_CACHED = ("inactive", "active")


@dataclass(frozen=True, slots=True)
class HostProbe:
    """Where to look. Tests look at files of their own."""

    proc: Path = Path("/proc")
    cgroups: Path = Path("/sys/fs/cgroup")
    shm: Path = Path("/dev/shm")

    def look(self) -> HostReading:
        total, available = self._machine_bytes()
        for limit, used in self._limits():
            total = min(total, limit)
            available = min(available, max(0, limit - used))
        shm_total, shm_free = self._shm_bytes()
        return HostReading(*(size // BYTES_A_MIB for size in (total, available, shm_total, shm_free)))

    def used_mib(self, pids: Iterable[int]) -> int:
        """What the processes of one engine use together: pages that they may share count once."""
        own, shared = 0, 0
        for pid in pids:
            sizes = _sizes_kib(self.proc / str(pid) / "status")
            own += sizes.get("RssAnon", 0)
            shared = max(shared, sizes.get("RssFile", 0) + sizes.get("RssShmem", 0))
        return (own + shared) // KIB_A_MIB

    def _machine_bytes(self) -> tuple[int, int]:
        sizes = _sizes_kib(self.proc / "meminfo")
        physical_kib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // KIB_A_MIB
        total_kib = sizes.get("MemTotal", physical_kib)
        return total_kib * KIB_A_MIB, sizes.get("MemAvailable", total_kib) * KIB_A_MIB

    def _shm_bytes(self) -> tuple[int, int]:
        try:
            shm = os.statvfs(self.shm)
        except OSError:
            return 0, 0
        return shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail

    # --- cgroups ----------------------------------------------------------------------------------------------------

    def _limits(self) -> Iterator[tuple[int, int]]:
        """Limit and use, in bytes, of our cgroup and of those above it, wherever one has a limit."""
        for folder, limit_names, used_name, cache_prefix in self._groups():
            limits = [limit for name in limit_names if (limit := _number(folder / name)) is not None]
            if limits:
                # The page cache is freed when memory is needed, including files that were read twice, as weights are,
                # which the kernel calls active. Files in tmpfs are in neither count.
                cached = sum(_field(folder / "memory.stat", f"{cache_prefix}{kind}_file") for kind in _CACHED)
                yield min(limits), max(0, (_number(folder / used_name) or 0) - cached)

    def _groups(self) -> Iterator[tuple[Path, tuple[str, ...], str, str]]:
        for line in _text(self.proc / "self" / "cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                for folder in _and_above(self.cgroups, path):
                    # Above `high` nothing is refused, but every allocation is slowed down.
                    yield folder, ("memory.max", "memory.high"), "memory.current", ""
            elif "memory" in controllers.split(","):
                for folder in _and_above(self.cgroups / "memory", path):
                    yield folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"


THIS_MACHINE = HostProbe()

# The kind of a probe that measures nothing: no process uses its GPUs.
SIMULATED: Final = "simulated"


@dataclass(frozen=True, slots=True)
class SimulatedProbe(Probe):
    """The GPUs under `gpus` in the configuration, called gpu0, gpu1 …"""

    gpus: tuple[Gpu, ...]
    host: HostProbe = THIS_MACHINE
    kind: str = SIMULATED

    def look(self) -> Reading:
        seen = (
            GpuReading(f"gpu{index}", index, "simulated", gpu.memory_mib, 0, {}) for index, gpu in enumerate(self.gpus)
        )
        return Reading(tuple(seen), self.host.look())


@dataclass(frozen=True, slots=True)
class NoProbe(Probe):
    """No GPUs: there are none, or they must not be used. `why` says which, for the log."""

    why: str = ""
    host: HostProbe = THIS_MACHINE
    kind: str = "none"

    def look(self) -> Reading:
        return Reading((), self.host.look())


def _and_above(root: Path, path: str) -> Iterator[Path]:
    """This cgroup and all above it. The root is included: in a container our cgroup is often mounted there."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..")][:CGROUP_DEPTH_MAX]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _number(path: Path) -> int | None:
    """The number in this file; None if it says "max", or there is no such file."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _field(path: Path, name: str) -> int:
    """The number of the line "name number"; 0 if there is none."""
    for line in _text(path).splitlines():
        said, _, number = line.partition(" ")
        if said == name and number.isdigit():
            return int(number)
    return 0


def _sizes_kib(path: Path) -> dict[str, int]:
    """The lines "name: number kB"."""
    sizes = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            sizes[name] = int(number)
    return sizes


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- the owners of memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Owner:
    """A slot, a lease or a worker that was given memory.

    `roots` are pids: these processes and their descendants belong to it. `held` is what it was last seen to use, or its
    claim if that was never measured. A `hidden` owner runs where its processes look like strangers' (a container of a
    daemon). `claim` is what it was given; owners with the same process share its use by their claims. An owner that
    `is_host` is a process in which others live: they name it as `host`, and `told` is what it says that each holds.
    """

    held: Claim
    roots: frozenset[int] = frozenset()
    hidden: bool = False
    claim: Claim = field(default_factory=dict)
    is_host: bool = False
    host: str | None = None
    told: Claim = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attribution:
    foreign_mib: Mapping[DeviceId, int] = field(default_factory=dict)
    seen: Mapping[str, Claim] = field(default_factory=dict)  # By owner; only devices where its processes were seen.
    strangers: Mapping[DeviceId, Mapping[int, int]] = field(default_factory=dict)  # MiB by pid.
    unseen: frozenset[DeviceId] = frozenset()  # Devices that show no processes.
    # What workers use beyond what they say that their slots hold.
    own_mib: Mapping[DeviceId, int] = field(default_factory=dict)


def attribute(reading: Reading, owners: Mapping[str, Owner], owner_of: Mapping[int, str]) -> Attribution:
    """`owner_of` names the owner of each pid; all other pids are strangers."""
    foreign: dict[DeviceId, int] = {}
    strangers: dict[DeviceId, Mapping[int, int]] = {}
    seen: dict[str, dict[DeviceId, int]] = {owner: {} for owner in owners}
    for gpu in reading.gpus:
        device = DeviceId(gpu.uuid)
        if gpu.processes is None:
            foreign[device] = max(0, gpu.used_mib - sum(owner.held.get(device, 0) for owner in owners.values()))
            continue
        ours = {pid: owner_of[pid] for pid in gpu.processes if owner_of.get(pid) in owners}
        for pid, owner in ours.items():
            seen[owner][device] = seen[owner].get(device, 0) + gpu.processes[pid]
        strangers[device] = {pid: mib for pid, mib in gpu.processes.items() if pid not in ours}
        foreign[device] = _foreign_mib(gpu, sum(strangers[device].values()), _hidden_mib(device, owners, seen))
    for group in _with_the_same_roots(owners):
        _share(group, owners, seen)
    own = _own_mib(owners, seen)
    unseen = frozenset(DeviceId(gpu.uuid) for gpu in reading.gpus if gpu.processes is None)
    return Attribution(foreign, {owner: _sorted(claim) for owner, claim in seen.items()}, strangers, unseen, own)


def _own_mib(owners: Mapping[str, Owner], seen: dict[str, dict[DeviceId, int]]) -> dict[DeviceId, int]:
    """Attribute the use of workers: to their slots what the worker says, and the rest to the worker itself."""
    own: dict[DeviceId, int] = {}
    for guest, owner in owners.items():
        if owner.host is not None:
            seen[guest] = dict(owner.told)
    for name in [name for name, owner in owners.items() if owner.is_host]:
        guests = [owner for owner in owners.values() if owner.host == name]
        for device, mib in seen.pop(name).items():
            said_mib = sum(guest.told.get(device, 0) for guest in guests)
            own[device] = own.get(device, 0) + max(0, mib - said_mib)
    return own


def _with_the_same_roots(owners: Mapping[str, Owner]) -> list[list[str]]:
    """Owners that share a process: a program may hold several leases, and its use of each cannot be seen."""
    groups: dict[frozenset[int], list[str]] = {}
    for name, owner in owners.items():
        if owner.roots:
            groups.setdefault(owner.roots, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _share(group: Sequence[str], owners: Mapping[str, Owner], seen: dict[str, dict[DeviceId, int]]) -> None:
    """Attribute the use of one process to each owner up to its claim, and the rest to the last owner."""
    for device in {device for name in group for device in seen[name]}:
        left = sum(seen[name].pop(device, 0) for name in group)
        *others, last = [name for name in group if owners[name].claim.get(device)] or [group[-1]]
        for name in others:
            seen[name][device] = min(left, owners[name].claim[device])
            left -= seen[name][device]
        seen[last][device] = left


def _foreign_mib(gpu: GpuReading, strangers_mib: int, hidden_mib: int) -> int:
    """Use that no visible process explains counts as strangers' too: another container, or a process that ends."""
    assert gpu.processes is not None
    ours_mib = sum(gpu.processes.values()) - strangers_mib
    return max(0, max(strangers_mib, gpu.used_mib - ours_mib) - hidden_mib)


def _hidden_mib(device: DeviceId, owners: Mapping[str, Owner], seen: Mapping[str, Claim]) -> int:
    """What hidden owners hold here: it must not count as strangers' too."""
    return sum(owner.held.get(device, 0) for name, owner in owners.items() if owner.hidden and device not in seen[name])


def _sorted(claim: Claim) -> Claim:
    return {device: claim[device] for device in sorted(claim)}


# How much of a stopped slot's memory may stay in use: drivers keep a little, and figures are rounded.
KEPT_SHARE = 0.05
KEPT_MIB = 64


def not_back(before: Reading, now: Reading, released: Claim) -> Claim:
    """MiB of `released` that are still used, by GPU, beyond what drivers may keep."""
    then = {gpu.uuid: gpu for gpu in before.gpus}
    found: dict[DeviceId, int] = {}
    for gpu in now.gpus:
        mib = released.get(DeviceId(gpu.uuid), 0)
        if mib and gpu.uuid in then and (away_mib := away(then[gpu.uuid], gpu, mib)):
            found[DeviceId(gpu.uuid)] = away_mib
    return found


def away(before: GpuReading, now: GpuReading, mib: int) -> int:
    """MiB of this memory that are still used on one GPU; 0 if that is no more than drivers may keep."""
    away_mib = min(mib, now.used_mib - (before.used_mib - mib) - _grown_mib(before, now))
    return away_mib if away_mib > max(KEPT_MIB, mib * KEPT_SHARE) else 0


def short_of(now: Reading, claim: Claim) -> Claim:
    """MiB of this claim that are not free, by GPU. A GPU that cannot be seen counts as free."""
    free = {DeviceId(gpu.uuid): max(0, gpu.total_mib - gpu.used_mib) for gpu in now.gpus}
    return {device: mib - free[device] for device, mib in claim.items() if device in free and mib > free[device]}


def _grown_mib(before: GpuReading, now: GpuReading) -> int:
    """What other processes took meanwhile, as far as they can be seen."""
    then = before.processes or {}
    return sum(max(0, mib - then.get(pid, 0)) for pid, mib in (now.processes or {}).items())
