"""Names of remote models that no configuration has: claude:sonnet is the model `sonnet` of the provider `claude`.

Owns which of them are remembered, as models of their own, so that each has its limits, its usage and its place in the
scheduler. They take no memory, so they cost nothing but their names; those that were not used for longest leave.
"""

from __future__ import annotations

from typing import Final, Protocol

from greenroom.config.kinds import id_problem
from greenroom.config.part import GatewayState
from greenroom.config.schema import Model, Remote
from greenroom.core.model import ModelId
from greenroom.errors import BadRequest, NotAllowed, TooManyModels
from greenroom.runtime.catalogue import Catalog, Entry
from greenroom.runtime.known_models import KnownModels
from greenroom.telemetry.logs import get_logger

_log = get_logger("models")

# Callers make names up; a provider has some dozens.
NAMES_MAX: Final = 256
RETRY_AFTER_S: Final = 5.0


class RemoteAsker(Protocol):
    @property
    def may_ask_remote(self) -> bool:
        """True if it may ask a provider for models that no configuration names, which costs money."""

    def sees(self, model: str) -> bool: ...


class RemoteNames:
    def __init__(
        self,
        catalog: Catalog,
        gateway: GatewayState,
        models: KnownModels,
        names_max: int = NAMES_MAX,
    ) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._models = models
        self._max = names_max
        # The one used last is at the end.
        self._known: dict[ModelId, Remote] = {}

    def find(self, name: str, asker: RemoteAsker) -> Entry | None:
        """The model of this name; None if its prefix is no provider's, or the asker does not see it. Raises NotAllowed,
        BadRequest for what cannot be a name, and TooManyModels."""
        prefix, colon, rest = name.partition(":")
        remote = self._gateway.config.remotes.get(prefix) if colon else None
        if remote is None or not asker.sees(name):
            return None
        if not asker.may_ask_remote:
            raise NotAllowed(
                f"This key may not ask {prefix} for models by name: its `verbs` do not have `remote`.", param="model"
            )
        if not rest:
            raise BadRequest(f"{prefix}: is followed by the name of a model.", param="model")
        if (why := id_problem(name)) is not None:
            raise BadRequest(f"There is no such model: {why}.", param="model")
        model_id = ModelId(name)
        known, entry = self._known.pop(model_id, None), self._catalog.find(name)
        if known is None or entry is None:
            return self._added(model_id, prefix, rest, remote)
        self._known[model_id] = known
        return entry

    def reloaded(self) -> None:
        """Forget models of providers that were removed or changed, and those that a configuration has taken over."""
        remotes = self._gateway.config.remotes
        for model, known in list(self._known.items()):
            entry = self._catalog.find(model)
            if entry is None or not entry.is_adhoc:
                del self._known[model]
            elif remotes.get(model.partition(":")[0]) != known:
                self._forget(model)

    def _added(self, model_id: ModelId, prefix: str, rest: str, remote: Remote) -> Entry:
        self._expect_room()
        model = Model(
            engine="remote",
            remote=prefix,
            use_model_name=remote.name_of(rest),
            concurrency=remote.concurrency,
            unlisted=True,
            # Translations of other dialects add it; OpenAI refuses fields that it does not know.
            strip_params=("top_k",),
        )
        entry = self._catalog.adhoc_entry(model_id, model, model_id)
        self._known[model_id] = remote
        self._models.add(entry)
        _log.info("remote model named", model=model_id, name_there=model.use_model_name)
        return entry

    def _expect_room(self) -> None:
        while len(self._known) >= self._max:
            idle = next((model for model in self._known if not self._models.is_busy(model)), None)
            if idle is None:
                raise TooManyModels(
                    f"{self._max:,} remote models may be asked for by name at once.", retry_after_s=RETRY_AFTER_S
                )
            self._forget(idle)

    def _forget(self, model: ModelId) -> None:
        del self._known[model]
        self._models.remove(model)
