"""Any program that listens on a port. What it needs is declared by the operator; how it is started is `cmd`."""

from __future__ import annotations

from greenroom.config.commands import words
from greenroom.config.schema import Model
from greenroom.core.model import Need
from greenroom.engines.base import Ability, Launch, Listens, Place, UsageSource, environment
from greenroom.engines.usage import Usage, from_usage
from greenroom.process.spawn import Command

# A program we know nothing about is asked at most this many things at once.
CONCURRENCY = 8


class CommandEngine:
    name = "command"
    listens = Listens.PORT
    usage_source = UsageSource.ASK
    sizes_itself = False
    can_split = False

    def need(self, model: Model) -> Need:
        return Need(model.memory_mib or 0, model.host_memory_mib)

    def concurrency(self, model: Model) -> int:
        return model.concurrency or CONCURRENCY

    def launch(self, model_id: str, model: Model, place: Place) -> Launch:
        port = str(place.port)
        assert model.cmd is not None, "the configuration refuses a command without cmd"
        env = {name: value.replace("${PORT}", port) for name, value in environment(model).items()}
        stop = tuple(word.replace("${PORT}", port) for word in words(model.cmd_stop)) if model.cmd_stop else None
        argv = tuple(word.replace("${PORT}", port) for word in words(model.cmd))
        check = None if model.check_endpoint == "none" else model.check_endpoint
        return Launch(Command(argv, env, model.cwd, stop), check)

    def abilities(self, model: Model) -> frozenset[Ability] | None:
        return None

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        return from_usage(tail)
