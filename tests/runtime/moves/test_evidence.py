"""Whether a load that failed ran out of memory."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import cast

import pytest

from greenroom.process.spawn import Child, Exit
from greenroom.runtime.moves.load_errors import Evidence

COMPLAINT = "CUDA error: out of memory"
KILLED = Exit(None, signal.SIGKILL)


def child(exit: Exit | None = None) -> Child:
    return cast(Child, SimpleNamespace(exit=exit or Exit(1, None)))


@pytest.fixture
def kills() -> list[int]:
    """How often the kernel has ended something; a test may add to it."""
    return [7]


def test_what_this_load_printed_counts() -> None:
    assert Evidence().of_no_memory(child(), ["loading", COMPLAINT, "bye"]) == COMPLAINT
    assert Evidence().of_no_memory(child(), ["no such file"]) is None


@pytest.mark.parametrize("exit", [KILLED, Exit(137, None)])
def test_who_was_killed_while_the_kernel_killed_for_memory_ran_out_of_it(kills: list[int], exit: Exit) -> None:
    found = Evidence(lambda: sum(kills))
    kills.append(1)
    assert "host's memory" in (found.of_no_memory(child(exit), []) or "")


@pytest.mark.parametrize("exit", [Exit(1, None), Exit(None, signal.SIGTERM)])
def test_who_ended_otherwise_meanwhile_did_not(kills: list[int], exit: Exit) -> None:
    found = Evidence(lambda: sum(kills))
    kills.append(1)
    assert found.of_no_memory(child(exit), []) is None


def test_who_was_killed_by_somebody_else_did_not() -> None:
    assert Evidence(lambda: 7).of_no_memory(child(KILLED), []) is None
