"""`/api/v1/config`, what an operator may change while the gateway runs, and `/api/v1/remotes`, what providers cost.

Neither tells anything of a provider's key.
"""

from __future__ import annotations

from greenroom.access.keys import Permission
from greenroom.api.declared import Routes, get, of_all, put
from greenroom.api.views import Order, View
from greenroom.runtime.remote.fallback import CloudFallback
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.shell import Shell

CONFIG_PATH = "/api/v1/config"
REMOTES_PATH = "/api/v1/remotes"


class RuntimeConfig(View):
    allowCloudFallback: bool  # noqa: N815
    """Whether a request for a task may fall to a remote model that is not the first of its candidates."""


class RuntimeConfigChange(Order):
    allowCloudFallback: bool  # noqa: N815
    """As in the answer."""


class RemoteView(View):
    name: str
    """The prefix of its models' names."""
    provider: str
    spent_today: float
    """Since midnight (UTC), with what requests that are under way may cost; 0 where no cost is configured."""
    budget_per_day: float | None
    """Null if there is none."""
    problem: str | None
    """Why it is not known what was spent, so that a provider with a budget is not asked; null if it is known."""


class RemoteList(View):
    remotes: list[RemoteView]


class RemoteRoutes(Routes):
    def __init__(self, shell: Shell, spending: Spending, fallback: CloudFallback) -> None:
        self._shell = shell
        self._spending = spending
        self._fallback = fallback

    @get(CONFIG_PATH, needs=Permission.READ)
    async def runtime_config(self) -> RuntimeConfig:
        """What can be changed while the gateway runs, as it is now."""
        return RuntimeConfig(allowCloudFallback=self._fallback.is_allowed)

    @put(CONFIG_PATH, needs=Permission.MANAGE, signed=of_all("config-reload"))
    async def change_runtime_config(self, change: RuntimeConfigChange) -> RuntimeConfig:
        """Change it, for requests that come from now on. It is kept over restarts."""
        await self._fallback.set(change.allowCloudFallback)
        return await self.runtime_config()

    @get(REMOTES_PATH, needs=Permission.READ)
    async def list_remotes(self) -> RemoteList:
        """Each provider of remote models, and what was spent there today."""
        spending, remotes = self._spending, self._shell.config.remotes
        return RemoteList(
            remotes=[
                RemoteView(
                    name=name,
                    provider=remote.provider,
                    spent_today=round(spending.spent(name), 6),
                    budget_per_day=remote.budget_per_day,
                    problem=spending.problem,
                )
                for name, remote in remotes.items()
            ]
        )
