"""Whether a load that failed ran out of memory."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import cast

import pytest

from greenroom.process.spawn import Child, Exit
from greenroom.runtime.moves.load_errors import evidence_of_no_memory

COMPLAINT = "CUDA error: out of memory"
# How often the kernel had ended something before the load.
KILLS = 7
KILLED = Exit(None, signal.SIGKILL)


def child(exit: Exit | None = None) -> Child:
    return cast(Child, SimpleNamespace(exit=exit or Exit(1, None)))


def test_what_this_load_printed_counts() -> None:
    assert evidence_of_no_memory(child(), ["loading", COMPLAINT, "bye"], 0) == COMPLAINT
    assert evidence_of_no_memory(child(), ["no such file"], 0) is None


@pytest.mark.parametrize("exit", [KILLED, Exit(137, None)])
def test_a_process_killed_while_the_kernel_killed_for_memory_ran_out_of_it(exit: Exit) -> None:
    found = evidence_of_no_memory(child(exit), [], KILLS, lambda: KILLS + 1)
    assert "host's memory" in (found or "")


@pytest.mark.parametrize("exit", [Exit(1, None), Exit(None, signal.SIGTERM)])
def test_a_process_that_ended_otherwise_meanwhile_did_not_run_out_of_memory(exit: Exit) -> None:
    assert evidence_of_no_memory(child(exit), [], KILLS, lambda: KILLS + 1) is None


def test_a_process_that_was_not_killed_by_the_kernel_did_not_run_out_of_memory() -> None:
    assert evidence_of_no_memory(child(KILLED), [], KILLS, lambda: KILLS) is None
