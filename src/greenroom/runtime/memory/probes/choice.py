"""Which probe there is: the one that the configuration asks for, or the one that works here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from greenroom.config.schema import Config, Gpu
from greenroom.errors import ConfigError, ProbeFailed
from greenroom.runtime.detached import beside
from greenroom.runtime.memory.host import THIS_MACHINE, Host
from greenroom.runtime.memory.probes.base import GpuReading, Probe, Reading
from greenroom.runtime.memory.probes.file_probe import FileProbe
from greenroom.runtime.memory.probes.nvml import NvmlProbe
from greenroom.runtime.memory.probes.visible import VISIBLE_NAME, VisibleProbe, order_warning
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
    """The probe that the configuration asks for. Raises ConfigError if it does not work here."""
    try:
        probe, seen = await beside(lambda: open_probe(config), "first look at memory")
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
    host: Host = THIS_MACHINE
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
    """A machine without GPUs, or one where they are not to be used. `why` says which, for the log."""

    why: str = ""
    host: Host = THIS_MACHINE
    kind: str = "none"

    def look(self) -> Reading:
        return Reading((), self.host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        return None

    def close(self) -> None:
        """Nothing is held."""
