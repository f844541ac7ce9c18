"""All models of a gateway: the configured ones, those on disk, and how names lead to them.

Owns the event by which the scheduler learns of a configuration, at the start and at a reload.
"""

from __future__ import annotations

import asyncio
from functools import partial

from greenroom.base.detached import run_detached
from greenroom.config.diff import Changes
from greenroom.config.limits import limits_of
from greenroom.config.part import Apply, Part
from greenroom.config.schema import Config
from greenroom.core.events import ConfigChanged
from greenroom.core.model import ModelId
from greenroom.errors import ConfigError
from greenroom.library.library import Library
from greenroom.runtime.catalogue import Draft
from greenroom.runtime.known_models import KnownModels
from greenroom.runtime.memory.memory import Memory
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.record.learned import LearnedTimes
from greenroom.runtime.resolver import Resolver
from greenroom.runtime.shell import Shell


class Models(Part):
    def __init__(self, shell: Shell, memory: Memory, mover: Mover, library: Library) -> None:
        self._shell = shell
        self._memory = memory
        self.learned = LearnedTimes(shell.state_dir.path, shell.loop, shell.catalog)
        self.known = KnownModels(shell.catalog, shell.loop, shell.slots, mover.failures)
        self.resolver = Resolver(shell.catalog, library, shell.live, self.known, self.learned)
        library.follower = self.resolver.adhoc

    def begin(self) -> None:
        """Tell the scheduler of all models, and before that of strangers that use memory."""
        loop, specs = self._shell.loop, tuple(entry.spec for entry in self._shell.catalog)
        self._memory.watch.tell_first()
        learned = self.learned.recall(spec.id for spec in specs)
        loop.post(ConfigChanged(loop.clock(), models=specs, learned=learned))

    async def draft(self, new: Config, changes: Changes) -> Apply:
        """Read headers of models in a thread: a file server that hangs must not stop running requests."""
        look_s = self._shell.timeouts.look_at_models_s
        try:
            async with asyncio.timeout(look_s):
                draft = await run_detached(lambda: self._shell.catalog.draft(new, changes), "look at models")
        except TimeoutError:
            raise ConfigError(
                f"The files of models could not be looked at within {look_s:g} s, and nothing was changed. "
                "Look whether their disk answers, and reload again."
            ) from None
        return partial(self._apply, new, changes, draft)

    def _apply(self, config: Config, changes: Changes, draft: Draft) -> None:
        loop, watch = self._shell.loop, self._memory.watch
        specs = tuple(map(self.known.still_held, self._shell.catalog.take(draft)))
        learned = self.learned.recall(ModelId(model) for model in changes.added)
        set_aside_before, devices = watch.set_aside_mib, self._memory.devices(config)
        loop.post(
            ConfigChanged(
                loop.clock(),
                models=specs,
                removed=tuple(ModelId(model) for model in changes.removed),
                devices=None if watch.set_aside_mib == set_aside_before else devices,
                limits=limits_of(config),
                learned=learned or None,
            )
        )
        self.resolver.reloaded()
        self.known.forget_removed()

    async def pin(self, model: ModelId, pinned: bool) -> None:
        """Let nothing evict this model, or no longer. A reload that is under way ends first."""
        shell = self._shell
        async with shell.live.changing:
            spec = shell.catalog.pin(model, pinned)
            if spec is not None:
                shell.loop.post(ConfigChanged(shell.clock(), models=(self.known.still_held(spec),)))
                shell.hub.publish("pin", {"model": model, "pinned": pinned})
