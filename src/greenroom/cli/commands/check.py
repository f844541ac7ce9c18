"""`greenroom check`: every mistake in a configuration, and what it would serve. Starts nothing."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import ExitStatus
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from greenroom.config.loader import LoadedConfig
    from greenroom.config.schema import Config, Model
    from greenroom.runtime.memory.needs import Needs
    from greenroom.runtime.memory.readings import Reading

TITLES = ("model", "engine", "memory MiB", "note")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the file (default: as for serve)")
    parser.add_argument("-c", "--config", metavar="FILE", help="the same")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of configuration files and stop")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if args.schema:
        from greenroom.config.generate import json_schema

        screen.say_json(json_schema())
        return ExitStatus.OK
    from greenroom.config import loader

    try:
        loaded = loader.load(loader.find(args.file or args.config), to_serve=True)
    except ConfigError as error:
        if not args.json:
            raise
        screen.say_json({"ok": False, "problems": error.message.splitlines()})
        return ExitStatus.FAILED
    _say(summary(loaded), args.json)
    return ExitStatus.OK


COMMAND = Subcommand(
    "check",
    "List every mistake in a configuration file, and show what it would serve.",
    add_options,
    run,
)


def summary(loaded: LoadedConfig) -> dict[str, Any]:
    """What the file would serve, and on which devices."""
    from greenroom.core.model import DeviceId
    from greenroom.runtime.memory.devices import devices
    from greenroom.runtime.memory.needs import Needs

    seen, blind = _look(loaded.config)
    needs = Needs(gpus={DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus})
    models = [_model(name, model, needs) for name, model in loaded.config.models.items()]
    return {
        "ok": True,
        "file": str(loaded.path),
        "warnings": [
            *loaded.warnings,
            *blind,
            *_unusable_files(loaded.config),
            *_earlier_activity(loaded.config),
            *_too_large(models, loaded.config),
            *_no_store_client(loaded.config),
            *_no_packages(loaded.config),
            *_no_engine(loaded.config),
        ],
        "models": models,
        "keys": [
            {"name": key.name, "tenant": key.tenant or key.name, "admin": key.admin, "leases": key.admin or key.leases}
            for key in loaded.config.server.api_keys
        ],
        "devices": [
            {"id": device.id, "capacity_mib": device.capacity_mib, "margin_mib": device.margin_mib}
            for device in devices(loaded.config, seen)
        ],
    }


def _look(config: Config) -> tuple[Reading, list[str]]:
    """The GPUs, and a warning if they cannot be measured: `serve` would not start then."""
    from greenroom.errors import ProbeFailed
    from greenroom.runtime.memory.probes import NoProbe, open_probe

    try:
        probe, seen = open_probe(config)
    except ProbeFailed as error:
        return NoProbe().look(), [f"memory.probe: {config.memory.probe} does not work here. {error.message}"]
    probe.close()
    return seen, []


def _unusable_files(config: Config) -> list[str]:
    """Warnings for files that llama.cpp cannot load. The loader reports those that are missing."""
    from greenroom.engines.estimates.gguf import check_gguf
    from greenroom.engines.estimates.gguf_header import BadModelFile
    from greenroom.engines.estimates.llama_model import of_model
    from greenroom.engines.registry import engine_for

    found = []
    for name, model in config.models.items():
        if engine_for(model).name == "llamacpp" and os.path.exists(model.path or ""):
            try:
                check_gguf(of_model(model))
            except BadModelFile as error:
                found.append(f"models.{name}: path: {error.message.rstrip('.')}")
    return found


def _earlier_activity(config: Config) -> list[str]:
    """A warning if the start would rename the file of `record_activity`, or fail at it."""
    from greenroom.runtime.record.recording import ActivityRecorder

    path = config.server.record_activity
    if path is None or not os.path.isfile(path):
        return []
    try:
        if not ActivityRecorder(Path(path)).will_set_aside():
            return []
    except OSError as error:
        where = error.filename or path
        return [f"server.record_activity: {where}: {error.strerror}; the gateway does not start with it"]
    kept = f"{path}.1"
    instead = ", which replaces the one there" if os.path.exists(kept) else ""
    return [f"server.record_activity: {path} is of an earlier version; the start renames it to {kept}{instead}"]


def _too_large(models: Sequence[Mapping[str, Any]], config: Config) -> list[str]:
    """Warnings for models whose estimate can never fit. The loader checks those with `memory_mib`."""
    from greenroom.config.problems import budget_mib

    return [
        f"models.{model['id']}: its {_origin(model)} says about {model['memory_mib']:,} MiB, which can never fit into "
        f"the budget of {budget:,} MiB; give memory_mib if it needs less"
        for model in models
        if model["estimated"]
        and (budget := budget_mib(config, config.models[model["id"]])) is not None
        and model["memory_mib"] > budget
    ]


def _no_store_client(config: Config) -> list[str]:
    """A warning if leases are kept in Redis and its client is missing: `serve` would not start."""
    if config.leases.store is None or importlib.util.find_spec("redis") is not None:
        return []
    install = f"{sys.executable} -m pip install 'greenroom[redis]'"
    return [f"leases.store: the Python client of Redis is not installed here; type: {install}"]


def _no_packages(config: Config) -> list[str]:
    """Warnings for hosted models whose Python lacks packages. Each Python is asked once; nothing is imported."""
    from greenroom.cli.commands.engines import looked_at
    from greenroom.engines.registry import engine_for

    hosted = {name: model for name, model in config.models.items() if engine_for(model).name == "transformers"}
    rows = looked_at(config.model_copy(update={"models": hosted})) if hosted else []
    return [f"models.{', '.join(row['models'])}: {text}" for row in rows if row["models"] and (text := _lacks(row))]


def _no_engine(config: Config) -> list[str]:
    """Warnings for models whose engine is missing. The loader has told of programs, and others of transformers."""
    from greenroom.engines.registry import engine_for

    found = []
    for name, model in config.models.items():
        if model.engine not in ("command", "transformers") and model.program is None:
            found += [f"models.{name}: {why}"] if (why := engine_for(model).missing(model)) else []
    return found


def _lacks(row: Mapping[str, Any]) -> str | None:
    if row["why"] is not None:
        # The loader has reported a missing program already.
        return f"python: {row['why']}" if shutil.which(row["where"]) else None
    needed = [one["package"] for one in row["missing"] if not one["optional"]]
    if not needed:
        return None
    return f"{row['where']} lacks {', '.join(needed)} or has too old a version; type: {row['install']}"


def _model(name: str, model: Model, needs: Needs) -> dict[str, Any]:
    from greenroom.core.model import ModelId
    from greenroom.engines.registry import engine_for
    from greenroom.runtime.memory.needs import Subject

    engine = engine_for(model)
    need, source = needs.need_of(Subject(ModelId(name), model, engine))
    return {
        "id": name,
        "engine": engine.name,
        "memory_mib": need.gpu_mib + need.host_mib,
        "estimated": model.memory_mib is None,
        "source": source,
        "pinned": model.pinned,
        "preload": model.preload,
    }


def _say(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        screen.say_json(result)
        return
    screen.say_table(TITLES, [_row(model) for model in result["models"]])
    budget = ", ".join(f"{device['id']} {device['capacity_mib']:,} MiB" for device in result["devices"])
    screen.say(f"budget: {budget}")
    if result["keys"]:
        screen.say(f"keys: {', '.join(_key(key) for key in result['keys'])}")
    for warning in result["warnings"]:
        screen.say(f"warning: {warning}")
    screen.say(f"{result['file']} is right" + (", but see above" if result["warnings"] else ""))
    screen.hint(f"serve it: greenroom serve --config {result['file']}")


def _key(key: Mapping[str, Any]) -> str:
    """The name of a key and its rights."""
    return f"{key['name']} (admin)" if key["admin"] else f"{key['name']} (leases)" if key["leases"] else key["name"]


def _origin(model: Mapping[str, Any]) -> str:
    return "name" if model["source"] == "name" else "file"


def _row(model: Mapping[str, Any]) -> Sequence[str]:
    notes = [f"estimated from its {_origin(model)}"] if model["estimated"] and model["memory_mib"] else []
    notes += [word for word in ("pinned", "preload") if model[word]]
    memory = str(model["memory_mib"]) if model["memory_mib"] else "-"
    return (model["id"], model["engine"], memory, ", ".join(notes) or "-")
