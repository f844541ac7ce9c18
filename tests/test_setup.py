"""The compiled build is asked for by name, and each name means something."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.syntax import tree_of

ROOT = Path(__file__).resolve().parent.parent


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("greenroom_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.chdir(ROOT)
    return load_setup()


def test_every_name_on_the_list_finds_a_file(build: ModuleType) -> None:
    for pattern in (*build.HOT, *build.NOT_HOT):
        assert list((ROOT / build.PACKAGE).glob(pattern)), pattern


def test_all_of_the_core_and_of_http_is_compiled(build: ModuleType) -> None:
    files = {file.removeprefix("src/greenroom/") for file in build.hot_files()}
    source = ROOT / build.PACKAGE
    whole = {
        str(path.relative_to(source))
        for part in ("core", "http")
        for path in (source / part).rglob("*.py")
        if path.name not in ("__init__.py", "invariants.py")
    }
    assert whole <= files and not [file for file in files if file.endswith(("__init__.py", "invariants.py"))]


def classes(path: Path) -> dict[str, list[str]]:
    """The classes of a file at its top level, with the names of their bases."""
    found = (node for node in tree_of(path.read_text()).body if isinstance(node, ast.ClassDef))
    return {one.name: [base.id for base in one.bases if isinstance(base, ast.Name)] for one in found}


def test_constants_of_compiled_modules_are_final(build: ModuleType) -> None:
    """Others are looked up in a dictionary at each use."""
    for file in build.hot_files():
        assigned = (node for node in tree_of((ROOT / file).read_text()).body if isinstance(node, ast.Assign))
        names = [target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)]
        assert not [name for name in names if name.isupper()], file


def test_fields_of_compiled_structs_are_plain_classes(build: ModuleType) -> None:
    """Of any other annotation the compiler leaves `type`, and such a field can never be decoded."""
    for file in build.hot_files():
        structs = (
            node
            for node in tree_of((ROOT / file).read_text()).body
            if isinstance(node, ast.ClassDef) and "Struct" in {ast.unparse(base).split(".")[-1] for base in node.bases}
        )
        fields = [line for struct in structs for line in struct.body if isinstance(line, ast.AnnAssign)]
        odd = [ast.unparse(field) for field in fields if not isinstance(field.annotation, ast.Name)]
        assert not odd, f"{file} must not be in HOT, or its classes must lie elsewhere: {odd}"


def test_no_python_class_inherits_from_a_compiled_one(build: ModuleType) -> None:
    """Such a module is imported and fails when its class is used. Errors may: compiled, they stay Python classes."""
    hot = {ROOT / file for file in build.hot_files()}
    compiled = {name for file in hot if file.name != "errors.py" for name in classes(file)}
    for path in sorted(set((ROOT / build.PACKAGE).rglob("*.py")) - hot):
        own, taken = classes(path), _taken_from(path, hot)
        bad = [name for name, bases in own.items() if any(base in taken & compiled for base in bases)]
        assert not bad, f"{path} must be in HOT: {bad}"


def _taken_from(path: Path, files: set[Path]) -> set[str]:
    """The names that it imports from these files."""
    modules = {".".join(file.relative_to(ROOT / "src").with_suffix("").parts) for file in files}
    nodes = [node for node in ast.walk(tree_of(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes if node.module in modules for alias in node.names}


def awaits_while_handling(source: str) -> list[int]:
    """The lines that wait inside of `except` or `finally`."""
    handling = [
        part
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.Try)
        for part in (*node.handlers, *node.finalbody)
    ]
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
    return [node.lineno for part in handling for node in ast.walk(part) if isinstance(node, waits)]


def test_no_compiled_coroutine_waits_while_it_handles_an_exception(build: ModuleType) -> None:
    """Compiled code would leave the exception behind as the one being handled, for whatever runs next.

    All that is raised after it then holds it, and so each holds the one before, without end.
    """
    for bad in ("except E:\n  await x", "finally:\n  async with x: pass", "except E:\n  if y:\n   yield 1"):
        assert awaits_while_handling(f"async def f():\n try: pass\n {bad}"), bad
    assert not awaits_while_handling("async def f():\n try: await x\n except E: pass\n await x")
    assert {file: lines for file in build.hot_files() if (lines := awaits_while_handling(Path(file).read_text()))} == {}


def slices_of_expressions(source: str) -> list[int]:
    """The lines that take the first few of a generator expression, written there or bound to a name before."""
    nodes = list(ast.walk(tree_of(source)))
    bound = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.GeneratorExp)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def is_eager(call: ast.Call, name: str) -> bool:
        is_written_there = name != "next" and any(isinstance(one, ast.GeneratorExp) for one in call.args)
        return is_written_there or any(isinstance(one, ast.Name) and one.id in bound for one in call.args)

    calls = [(node, node.func.id) for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    takes = [(call, name) for call, name in calls if name in ("islice", "takewhile", "next")]
    return [call.lineno for call, name in takes if is_eager(call, name)]


def test_compiled_code_does_not_take_the_first_few_of_a_generator_expression(build: ModuleType) -> None:
    """Compiled, a generator expression is a list that is made at once, however many of it are asked for.

    Written inside of `next(…)`, `any(…)` or `all(…)` it is a loop that ends early in both builds.
    """
    assert slices_of_expressions("islice((x for x in y if x), 4)") == [1] and not slices_of_expressions("islice(y, 4)")
    assert slices_of_expressions("z = (x for x in y)\nnext(z, None)\nislice(z, 4)") == [2, 3]
    assert not slices_of_expressions("next((x for x in y if x), None)")
    assert {file: lines for file in build.hot_files() if (lines := slices_of_expressions(Path(file).read_text()))} == {}


@pytest.mark.parametrize(("said", "needed"), [("1", True), ("0", False), ("", False)])
def test_compiler_is_required_only_when_asked_for(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, said: str, needed: bool
) -> None:
    monkeypatch.setenv("GREENROOM_COMPILE", said)
    assert any(name.startswith("mypy") for name in build.build_requirements()) is needed
