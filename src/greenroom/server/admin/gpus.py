"""The GPUs, for operators: their figures, who holds what on them, and which strangers are there."""

from __future__ import annotations

from fastapi import FastAPI

from greenroom.server.admin.gateway import Gateway
from greenroom.server.admin.gpu_views import GpuList, GpuPicture

PATH = "/api/v1/gpus"
# Who asks more often than this is shown the same look again.
FRESH_S = 0.5


class Gpus:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def add_to(self, app: FastAPI) -> None:
        app.get(PATH)(self.list_gpus)

    async def list_gpus(self) -> GpuList:
        """Every GPU now: what the driver says, what models and leases hold, and what processes nobody declared use."""
        gateway = self._gateway
        if gateway.clock() - gateway.memory_watch.last.at > FRESH_S:
            await gateway.memory_watch.look_now()
        return GpuPicture(gateway.memory_watch, gateway.loop.scheduler.state, gateway.clock()).whole()
