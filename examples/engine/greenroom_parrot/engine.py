"""The engine `parrot`: how Greenroom starts it and what it can do. Runs in the gateway, so it imports nothing heavy."""

from __future__ import annotations

import sys
from pathlib import Path

from greenroom.config.schema import Ability, Model
from greenroom.engines.base import EngineFacts, Launch, LaunchPlace, ProcessEngine, environment
from greenroom.engines.estimates.estimate import Estimate, EstimatePart
from greenroom.errors import LoadFailed
from greenroom.process.spawn import Command

SERVER = Path(__file__).parent / "server.py"
SERVER_MIB = 20


class ParrotEngine(ProcessEngine):
    """A process for each model. `options: {prefix: TEXT}` is said before every repetition."""

    name = "parrot"

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(frozenset({Ability.CHAT}))

    def estimate(self, model: Model, gpus: int) -> Estimate:
        return Estimate((EstimatePart("program", 0, SERVER_MIB),), "parrot")

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        prefix = model.options.get("prefix", "")
        if not isinstance(prefix, str):
            raise LoadFailed(f"{model_id}: options.prefix must be text. Correct it in the configuration.")
        argv = (sys.executable, str(SERVER), str(place.port), model_id, prefix)
        return Launch(Command(argv, environment(model, place), model.cwd), check_path="/health")
