"""Readings of memory: each GPU with the processes on it, and the host.

Owns the records of a reading, the protocol `Probe`, and the reading of this host: /proc/meminfo, cgroups, /dev/shm and
single processes. In a container the limit of its cgroup counts. `HostProbe` never raises: what cannot be read counts as
not limited, or as absent. The probes of simulated GPUs and of none look at the host alone, so they are here too. Never
decides what the figures mean: `attribution.py` attributes memory, `devices.py` says which GPUs to plan with.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from greenroom.config.schema import Gpu

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

    def glance(self, uuid: str) -> GpuReading | None:
        """The memory of one GPU now, as quickly as possible; None if there is no such GPU.

        Blocks and raises as `look` does, and may run at the same time.
        """

    def close(self) -> None:
        """Release what it holds. It is not used again."""


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


@dataclass(frozen=True, slots=True)
class SimulatedProbe:
    """The GPUs under `gpus` in the configuration, called gpu0, gpu1 …"""

    gpus: tuple[Gpu, ...]
    host: HostProbe = THIS_MACHINE
    kind: str = "simulated"

    def look(self) -> Reading:
        seen = (
            GpuReading(f"gpu{index}", index, "simulated", gpu.memory_mib, 0, {}) for index, gpu in enumerate(self.gpus)
        )
        return Reading(tuple(seen), self.host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        return self.look().gpu(uuid)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class NoProbe:
    """No GPUs: there are none, or they must not be used. `why` says which, for the log."""

    why: str = ""
    host: HostProbe = THIS_MACHINE
    kind: str = "none"

    def look(self) -> Reading:
        return Reading((), self.host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        return None

    def close(self) -> None:
        """Nothing is held."""


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
