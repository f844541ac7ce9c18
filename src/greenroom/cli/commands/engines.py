"""`greenroom engines`: which engines there are, what is installed for each and where, and what to type for the rest.

Owns the list of packages that each engine needs. Never imports any of them: each interpreter or program is asked for
its versions by a short child process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from greenroom.config.schema import Config, Model

TITLES: Final = ("engine", "installed", "version", "models", "where")
# Models named in one line; --json has them all.
NAMED_MAX: Final = 5

SERVERS: Final = ("vllm", "sglang")

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="whose models to look at (default: as for serve)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> None:
    config, why_empty = _config(args.config)
    found = looked_at(config)
    if args.json:
        screen.say_json({"engines": found})
        return
    screen.say_table(TITLES, [_shown(row) for row in found])
    for row in found:
        for line in _advice(row):
            screen.say(line)
    if why_empty is not None:
        screen.note(why_empty)


COMMAND = Subcommand(
    "engines",
    "Show which engines are installed, in which Python or program, and how to install the rest.",
    add_options,
    run,
)


def _config(given: str | None) -> tuple[Config, str | None]:
    """The configuration; or an empty one, and the reason: engines are listed without models too."""
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


def looked_at(config: Config, *, with_unused: bool = True) -> list[Row]:
    """One row for each engine and each place it runs from; the default place of those that no model uses."""
    from greenroom.engines.registry import ENGINES

    look: dict[str, Callable[..., Row]] = {"llamacpp": _llamacpp, "comfyui": _comfyui, "command": _command}
    look["remote"] = _remote
    look |= {name: functools.partial(_in_python, name) for name in HOSTED}
    look |= {name: functools.partial(_server, name) for name in SERVERS}
    others = [name for name in ENGINES if name not in look]
    look |= {name: functools.partial(_of_package, name) for name in others}
    places: dict[str, dict[tuple[str | None, ...], list[str]]] = {name: {} for name in ENGINES}
    for name, model in config.models.items():
        engine = model.engine or ""
        places[engine].setdefault(_place(engine, model), []).append(name)
    rows = [
        {**look[engine](*place), "models": models}
        for engine, found in places.items()
        for place, models in (found or (_usual(engine) if with_unused else {})).items()
    ]
    return [_asked(row, config) if row["engine"] in others else row for row in rows]


def _asked(row: Row, config: Config) -> Row:
    """The row of another package's engine, with what it says its models lack."""
    from greenroom.engines.registry import engine_for

    if not row["installed"]:
        return row
    models = (config.models[name] for name in row["models"])
    why = next(filter(None, (engine_for(model).missing(model) for model in models)), None)
    return {**row, "installed": why is None, "why": why}


def _place(engine: str, model: Model) -> tuple[str | None, ...]:
    from greenroom.config.kinds import words

    if engine == "command":
        return (words(model.cmd or ())[0],)
    if engine == "remote":
        return (model.remote,)
    if engine == "comfyui":
        return (model.path or words(model.cmd or ())[0],)
    if engine == "llamacpp" or engine in SERVERS:
        return model.program, model.python
    return (model.python,) if engine in HOSTED else ()


def _usual(engine: str) -> dict[tuple[str | None, ...], list[str]]:
    usual: dict[str, tuple[str | None, ...]] = dict.fromkeys((*HOSTED, "comfyui", "command", "remote"), (None,))
    return {(None, None) if engine == "llamacpp" or engine in SERVERS else usual.get(engine, ()): []}


# --- one place ------------------------------------------------------------------------------------------------------


def _llamacpp(program: str | None, python: str | None) -> Row:
    """The operator's binary, else the one on PATH unless a Python was named, else the embedded build."""
    binary = shutil.which(program or "llama-server") if program is not None or python is None else None
    if binary is not None:
        version = ask_program(binary)
        return _row("llamacpp", True, binary, {} if version is None else {"llama-server": version})
    if program is not None:
        return _row("llamacpp", False, program, {}, why=f"there is no program {program}; correct `program`")
    row = _in_python("llamacpp", python)
    if not row["installed"] and python is None:
        row["install"] += ", or put llama-server on PATH"
    return row


def _server(engine: str, program: str | None, python: str | None) -> Row:
    """vLLM or SGLang: the program that a model names or that is on PATH, else the package of a Python."""
    from greenroom.config.schema import Model
    from greenroom.engines.registry import engine_named

    why = engine_named(engine).missing(Model(engine=engine, path="/", program=program, python=python))
    where = program or python or shutil.which(engine) or sys.executable
    found = ask_python(where, [RequiredPackage(engine, "0", "serves")]) if program is None and python else None
    if found is not None and why is None and not found.versions:
        why = found.why or f"{engine} is not installed in {python}; type: {python} -m pip install {engine}"
    return _row(engine, why is None, where, {} if found is None else found.versions, why=why)


def _command(program: str | None) -> Row:
    """The program of a `cmd`; without one, the engine as such."""
    if program is None:
        return _row("command", True, "any program that listens on a port", {})
    found = shutil.which(program)
    why = None if found else f"there is no program {program}; install it or correct `cmd`"
    return _row("command", found is not None, found or program, {}, why=why)


def _remote(provider: str | None) -> Row:
    """Nothing has to be installed: the provider is called over the network."""
    return _row("remote", True, "providers in `remotes`" if provider is None else f"remotes.{provider}", {})


def _comfyui(place: str | None) -> Row:
    """The installation or the program that a model names; without one, what the gateway itself needs for it."""
    row = _in_python("comfyui", None)
    if place is None or not row["installed"]:
        return row
    is_folder = os.path.isdir(place)
    there = os.path.isfile(os.path.join(place, "main.py")) if is_folder else shutil.which(place) is not None
    return {**row, "installed": there, "where": place, "why": None if there else f"there is no ComfyUI at {place}"}


def _of_package(name: str) -> Row:
    """An engine of another package: whether it can be used, and the version of the package."""
    from importlib.metadata import entry_points

    from greenroom.config.plugins import ENGINE_GROUP
    from greenroom.engines.registry import engine_named

    entry = next(one for one in entry_points(group=ENGINE_GROUP) if one.name == name)
    try:
        engine_named(name)
        why = None
    except ConfigError as error:
        why = error.message
    versions = {entry.dist.name: entry.dist.version} if entry.dist is not None else {}
    return _row(name, why is None, entry.value, versions, why=why)


def _in_python(engine: str, python: str | None) -> Row:
    wanted = PACKAGES_OF[engine]
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
    """Lines that say what is missing, what it is for, and how to install it."""
    if row["why"] is not None:
        return [f"{row['engine']}: {row['why']}"]
    lines = []
    for one in row["missing"]:
        there = row["versions"].get(one["package"])
        state = "is missing" if there is None else f"{there} is too old, {one['at_least']} will do"
        lines.append(f"{row['engine']}: {one['package']} {state} ({one['for']}) in {row['where']}")
    return [*lines, *([f"  {row['install']}"] if row["install"] else [])]


# --- what is installed ----------------------------------------------------------------------------------------------


# Reading metadata takes a tenth of a second, on a cold disk some seconds.
ASK_MAX_S: Final = 20.0
_ASK: Final = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except Exception:
        pass
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "found": found}))
"""
_VERSION: Final = re.compile(r"version:?\s+(\S+)")
_NUMBERS: Final = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class RequiredPackage:
    """A package, its lowest version, and what it is for. Without an optional one only some requests fail."""

    name: str
    at_least: str
    job: str
    optional: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.name}>={self.at_least}"


_H11: Final = RequiredPackage("h11", "0.16", "reads HTTP requests")
_TORCH: Final = RequiredPackage("torch", "2.11", "computes, on GPUs and on the CPU")
# The same as the extra of that name in pyproject.toml; a test compares them.
PACKAGES_OF: Final[Mapping[str, Sequence[RequiredPackage]]] = {
    "transformers": (
        _TORCH,
        RequiredPackage("transformers", "5.17", "knows the models' shapes and their tokenizers"),
        _H11,
        RequiredPackage("jinja2", "3.1.6", "renders chat templates"),
        RequiredPackage("llguidance", "1.0", "keeps answers to a JSON schema", optional=True),
    ),
    "diffusers": (
        _TORCH,
        RequiredPackage("transformers", "5.17", "knows text encoders and their tokenizers"),
        RequiredPackage("diffusers", "0.42", "knows the pipelines"),
        RequiredPackage("pillow", "11.0", "reads and writes pictures"),
        _H11,
    ),
    "whisper": (RequiredPackage("faster-whisper", "1.2", "transcribes, with CTranslate2"), _H11),
    "llamacpp": (RequiredPackage("xllamacpp", "2026.10", "llama.cpp's own server as a package"),),
    "comfyui": (RequiredPackage("h11", "0.16", "reads and writes HTTP"),),
}
# Engines whose programs are ours and run under a Python of the model's.
HOSTED: Final = ("transformers", "diffusers", "whisper")


@dataclass(frozen=True, slots=True)
class InstalledPackages:
    """The versions found. `why` is set if the interpreter could not be asked."""

    python: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    why: str | None = None

    def lacks(self, wanted: Sequence[RequiredPackage]) -> list[RequiredPackage]:
        """The packages that are missing or too old."""
        return [one for one in wanted if not _will_do(self.versions.get(one.name), one.at_least)]


def ask_python(python: str, wanted: Sequence[RequiredPackage], max_s: float = ASK_MAX_S) -> InstalledPackages:
    """The versions of these packages in this interpreter. Never raises."""
    found = shutil.which(python)
    if found is None:
        return InstalledPackages(why=f"there is no Python {python}")
    said = _said([found, "-c", _ASK, *(one.name for one in wanted)], max_s)
    try:
        answer = json.loads(said or "")
        return InstalledPackages(str(answer["python"]), dict(answer["found"]))
    except (ValueError, LookupError, TypeError):
        return InstalledPackages(why=f"{python} does not answer like a Python")


def ask_program(program: str, max_s: float = ASK_MAX_S) -> str | None:
    """The version that `PROGRAM --version` prints, if any. Never raises."""
    match = _VERSION.search(_said([program, "--version"], max_s) or "")
    return match[1] if match else None


def install_words(python: str | None, missing: Sequence[RequiredPackage], extra: str) -> str:
    """The command that installs them: our own extra for our own Python, the packages for another."""
    if python is None:
        return f"{sys.executable} -m pip install 'greenroom[{extra}]'"
    return f"{python} -m pip install " + " ".join(f"'{one.requirement}'" for one in missing)


def _said(command: list[str], max_s: float) -> str | None:
    """What the command prints. It runs in /, so that files in the current folder cannot pass for packages."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max_s,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _will_do(version: str | None, at_least: str) -> bool:
    return version is not None and _numbers(version) >= _numbers(at_least)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13, 0)."""
    match = _NUMBERS.match(version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
