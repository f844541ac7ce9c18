"""The first look at memory, before anything is planned: which probe works here, and what it sees."""

from __future__ import annotations

import os

from greenroom.config.schema import Config
from greenroom.errors import ConfigError, ProbeFailed
from greenroom.runtime.detached import beside
from greenroom.runtime.memory.probes.base import Probe, Reading
from greenroom.runtime.memory.probes.choice import open_probe
from greenroom.runtime.memory.probes.simulated import NoProbe
from greenroom.runtime.memory.probes.visible import order_warning
from greenroom.telemetry.logs import get_logger

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
