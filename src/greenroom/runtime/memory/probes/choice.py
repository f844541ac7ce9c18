"""Which probe there is: the one that the configuration asks for, or the one that works here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from greenroom.config.schema import Config
from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.probes.base import Probe, Reading
from greenroom.runtime.memory.probes.file_probe import FileProbe
from greenroom.runtime.memory.probes.nvml import NvmlProbe
from greenroom.runtime.memory.probes.simulated import NoProbe, SimulatedProbe
from greenroom.runtime.memory.probes.visible import VISIBLE_NAME, VisibleProbe


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
