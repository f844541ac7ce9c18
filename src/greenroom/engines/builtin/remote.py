"""Models that run elsewhere: a provider's API over TLS, which answers as OpenAI's does.

Owns what is known of such a model. It takes no memory here, has no process and no files, and is ready at once; the
connections are made by `runtime/moves/mover.py`.
"""

from __future__ import annotations

from typing import Final

from greenroom.config.schema import Model
from greenroom.engines.base import ConnectedEngine, EngineFacts
from greenroom.engines.estimates.estimate import Estimate

# Requests at once for a model that says nothing else. A provider serves more than an engine of this machine does.
REMOTE_CONCURRENCY: Final = 16


class RemoteEngine(ConnectedEngine):
    name = "remote"
    # A provider's own paths are not passed through: they would be called with the gateway's key.
    upstream_paths = ()

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(is_remote=True)

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        return Estimate((), "remote")

    def concurrency(self, model: Model) -> int:
        return model.concurrency or REMOTE_CONCURRENCY
