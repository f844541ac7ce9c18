"""What all tests rely on: examples that may take long, and what is imported only when it is used."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.later import Later


@given(st.just(0.3))
@settings(max_examples=1)
def test_an_example_may_take_long(took_s: float) -> None:
    """On a busy machine any does; by default Hypothesis calls it a failure."""
    time.sleep(took_s)


def test_a_package_is_imported_when_a_name_of_it_is_used() -> None:
    missing = Later("package_that_is_not_here")
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_here"):
        _ = missing.anything
    assert Later("json.decoder").JSONDecoder is sys.modules["json.decoder"].JSONDecoder


# A package of the standard library that nothing else imports.
unused = Later("poplib")


def test_a_package_that_no_test_uses_is_not_imported_to_collect_them() -> None:
    assert unused.__test__ is False
    assert "poplib" not in sys.modules


# What is put off is not imported for a loop that runs, and works when it is used.
LEAN = """
from tests.standins.lean_imports import Unused, put_off
put_off()
import asyncio, sys
late = [name for name, module in sys.modules.items() if isinstance(module, Unused)]
asyncio.run(asyncio.sleep(0))
assert {"logging", "subprocess", "traceback", "concurrent.futures"} <= set(late)
assert all(isinstance(sys.modules[name], Unused) for name in late), late

async def use_all():
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, lambda: 7) == 7
    loop.add_signal_handler(10, print)
    loop.call_exception_handler({"message": "heard of", "exception": OSError("no luck")})
    program = await asyncio.create_subprocess_exec("echo", "said", stdout=asyncio.subprocess.PIPE)
    print(await program.stdout.read())

asyncio.run(use_all())
"""


def test_what_a_program_of_the_tests_puts_off_works_when_it_is_used() -> None:
    ran = subprocess.run(
        [sys.executable, "-S", "-c", LEAN],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "b'said\\n'\n"), ran.stderr
    assert "heard of" in ran.stderr and "OSError: no luck" in ran.stderr
