"""Each kind of state has one writer: slots are changed in `slots.py`, waiters and queues in `waitlist.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import greenroom.core
from tests.syntax import tree_of

# These read sources and run none of them.
pytestmark = pytest.mark.untraced
CORE = Path(greenroom.core.__file__).parent
# What the names that hold such a thing are, and the files that may change it.
WRITERS = {
    "slot": ({"slot", "victim", "newcomer", "sleeper"}, {"slots.py", "model.py"}),
    "waiter": ({"waiter", "head", "first"}, {"queue/waitlist.py", "queue/waiter.py"}),
    "queue": ({"queue", "joined"}, {"queue/waitlist.py"}),
    "ledger": ({"ledger"}, {"ledger.py"}),
    "waitlist": ({"waitlist"}, {"queue/waitlist.py"}),
}
# Methods that change the queue, and the only module that calls them on behalf of others.
QUEUE_CHANGES = {"add", "remove", "mark_failed", "strike"}
MEMORY_CHANGES = {"hold", "promise", "unpromise", "leave", "stay", "release"}


def changed(path: Path) -> Iterator[tuple[str, str]]:
    """Every attribute that is set or deleted, with the name of what has it."""
    for node in ast.walk(tree_of(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield _name(node.value), node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and _is_changed(node):
            yield _name(node.value.value), node.value.attr


def _is_changed(node: ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def called(path: Path, of: str) -> Iterator[str]:
    for node in ast.walk(tree_of(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name(node.func.value) == of:
            yield node.func.attr


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


FILES = sorted(CORE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_state_is_changed_by_its_writer_alone(path: Path) -> None:
    name = str(path.relative_to(CORE))
    for kind, (held_as, writers) in WRITERS.items():
        if name not in writers:
            assert not [one for one in changed(path) if one[0] in held_as], f"{name} changes a {kind}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_queue_and_ledger_are_changed_only_by_their_own_modules(path: Path) -> None:
    name = str(path.relative_to(CORE))
    if name not in ("apply.py", "queue/waitlist.py"):
        assert not QUEUE_CHANGES.intersection(called(path, "waitlist")), name
    if name not in ("slots.py", "ledger.py"):
        assert not MEMORY_CHANGES.intersection(called(path, "ledger")), name
