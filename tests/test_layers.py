"""The arrows of the architecture, as a test: imports go down only, and the gateway never imports torch."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import tree_of

SOURCE = Path(__file__).parent.parent / "src" / "greenroom"

# From the ground up. A package may import what lies in rings below its own, besides itself.
RINGS = (
    {"errors", "base"},
    {"core"},
    {"config"},
    # Pure functions of bytes; programs; bytes on wires; figures. `leases` runs inside other people's programs.
    {"dialects", "process", "http", "telemetry", "leases"},
    {"engines", "sim", "importing"},
    # What models are on disk.
    {"library"},
    {"runtime"},
    {"access"},
    {"serving"},
    {"api"},
    {"features"},
    {"app"},
    {"cli"},
)
# Beside the rings: programs for other interpreters, and for those that train.
APART = {"workers": (), "trainer": ("features.versions.desired",)}
# Lower, and yet not for these: what they are about does not need it.
NEVER = {
    # Pure functions of bytes.
    "dialects": {"core"},
    # A world of its own.
    "sim": {"dialects", "process", "http", "telemetry", "leases"},
    # A running gateway neither simulates nor imports; its commands do.
    **{
        package: {"sim", "importing"}
        for package in ("library", "runtime", "access", "serving", "api", "features", "app")
    },
    "importing": {"dialects", "process", "http", "telemetry", "leases"},
    "engines": {"dialects", "http", "telemetry", "leases"},
}
# Features know of each other what is written here, by the part that they import.
FEATURE_ARROWS = {
    "operations": {"library"},
    "versions": {"library", "operations"},
    "jobs": {"pictures"},
    "planning": {"leases"},
    "governance": {"library", "versions"},
}
# Commands belong to the ring of `cli`, wherever they lie.
COMMANDS = "cli"
# The core is pure: nothing that waits, reads a clock, does I/O, logs or draws numbers.
CORE_MAY_IMPORT = {"__future__", "bisect", "collections", "dataclasses", "enum", "heapq", "itertools", "math", "typing"}
# What others may import of the core. All else is its own: they ask the view that the scheduler gives.
CORE_IS_SEEN_BY = {"model", "events", "effects", "contract", "scheduler", "plain", "view", "explain", "policy"}
# The simulated world knows where a sleeping copy lies without asking the scheduler that it judges.
# An engine finds its parts in its shares by the arithmetic with which they were planned.
CORE_IS_ALSO_SEEN_BY = {"sim/player.py": {"decide.placement"}, "engines/builtin/diffusers.py": {"packing"}}
# Programs for child processes that must start quickly or under another Python: the standard library and one engine.
STANDALONE = {
    "process/keeper.py": set(),
    "workers/launch.py": set(),
    "workers/llamacpp_server.py": {"xllamacpp"},
    "workers/torch_host/sandbox/program.py": set(),
    "workers/torch_host/sandbox/template_job.py": {"jinja2"},
    "workers/torch_host/sandbox/schema_job.py": {"llguidance"},
}
# Worker programs are packages that name each other relatively, because they are started by path under another Python.
# Each may use what its engine brings.
WORKERS = SOURCE / "workers"
WORKER_PACKAGES = {
    "serving": {"h11"},
    "comfyui": {"h11"},
    "fetching": {"huggingface_hub", "certifi"},
    "whisper": {"faster_whisper", "av", "numpy", "h11"},
    "torch_host": {
        *("torch", "transformers", "safetensors", "tokenizers", "h11", "jinja2", "llguidance", "triton", "numpy"),
        *("diffusers", "PIL"),
    },
}


@functools.cache
def looked_at(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Attribute]:
    """What the tests below look at in a file. To read all takes seconds, and to walk every expression as many again."""
    text = path.read_text()
    tree = tree_of(text)
    may_take_state = "scheduler" in text and ".state" in text
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)] if may_take_state else []
    return [*import_statements(tree), *attributes]


def import_statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All of them, however deep: a statement is found inside others, never inside an expression."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inside in getattr(node, field, ()):
            yield from import_statements(inside)


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in looked_at(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or path.is_relative_to(WORKERS), f"{path} imports relatively"
            if node.level:
                continue
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module else set()
    return found


def ring_of(module: str) -> int:
    """The ring of a module, `greenroom` left out."""
    package, _, rest = module.partition(".")
    if package == "features" and re.fullmatch(r"cli(_\w+)?", rest.rpartition(".")[2]):
        package = COMMANDS
    return next(ring for ring, packages in enumerate(RINGS) if package in packages)


def is_allowed(mine: str, theirs: str) -> bool:
    """Both are modules, `greenroom` left out."""
    package, other = mine.partition(".")[0], theirs.partition(".")[0]
    if other in RINGS[0] or package == other != "features":
        return True
    if package in APART:
        return theirs in APART[package]
    if other in APART:
        return other == "trainer" and ring_of(mine) == ring_of(COMMANDS)
    if other in NEVER.get(package, ()) and ring_of(mine) != ring_of(COMMANDS):
        return False
    if ring_of(mine) != ring_of(theirs):
        return ring_of(theirs) < ring_of(mine)
    if ring_of(mine) == ring_of(COMMANDS):
        return True
    feature, asked = (module.split(".")[1] for module in (mine, theirs))
    return package == other and (asked == feature or asked in FEATURE_ARROWS.get(feature, ()))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_only(path: Path) -> None:
    mine = _module(path).removeprefix("greenroom").removeprefix(".")
    if mine in ("", "__main__"):
        return
    theirs = {name.removeprefix("greenroom.") for name in _imported(path)}
    forbidden = {name for name in theirs if not is_allowed(mine, name)}
    assert not forbidden, f"{path} imports {forbidden}"


@pytest.mark.parametrize(
    "path", sorted((SOURCE / "core").rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_core_is_pure(path: Path) -> None:
    foreign = {name.split(".")[0] for name in imports(path)} - {"greenroom"} - CORE_MAY_IMPORT
    assert not foreign, f"core may not import {foreign}"


@pytest.mark.parametrize(
    "path",
    sorted(path for path in SOURCE.rglob("*.py") if not path.is_relative_to(SOURCE / "core")),
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_the_state_of_the_core_is_seen_through_its_view(path: Path) -> None:
    mine = [name.removeprefix("greenroom.core.") for name in imports(path) if name.startswith("greenroom.core.")]
    also = CORE_IS_ALSO_SEEN_BY.get(str(path.relative_to(SOURCE)), set())
    hidden = [
        name for name in mine if name.split(".")[0] not in CORE_IS_SEEN_BY and name.rpartition(".")[0] not in also
    ]
    assert not hidden, f"{path} reaches into the core: {hidden}"
    attributes = [node for node in looked_at(path) if isinstance(node, ast.Attribute)]
    reached = [node.lineno for node in attributes if node.attr == "state" and _is_scheduler(node.value)]
    assert not reached, f"{path} takes the scheduler's state at {reached}"


def _is_scheduler(node: ast.AST) -> bool:
    return "scheduler" in (node.id if isinstance(node, ast.Name) else getattr(node, "attr", ""))


@pytest.mark.parametrize("name", sorted(STANDALONE))
def test_programs_for_child_processes_stand_alone(name: str) -> None:
    foreign = {word.split(".")[0] for word in imports(SOURCE / name)} - set(sys.stdlib_module_names)
    assert foreign <= STANDALONE[name]
    # They are started by path, where there is no package to name relatively.
    assert not [node for node in looked_at(SOURCE / name) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("path", sorted(WORKERS.glob("*/**/*.py")), ids=lambda path: str(path.relative_to(WORKERS)))
def test_worker_programs_stand_alone(path: Path) -> None:
    foreign = {word.split(".")[0] for word in imports(path)} - set(sys.stdlib_module_names)
    assert foreign <= WORKER_PACKAGES[path.relative_to(WORKERS).parts[0]]


def test_gateway_process_never_imports_heavy_packages() -> None:
    # The client of Redis is only imported where leases are kept there.
    heavy = ("torch", "numpy", "xllamacpp", "gguf", "redis")
    code = f"import sys, greenroom.app; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_files_import_each_other_in_no_circle() -> None:
    """Imports inside functions and for types alone count, too: they tie files together just the same."""
    graph = {_module(path): _imported(path) for path in SOURCE.rglob("*.py")}
    graphlib.TopologicalSorter(graph).prepare()


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path) -> set[str]:
    package = _module(path).split(".")[: None if path.name == "__init__.py" else -1]
    names = set()
    for node in looked_at(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # A name is a module of its own, or something that the module it is taken from holds.
            names |= {f"{base}.{alias.name}" if _is_ours(f"{base}.{alias.name}") else base for alias in node.names}
    return {name for name in names if _is_ours(name)} - {_module(path)}


@functools.cache
def _is_ours(name: str) -> bool:
    file = SOURCE.parent.joinpath(*name.split("."))
    return name.startswith("greenroom.") and (file.with_suffix(".py").exists() or (file / "__init__.py").exists())
