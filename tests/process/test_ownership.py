from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from greenroom.process import proc
from greenroom.process.proc import IDENTITY_VARIABLE

# A process that starts another one and waits with it until its input ends.
PARENT = "import subprocess, sys; c = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'input()'], env={}); "
PARENT += "print(c.pid, flush=True); input(); c.wait()"


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process with an identity, and its child, which was given none."""
    env = {IDENTITY_VARIABLE: "gate:run:s7.1"}
    command = [sys.executable, "-I", "-S", "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        yield parent.pid, int(parent.stdout.readline())
        assert parent.stdin is not None
        parent.stdin.close()


def by_identity(identity: str) -> str | None:
    return "s7" if identity.startswith("gate:run:") else None


def no_owner(_: str) -> None:
    return None


def test_a_process_is_its_identitys_and_so_is_what_it_started(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.owners_of([parent, child], {}, by_identity) == {parent: "s7", child: "s7"}


def test_a_process_below_a_known_one_is_its_owners(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.owners_of([parent, child], {parent: "trainer"}, no_owner) == {parent: "trainer", child: "trainer"}


def test_the_nearest_owner_counts(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.owner_of(child, {parent: "near", os.getpid(): "far"}, no_owner) == "near"


def test_foreign_and_ended_processes_have_no_owner(family: tuple[int, int]) -> None:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    ended.wait()
    assert proc.owners_of([*family, ended.pid, 1], {}, no_owner) == {}


def test_a_tree_is_everything_at_or_below_its_root(family: tuple[int, int]) -> None:
    parent, child = family
    assert proc.trees({parent: "s7"}) == {"s7": {parent, child}}
    assert proc.trees({child: "a", parent: "b"}) == {"a": {child}, "b": {parent}}
    assert proc.trees({}) == {}


def test_a_process_has_a_name_while_it_lives() -> None:
    assert proc.name_of(os.getpid())
    assert proc.name_of(2**30) is None
