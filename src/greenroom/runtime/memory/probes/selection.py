"""Selects the probe: the configured one, or the one that works here, limited to CUDA_VISIBLE_DEVICES.

Owns the meaning of that variable. Indices are taken in PCI bus order, as NVML counts. CUDA counts so only with
CUDA_DEVICE_ORDER=PCI_BUS_ID or if all GPUs are alike; `order_warning` says when the two may differ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from greenroom.config.schema import Config, Gpu
from greenroom.errors import ConfigError, ProbeFailed
from greenroom.runtime.detached import run_detached
from greenroom.runtime.memory.probes.base import GpuReading, Probe, Reading, named
from greenroom.runtime.memory.probes.file_probe import FileProbe
from greenroom.runtime.memory.probes.host import THIS_MACHINE, HostProbe
from greenroom.runtime.memory.probes.nvml import NvmlProbe
from greenroom.telemetry.logs import get_logger


def make_probe(config: Config, environ: Mapping[str, str] = os.environ) -> Probe:
    """Raises ProbeFailed if the configuration insists on a probe that does not work here."""
    memory = config.memory
    if config.gpus:
        return SimulatedProbe(config.gpus)
    if memory.probe == "none":
        return NoProbe("memory.probe is none")
    if memory.file is not None:
        return _visible(FileProbe(Path(memory.file)), environ)
    try:
        return _visible(NvmlProbe(), environ)
    except ProbeFailed as error:
        if memory.probe == "nvml":
            raise
        return NoProbe(error.message)


def open_probe(config: Config, environ: Mapping[str, str] = os.environ) -> tuple[Probe, Reading]:
    """A probe and its first look. Blocks. Raises ProbeFailed as `make_probe` does, or if that look fails."""
    probe = make_probe(config, environ)
    try:
        return probe, probe.look()
    except ProbeFailed as error:
        probe.close()
        if config.memory.probe != "auto":
            raise
        nothing = NoProbe(error.message)
        return nothing, nothing.look()


def _visible(probe: Probe, environ: Mapping[str, str]) -> Probe:
    said = environ.get(VISIBLE_NAME)
    return probe if said is None else VisibleProbe(probe, said)


_log = get_logger("memory")


async def first_look(config: Config) -> tuple[Probe, Reading]:
    """The configured probe and its first reading. Raises ConfigError if it does not work here."""
    try:
        probe, seen = await run_detached(lambda: open_probe(config), "first look at memory")
    except ProbeFailed as error:
        raise ConfigError(f"memory.probe: {config.memory.probe} does not work here. {error.message}") from error
    if isinstance(probe, NoProbe):
        _log.info("no GPUs are used", why=probe.why)
    if warning := order_warning(seen.gpus, os.environ):
        _log.warning(warning)
    return probe, seen


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


VISIBLE_NAME = "CUDA_VISIBLE_DEVICES"
ORDER_NAME = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"
# A MIG instance. It is not planned with and is no error; engines find it themselves.
_MIG = "MIG-"


class VisibleProbe:
    """Another probe, limited to the GPUs that the variable names."""

    def __init__(self, probe: Probe, said: str) -> None:
        self._probe = probe
        self._said = said
        # Resolved at the first look: when a GPU vanishes, the indices of the others change, but not what CUDA meant.
        self._uuids: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        return self._probe.kind

    def look(self) -> Reading:
        reading = self._probe.look()
        if self._uuids is None:
            self._uuids = frozenset(gpu.uuid for gpu in visible(reading.gpus, self._said))
        return replace(reading, gpus=tuple(gpu for gpu in reading.gpus if gpu.uuid in self._uuids))

    def glance(self, uuid: str) -> GpuReading | None:
        return self._probe.glance(uuid) if uuid in (self._uuids or ()) else None

    def close(self) -> None:
        self._probe.close()


def visible(gpus: Sequence[GpuReading], said: str) -> list[GpuReading]:
    """The GPUs that the variable names. An invalid entry (-1, an unknown index or UUID) ends the list, as in CUDA."""
    found: list[GpuReading] = []
    for word in (word.strip() for word in said.split(",")):
        if word.startswith(_MIG):
            continue
        meant = named(gpus, word)
        if meant is None:
            break
        if meant not in found:
            found.append(meant)
    return found


def order_warning(gpus: Sequence[GpuReading], environ: Mapping[str, str]) -> str | None:
    """A warning if indices in the variable may mean other GPUs to CUDA than to us; else None."""
    numbers = any(word.strip().isdigit() for word in environ.get(VISIBLE_NAME, "").split(","))
    differ = len({(gpu.name, gpu.total_mib) for gpu in gpus}) > 1
    if not numbers or not differ or environ.get(ORDER_NAME) == PCI_ORDER:
        return None
    return (
        f"{VISIBLE_NAME} has numbers and the GPUs differ: they are read in the order of the PCI bus, while CUDA puts "
        f"the fastest first. Set {ORDER_NAME}={PCI_ORDER}, or write UUIDs."
    )
