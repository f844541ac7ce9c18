"""`greenroom engines`: which engines there are, what is installed for each and where, and what to type for the rest."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import screen
from greenroom.cli.failures import Exit
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from greenroom.cli.installed import Package
    from greenroom.config.schema import Config, Model

NAME = "engines"
HELP = "Say which engines are installed, in which Python or program, and what to type to install the rest."
TITLES: Final = ("engine", "installed", "version", "models", "where")
# Models named in a line; --json has them all.
NAMED_MAX: Final = 5

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="whose models to look at (default: as for serve)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    config, why_empty = _config(args.config)
    found = looked_at(config)
    if args.json:
        screen.say_json({"engines": found})
        return Exit.OK
    screen.say_table(TITLES, [_shown(row) for row in found])
    for row in found:
        for line in _advice(row):
            screen.say(line)
    if why_empty is not None:
        screen.note(why_empty)
    return Exit.OK


def _config(given: str | None) -> tuple[Config, str | None]:
    """The configuration, or an empty one and why it is: engines are there without models too."""
    from greenroom.config import loader
    from greenroom.config.schema import Config

    if given is not None:
        return loader.load(loader.find(given)).config, None
    try:
        file = loader.find(None)
    except ConfigError:
        return Config(), "no configuration here, so no models; name one with --config"
    try:
        return loader.load(file).config, None
    except ConfigError:
        return Config(), f"{file} cannot be used, so no models; `greenroom check` says what is wrong with it"


def looked_at(config: Config) -> list[Row]:
    """One row for each engine and each place it runs from; engines that no model uses have their usual place."""
    from greenroom.engines.registry import ENGINES, engine_for

    look: Mapping[str, Callable[..., Row]] = {"llamacpp": _llamacpp, "transformers": _transformers, "command": _command}
    places: dict[str, dict[tuple[str | None, ...], list[str]]] = {name: {} for name in ENGINES}
    for name, model in config.models.items():
        engine = engine_for(model).name
        places[engine].setdefault(_place(engine, model), []).append(name)
    return [
        {**look[engine](*place), "models": models}
        for engine, found in places.items()
        for place, models in (found or _usual(engine)).items()
    ]


def _place(engine: str, model: Model) -> tuple[str | None, ...]:
    from greenroom.config.kinds import words

    if engine == "command":
        return (words(model.cmd or ())[0],)
    return (model.program, model.python) if engine == "llamacpp" else (model.python,)


def _usual(engine: str) -> dict[tuple[str | None, ...], list[str]]:
    return {(None, None) if engine == "llamacpp" else (None,): []}


# --- one place ------------------------------------------------------------------------------------------------------


def _transformers(python: str | None) -> Row:
    from greenroom.cli.installed import TRANSFORMERS

    return _in_python("transformers", python, TRANSFORMERS)


def _llamacpp(program: str | None, python: str | None) -> Row:
    """The operator's binary, else the one on PATH unless a Python was named, else the embedded build."""
    from greenroom.cli.installed import LLAMACPP, ask_program

    binary = shutil.which(program or "llama-server") if program is not None or python is None else None
    if binary is not None:
        version = ask_program(binary)
        return _row("llamacpp", True, binary, {} if version is None else {"llama-server": version})
    if program is not None:
        return _row("llamacpp", False, program, {}, why=f"there is no program {program}; correct `program`")
    row = _in_python("llamacpp", python, LLAMACPP)
    if not row["installed"] and python is None:
        row["install"] += ", or put llama-server on PATH"
    return row


def _command(program: str | None) -> Row:
    """Which programs there are is the operator's to say, with `cmd`."""
    if program is None:
        return _row("command", True, "any program that listens on a port", {})
    found = shutil.which(program)
    why = None if found else f"there is no program {program}; install it or correct `cmd`"
    return _row("command", found is not None, found or program, {}, why=why)


def _in_python(engine: str, python: str | None, wanted: Sequence[Package]) -> Row:
    from greenroom.cli.installed import ask_python, install_words

    found = ask_python(python or sys.executable, wanted)
    missing = found.lacks(wanted)
    needed = [one for one in missing if not one.optional]
    install = install_words(python, missing, engine) if missing and found.why is None else None
    row = _row(engine, found.why is None and not needed, python or sys.executable, found.versions, found.why, install)
    row["python"] = found.python
    row["missing"] = [
        {"package": one.name, "at_least": one.at_least, "for": one.job, "optional": one.optional}
        for one in (missing if found.why is None else ())
    ]
    return row


def _row(
    engine: str,
    installed: bool,
    where: str,
    versions: Mapping[str, str],
    why: str | None = None,
    install: str | None = None,
) -> Row:
    return {
        "engine": engine,
        "installed": installed,
        "where": where,
        "python": None,
        "versions": dict(versions),
        "missing": [],
        "why": why,
        "install": install,
    }


# --- shown ----------------------------------------------------------------------------------------------------------


def _shown(row: Row) -> tuple[str, ...]:
    versions = ",".join(f"{name}={version}" for name, version in row["versions"].items())
    models = row["models"]
    more = f",+{len(models) - NAMED_MAX}" if len(models) > NAMED_MAX else ""
    state = "yes" if row["installed"] else "no"
    if row["installed"] and row["missing"]:
        state = "mostly"
    return (row["engine"], state, versions or "-", ",".join(models[:NAMED_MAX]) + more or "-", row["where"])


def _advice(row: Row) -> list[str]:
    """What is missing, what for, and what to type."""
    if row["why"] is not None:
        return [f"{row['engine']}: {row['why']}"]
    lines = []
    for one in row["missing"]:
        there = row["versions"].get(one["package"])
        state = "is missing" if there is None else f"{there} is too old, {one['at_least']} will do"
        lines.append(f"{row['engine']}: {one['package']} {state} ({one['for']}) in {row['where']}")
    return [*lines, *([f"  {row['install']}"] if row["install"] else [])]
