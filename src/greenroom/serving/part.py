"""Requests to models, as a part: what reads, counts and answers them, and what changes for them at a reload."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from greenroom.access.client_stats import ClientStats
from greenroom.access.keys import Tenants
from greenroom.access.limits import Limiter
from greenroom.config.diff import Changes
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.http.limits import EdgeState, limits_for
from greenroom.runtime.loop import Tickets
from greenroom.runtime.memory.watch import MemoryWatch
from greenroom.runtime.moves.admission import Prefetch
from greenroom.runtime.record.recording import ActivityRecorder
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell
from greenroom.serving.answers import PictureUrls
from greenroom.serving.prefix_cache import PrefixSalts
from greenroom.serving.read import Reader
from greenroom.serving.request_log import RequestLog
from greenroom.serving.requests import Inference
from greenroom.serving.tasks import Tasks
from greenroom.telemetry.activity import Activity, UsageCounts


class RequestsPart(Part):
    """`counts` is None where no usage is kept."""

    def __init__(
        self,
        shell: Shell,
        watch: MemoryWatch,
        resolver: Resolver,
        tasks: Tasks,
        tickets: Tickets,
        limiter: Limiter,
        counts: UsageCounts | None,
        picture_urls: PictureUrls,
    ) -> None:
        server = shell.config.server
        self.edge_state = EdgeState(limits_for(server))
        self.activity, self.salts, self.tasks = Activity(), PrefixSalts(), tasks
        self.activity_file = ActivityRecorder(Path(server.record_activity)) if server.record_activity else None
        self.client_stats, self._tenants = ClientStats(shell.loop.clock), Tenants()
        self._prefetch = Prefetch(shell.loop.view, watch.host_available_mib, shell.observer)
        reader = Reader(resolver, shell.catalog, self._tenants, limiter, tasks, self.salts, shell.live, picture_urls)
        record = None if self.activity_file is None else self.activity_file.add
        log = RequestLog(self.activity, shell.metrics, record, counts, self.client_stats)
        self.inference = Inference(reader, shell.loop, tickets, log, self._prefetch)
        self._use(shell.config)

    async def draft(self, new: Config, changes: Changes) -> Apply:
        return partial(self._use, new)

    def _use(self, config: Config) -> None:
        self.inference.configure(config)
        self._tenants.are_named = config.server.multi_tenant
        self.client_stats.configure(config.clients)
        self.tasks.configure(config)

    async def close(self) -> None:
        self.inference.sweep.close()
        self._prefetch.close()
