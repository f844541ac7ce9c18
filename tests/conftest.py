"""What holds for every test: signals as a terminal gives them, which garbage is looked for, and an end to teardowns."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
from collections.abc import Generator

import pytest

# A test that has failed is no longer watched by its timeout, and may have left behind what its teardown waits for.
TEARDOWN_S = 120.0


def _be_as_in_the_foreground() -> None:
    """A shell without job control has what it starts in the background ignore these, and so would our programs."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


_be_as_in_the_foreground()


def _draw_the_same_examples() -> None:
    """A change is judged by the same examples every time; `HYPOTHESIS_PROFILE=long` draws others at each run.

    An example may take its time: by default one fails that takes 0.2 s, which any does on a busy machine now and then.
    """
    # The environment with torch has no Hypothesis.
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("greenroom", deadline=None, derandomize="HYPOTHESIS_PROFILE" not in os.environ)
        settings.load_profile("greenroom")


_draw_the_same_examples()
# What a process says at its end must not be lost, so it goes where nothing is captured.
_UNCAPTURED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_UNCAPTURED] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live until the end. Garbage collectors that look at them again took a sixth of all the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(TEARDOWN_S, exit=True, file=item.config.stash[_UNCAPTURED])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
