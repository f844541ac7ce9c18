"""What every part of a gateway may use. A part that needs another one is given it by name."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.config.part import GatewayState
from greenroom.config.schema import Config
from greenroom.process.state_dir import StateDir
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.observer import Hub, Observer
from greenroom.runtime.operations.table import OperationTable
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.slots import LiveSlots
from greenroom.runtime.timeouts import Timeouts
from greenroom.runtime.workers.hosted_slots import HostedSlots
from greenroom.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Shell:
    """Everything is read afresh each time: a reload replaces the configuration as a whole."""

    live: GatewayState
    loop: SchedulerLoop
    catalog: Catalog
    slots: LiveSlots
    hosted_slots: HostedSlots
    table: OperationTable
    observer: Observer
    state_dir: StateDir
    timeouts: Timeouts

    @property
    def config(self) -> Config:
        return self.live.config

    @property
    def is_starting(self) -> bool:
        """Until models can be asked for."""
        return self.live.is_starting

    @property
    def is_draining(self) -> bool:
        return self.live.is_draining

    @property
    def hub(self) -> Hub:
        return self.observer.hub

    @property
    def metrics(self) -> Metrics:
        return self.observer.metrics

    def clock(self) -> float:
        """The scheduler's clock."""
        return self.loop.clock()
