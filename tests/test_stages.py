"""`make test` and `make test-slow` run each test once, however they divide the work, and end as their stages do."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, until_now

ROOT = Path(__file__).resolve().parent.parent
QUICK, SLOW = "not slow and not soak and not gpu", "slow and not soak and not gpu"
TRACED, NOT_TRACED = f"{QUICK} and traced", f"{QUICK} and not traced"
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


@dataclass(frozen=True)
class Stage:
    """One command of pytest: the files it runs, and which tests of them."""

    paths: tuple[str, ...]
    ignored: tuple[str, ...]
    keyword: str
    marked: str

    def runs(self, file: str) -> bool:
        path = Path(file)
        return (
            any(path.is_relative_to(given) for given in self.paths)
            and not any(path.is_relative_to(given) for given in self.ignored)
            and self.keyword in file
        )


def stage(command: str) -> Stage:
    words = shlex.split(command)
    values = {option: words[number + 1] for number, option in enumerate(words[:-1]) if option in ("-m", "-k")}
    return Stage(
        paths=tuple(word for word in words if word.startswith("tests")),
        ignored=tuple(word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")),
        keyword=values.get("-k", ""),
        marked=values.get("-m", ""),
    )


def stages(target: str) -> list[Stage]:
    told = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"-m pytest ([^;\n]*)", told.replace("\\\n", " "))
    # What is only collected is not run.
    return [stage(command) for command in commands if "--collect-only" not in command]


@pytest.fixture(scope="module")
def quick() -> list[Stage]:
    return stages("test")


@pytest.fixture(scope="module")
def slow() -> list[Stage]:
    return stages("test-slow")


def test_every_file_has_its_stages(quick: list[Stage], slow: list[Stage]) -> None:
    """Its quick tests have one and its slow tests another, or one takes all of it. Only the core is traced."""
    for file in FILES:
        found = [sorted(stage.marked for stage in both if stage.runs(file)) for both in (quick, slow)]
        if file.startswith("tests/core/"):
            assert found == [sorted([TRACED, NOT_TRACED]), [SLOW]], file
        else:
            assert found in ([[NOT_TRACED], [SLOW]], [[QUICK], [SLOW]], [[""], [SLOW]], [[], [""]]), file


def test_check_comes_first_then_the_core_and_then_units(quick: list[Stage]) -> None:
    firsts = [
        "tests/test_layers.py",
        "tests/core/queue/test_order.py",
        "tests/http/test_edge.py",
        "tests/cli/test_main.py",
    ]
    found = [min(number for number, stage in enumerate(quick) if stage.runs(file)) for file in firsts]
    assert found == sorted(found)


def test_a_command_is_understood() -> None:
    found = stage("tests/a tests/b --ignore=tests/a/c -m 'not slow' -k test_x --numprocesses 4")
    assert found == Stage(("tests/a", "tests/b"), ("tests/a/c",), "test_x", "not slow")
    ran = ["tests/a/test_x.py", "tests/a/test_y.py", "tests/a/c/test_x.py", "tests/ab/test_x.py"]
    assert [found.runs(file) for file in ran] == [True, False, False, False]


# Stands in for Python. The two stages that run at once wait, or end as told; all others pass.
STAND_IN = """#!/bin/bash
case "$*" in *"pytest tests/ui"*) stage=browser;; *"pytest tests/integration"*) stage=gateway;; *) exit;; esac
exec {python} -c '
import os, pathlib, sys, time
stage = sys.argv[1]
pathlib.Path(os.environ["STAGES"], stage).touch()
try:
    while stage in os.environ["WAITING"]:
        time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(f"the {{stage}} was interrupted")
sys.exit(f"the {{stage}} failed" if stage in os.environ["FAILING"] else None)
' $stage
"""


def make_test(folder: Path, waiting: str = "", failing: str = "") -> subprocess.Popen[str]:
    """`make test` with stages that are only played, in a session of its own, as in a terminal."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    prepared = ["UI_STAMP=built", *(f"--old-file={target}" for target in ("check", "torch", "built"))]
    return subprocess.Popen(
        # Where these tests themselves run in the background, they ignore interrupts.
        ["env", "--default-signal=INT", "make", "test", *prepared, f"VENV={folder}", "TORCH_PYTEST=true"],
        cwd=ROOT,
        env={**os.environ, "STAGES": str(folder), "WAITING": waiting, "FAILING": failing},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("failing", ["", "browser", "gateway", "browser gateway"])
def test_a_stage_that_fails_beside_another_fails_all(failing: str, tmp_path: Path) -> None:
    making = make_test(tmp_path, failing=failing)
    said, _ = making.communicate(timeout=PATIENCE_S)
    assert (making.returncode != 0) is bool(failing), said
    assert [stage for stage in ("browser", "gateway") if f"the {stage} failed" in said] == failing.split(), said


def test_an_interrupt_ends_both_stages(tmp_path: Path) -> None:
    making = make_test(tmp_path, waiting="browser gateway")
    try:
        until_now(lambda: {"browser", "gateway"} <= {path.name for path in tmp_path.iterdir()}, "both have begun")
        os.killpg(making.pid, signal.SIGINT)
        said, _ = making.communicate(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(making.pid, signal.SIGKILL)
    assert making.returncode != 0
    assert "the gateway was interrupted" in said and "the browser was interrupted" in said, said
