"""`greenroom check`: every mistake in a configuration, and what it would serve. Starts nothing."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.commands.key import TITLES as KEY_TITLES
from greenroom.cli.commands.key import all_keys, key_row
from greenroom.cli.failures import ExitStatus
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from greenroom.config.loader import LoadedConfig
    from greenroom.config.schema import Config, Model
    from greenroom.core.model import Device, Need
    from greenroom.runtime.memory.needs import Needs
    from greenroom.runtime.memory.readings import Reading
    from greenroom.serving.tasks import CandidateFacts


ENV_TITLES = ("variable", "key", "from", "value")
TITLES = ("model", "engine", "memory MiB", "note")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the file (default: as for serve)")
    parser.add_argument("-c", "--config", metavar="FILE", help="the same")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of configuration files and stop")
    parser.add_argument(
        "--env", action="store_true", help="print what each environment variable sets, and where its value is from"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if args.schema:
        from greenroom.config.generate import json_schema

        screen.say_json(json_schema())
        return ExitStatus.OK
    from greenroom.config import loader

    try:
        given = args.file or args.config
        # The environment alone is a configuration too.
        loaded = loader.load(loader.find_any(given) if args.env else loader.find(given), to_serve=True)
    except ConfigError as error:
        if not args.json:
            raise
        screen.say_json({"ok": False, "problems": error.message.splitlines()})
        return ExitStatus.FAILED
    if args.env:
        _say_environment(loaded, args.json)
        return ExitStatus.OK
    result = summary(loaded)
    _say(result, args.json)
    return ExitStatus.OK if result["ok"] else ExitStatus.FAILED


COMMAND = Subcommand(
    "check", "List every mistake in a configuration file, and show what it would serve.", add_options, run
)


def summary(loaded: LoadedConfig) -> dict[str, Any]:
    """What the file would serve, on which devices, and what is wrong: `problems` are those that stop the start."""
    from greenroom.config.problems import obstacles
    from greenroom.core.model import DeviceId, DeviceKind
    from greenroom.features.governance.keyset import report
    from greenroom.runtime.memory.devices import devices
    from greenroom.runtime.memory.needs import Needs

    seen, blind = _look(loaded.config)
    there = devices(loaded.config, seen)
    needs = Needs(gpus={DeviceId(gpu.uuid): gpu.name for gpu in seen.gpus})
    needs.usable_mib = {device.id: device.usable_mib for device in there if device.kind is DeviceKind.GPU}
    models = [_model(name, model, needs) for name, model in loaded.config.models.items()]
    governance = report(loaded.config.governance)
    keys, wrong_keys = all_keys(loaded.config.server)
    problems = [
        *(stops := obstacles(loaded.config)),
        *blind,
        *_foreign_recording(loaded.config),
        *_unusable_stores(loaded.config),
        *(f"{why}; `greenroom serve` does not start" for why in (() if governance is None else governance.problems)),
    ]
    warnings = [
        *(text for text in loaded.warnings if text not in stops),
        *_unusable_files(loaded),
        *_too_large(loaded.config, there, needs),
        *_no_packages(loaded.config),
        *_no_engine(loaded),
        *_short_waits(loaded.config),
        *_shared_prompts(loaded.config, keys),
        *wrong_keys,
    ]
    tasks, wrong_tasks = all_tasks(loaded.config, warnings)
    return {
        "ok": not problems,
        "file": str(loaded.path),
        "problems": problems,
        "warnings": [*warnings, *wrong_tasks],
        "models": models,
        "tasks": tasks,
        "keys": keys,
        "governance": None if governance is None else dataclasses.asdict(governance),
        "devices": [
            {"id": device.id, "capacity_mib": device.capacity_mib, "margin_mib": device.margin_mib} for device in there
        ],
    }


def _look(config: Config) -> tuple[Reading, list[str]]:
    """The GPUs, and what to say if they cannot be measured: `serve` would not start then."""
    from greenroom.errors import ProbeFailed
    from greenroom.runtime.memory.probes import open_probe
    from greenroom.runtime.memory.readings import NoProbe

    try:
        probe, seen = open_probe(config)
    except ProbeFailed as error:
        return NoProbe().look(), [f"memory.probe: {config.memory.probe} does not work here. {error.message}"]
    probe.close()
    return seen, []


def _unusable_files(loaded: LoadedConfig) -> list[str]:
    """Warnings for files that their engine would refuse. The loader has reported those that are missing."""
    from greenroom.engines.registry import engine_for

    found = []
    for name, model in loaded.config.models.items():
        key = "workflow" if model.workflow is not None else "path"
        if not _is_told(loaded, name, "path", key) and (why := engine_for(model).unusable(model)) is not None:
            found.append(f"models.{name}: {key}: {why}")
    return found


def _is_told(loaded: LoadedConfig, name: str, *keys: str) -> bool:
    """True if the loader has warned of one of these keys of the model."""
    return any(text.startswith(tuple(f"models.{name}: {key}:" for key in keys)) for text in loaded.warnings)


def _foreign_recording(config: Config) -> list[str]:
    """What to say if the start would fail at the file of `record_activity`."""
    from greenroom.runtime.record.recording import ActivityRecorder

    path = config.server.record_activity
    if path is None or not os.path.isfile(path):
        return []
    try:
        ActivityRecorder(Path(path)).check()
    except OSError as error:
        where = error.filename or path
        return [f"server.record_activity: {where}: {error.strerror}; the gateway does not start with it"]
    return []


def _too_large(config: Config, there: Sequence[Device], needs: Needs) -> list[str]:
    """Warnings for models that can never fit. The loader checks `memory_mib` against budgets of the file."""
    from greenroom.config.problems import budget_mib
    from greenroom.core.model import ModelId
    from greenroom.engines.registry import engine_for
    from greenroom.runtime.memory.needs import Subject

    found = []
    for name, model in config.models.items():
        account = needs.account_of(Subject(ModelId(name), model, engine_for(model)))
        over = _beyond(account.need, model, config, there)
        if over is None or (model.memory_mib is not None and budget_mib(config, model) is not None):
            continue
        needed_mib, where = over
        if model.memory_mib is not None:
            found.append(f"models.{name}: memory_mib: {needed_mib:,} MiB can never fit into {where}")
        else:
            says = f"its {_origin(account.source)} says about {needed_mib:,} MiB"
            found.append(f"models.{name}: {says}, which can never fit into {where}; give memory_mib if it needs less")
    return found


def _beyond(need: Need, model: Model, config: Config, there: Sequence[Device]) -> tuple[int, str] | None:
    """What of this need no device can hold, and which; None if it may fit."""
    from greenroom.core.model import DeviceKind
    from greenroom.engines.registry import facts_of

    gpus = [device.usable_mib for device in there if device.kind is DeviceKind.GPU and not model.is_host_only]
    host_mib = sum(device.usable_mib for device in there if device.kind is DeviceKind.HOST)
    gpus_mib = sum(gpus) if facts_of(model).can_split is not None else max(gpus, default=0)
    if gpus and need.gpu_mib > gpus_mib:
        return need.gpu_mib, _room(gpus_mib, "its GPUs", is_budget=bool(config.gpus))
    on_host_mib = need.host_mib if gpus else need.gpu_mib + need.host_mib
    if on_host_mib > host_mib:
        return on_host_mib, _room(host_mib, "this host", is_budget=config.host.memory_mib is not None)
    return None


def _room(size_mib: int, where: str, *, is_budget: bool) -> str:
    return f"the budget of {size_mib:,} MiB" if is_budget else f"the {size_mib:,} MiB of {where}"


def _unusable_stores(config: Config) -> list[str]:
    """Stores with which `serve` would not start: Redis' client is missing, or an option is not known."""
    stores = {
        "leases.store": config.leases.store,
        "limits.store": config.limits.store,
        "governance.store": config.governance.store,
    }
    named = {key: store for key, store in stores.items() if store is not None}
    if importlib.util.find_spec("redis") is None:
        install = f"{sys.executable} -m pip install 'greenroom[redis]'"
        return [f"{key}: the Python client of Redis is not installed here; type: {install}" for key in named]
    from greenroom.base.redis_link import connected

    found = []
    for key, store in named.items():
        try:
            connected(store, f"{key}:")
        except ConfigError as error:
            found.append(f"{error}; `greenroom serve` does not start")
    return found


def _short_waits(config: Config) -> list[str]:
    """A warning if callers are turned away before a model is loaded that took longer before."""
    from greenroom.runtime.record.learned import known_loads_s

    loads_s = known_loads_s(Path(config.state_dir), config.models)
    longest = max(loads_s, key=loads_s.__getitem__, default=None)
    wait_s = config.server.wait_max_s
    if longest is None or loads_s[longest] <= wait_s:
        return []
    return [
        f"server.wait_max_s: requests that do not stream wait {wait_s:g} s (QUEUE_TIMEOUT_MS sets it too), and "
        f"{longest} took {loads_s[longest]:.0f} s to load: they get 503 model_loading when it is cold"
    ]


def _no_packages(config: Config) -> list[str]:
    """Warnings for hosted models whose Python lacks packages. It is asked once for each engine; nothing is imported."""
    from greenroom.cli.commands.engines import HOSTED, looked_at

    hosted = {name: model for name, model in config.models.items() if model.engine in HOSTED}
    rows = looked_at(config.model_copy(update={"models": hosted}), with_unused=False) if hosted else []
    return [f"models.{', '.join(row['models'])}: {text}" for row in rows if (text := _lacks(row))]


def _no_engine(loaded: LoadedConfig) -> list[str]:
    """Warnings for models whose engine is missing. The loader has told of programs, and others of hosted models."""
    from greenroom.cli.commands.engines import HOSTED
    from greenroom.engines.registry import engine_for

    found = []
    for name, model in loaded.config.models.items():
        is_told = _is_told(loaded, name, "python")
        if model.engine not in ("command", *HOSTED) and model.program is None and not is_told:
            found += [f"models.{name}: {why}"] if (why := engine_for(model).missing(model)) else []
    return found


def _shared_prompts(config: Config, keys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings for models whose engine lets tenants share, where there are several and nothing says that they may."""
    from greenroom.engines.registry import Isolation, isolation_of

    tenants = {*config.tenants, *(key["tenant"] for key in keys)} - {"default"}
    if len(tenants) < 2:
        return []
    return [
        f"models.{name}: {model.engine} cannot keep tenants apart: what it computed for one can be reused for another, "
        "whose answer then comes sooner. Set isolate_tenants to process, or to off if they may share"
        for name, model in config.models.items()
        if isolation_of(model) is Isolation.SHARED
    ]


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
    from greenroom.engines.registry import engine_for, isolation_of
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
        "isolation": isolation_of(model).value,
    }


def _say(result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        screen.say_json(result)
        return
    screen.say_table(TITLES, [_row(model) for model in result["models"]])
    budget = ", ".join(f"{device['id']} {device['capacity_mib']:,} MiB" for device in result["devices"])
    screen.say(f"budget: {budget}")
    if result["tasks"]:
        screen.say_table(TASK_TITLES, [task_row(task) for task in result["tasks"]])
    if result["keys"]:
        screen.say_table(KEY_TITLES, [key_row(key) for key in result["keys"]])
    if result["governance"] is not None:
        from greenroom.features.governance.keyset import GovernanceReport

        for line in GovernanceReport(**result["governance"]).lines():
            screen.say(line)
    for kind in ("warning", "problem"):
        for text in result[f"{kind}s"]:
            screen.say(f"{kind}: {text}")
    if not result["ok"]:
        screen.say(f"with {result['file']} the gateway does not start: see above")
        return
    screen.say(f"{result['file']} is right" + (", but see above" if result["warnings"] else ""))
    screen.hint(f"serve it: greenroom serve --config {result['file']}")


def _say_environment(loaded: LoadedConfig, as_json: bool) -> None:
    from greenroom.config import environment

    rows = list(environment.shown(loaded.config, os.environ, loaded.places))
    if as_json:
        screen.say_json([dataclasses.asdict(row) for row in rows])
        return
    screen.say_table(ENV_TITLES, [(row.name, row.key or "-", row.origin, _value(row.value)) for row in rows])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else "" if value is None else str(value)


def _origin(source: str) -> str:
    return "name" if source == "name" else "file"


_ISOLATION_NOTES = {"process": "a process for each tenant", "off": "tenants share its cache"}


def _row(model: Mapping[str, Any]) -> Sequence[str]:
    notes = [f"estimated from its {_origin(model['source'])}"] if model["estimated"] and model["memory_mib"] else []
    notes += [word for word in ("pinned", "preload") if model[word]]
    notes += [_ISOLATION_NOTES[model["isolation"]]] if model["isolation"] in _ISOLATION_NOTES else []
    memory = str(model["memory_mib"]) if model["memory_mib"] else "-"
    return (model["id"], model["engine"], memory, ", ".join(notes) or "-")


# --- tasks ------------------------------------------------------------------------------------------------------------


TASK_TITLES: Final = ("task", "candidates", "note")


def all_tasks(config: Config, warnings: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tasks, and warnings for candidates that can never serve them. `warnings` are those of models and remotes."""
    from greenroom.serving.tasks import Tasks

    ids = {name: name for name in config.models}
    ids |= {alias: name for name, model in config.models.items() for alias in model.aliases}
    tasks = Tasks(lambda name: _facts(ids[name], config))
    tasks.configure(config)
    found, wrong = [], []
    for name, task in config.tasks.items():
        route = tasks.find(name)
        assert route is not None
        never = tasks.never(route)
        candidates = []
        for said in task.candidates:
            model = config.models[ids[said]]
            places = tuple(f"{place}: " for place in (f"models.{ids[said]}", f"remotes.{model.remote}"))
            problems = [text for text in warnings if text.startswith(places)]
            problems += [f"it can never serve: {never[said]}"] if said in never else []
            candidates.append(
                {"name": said, "model": ids[said], "remote": model.engine == "remote", "problems": problems}
            )
        if len(never) == len(task.candidates):
            reasons = "; ".join(f"{one}: {why}" for one, why in never.items())
            wrong.append(f"tasks.{name}: no candidate can ever serve it, so requests get 400 no_candidate. {reasons}")
        else:
            wrong += [f"tasks.{name}: {one} can never serve it: {why}" for one, why in never.items()]
        found.append(
            {
                "name": name,
                "candidates": candidates,
                "pin_primary": task.pin_primary,
                "budget_s": task.budget_s,
                "unlisted": task.unlisted,
            }
        )
    return found, wrong


def task_row(task: Mapping[str, Any]) -> Sequence[str]:
    notes = [word for word in ("pin_primary", "unlisted") if task[word]]
    notes += [] if task["budget_s"] is None else [f"budget_s {task['budget_s']:g}"]
    return (task["name"], ", ".join(map(_candidate, task["candidates"])), ", ".join(notes) or "-")


def _candidate(one: Mapping[str, Any]) -> str:
    marks = [*(["remote"] if one["remote"] else []), *(["see below"] if one["problems"] else [])]
    return f"{one['name']} ({', '.join(marks)})" if marks else one["name"]


def _facts(id: str, config: Config) -> CandidateFacts:
    from greenroom.core.model import ModelId
    from greenroom.engines.registry import engine_for, facts_of
    from greenroom.serving.tasks import CandidateFacts

    model = config.models[id]
    engine, facts = engine_for(model), facts_of(model)
    return CandidateFacts.of(
        ModelId(id), model, engine.name, facts.abilities, keeps_json=engine.keeps_json, is_remote=facts.is_remote
    )
