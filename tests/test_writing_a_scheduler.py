"""The page on schedulers is true: its code runs, as it stands there, in the fault simulation too.

`tests/core/test_contract.py` holds the contract against its scheduler.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.play import Play
from tests.chaos.scenario import draw_scenario, draw_task_storm, under_plain
from tests.cli.test_guides import ROOT
from tests.pages import commands, defined_in, package_of, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

PAGE = "docs/design/writing-a-scheduler.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return package_of(PAGE, tmp_path)


def test_faults_do_not_confuse_it() -> None:
    longest = defined_in(PAGE, "longest.py")["LongestWait"]
    for scenario in (*map(draw_task_storm, range(20)), *map(draw_scenario, range(6))):
        played = Play(under_plain(scenario, longest)).to_the_end()
        assert played.judged["Invariants"] > 0


def test_the_example_compares_it_in_the_simulator(package: Path) -> None:
    done = run(package, str(package / "try_it.py"))
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == ["DefaultScheduler", "PlainScheduler", "Checked"]
    assert len({figures for _, figures in lines}) == 3, "they decide differently"


def test_an_installed_scheduler_may_be_named_and_simulated(package: Path) -> None:
    check, simulate, _ = commands(PAGE)
    done = run(package, "-m", *check.split())
    assert (done.returncode, "is right" in done.stdout) == (0, True), done.stderr
    done = run(package, "-m", *simulate.split())
    assert done.returncode == 0, done.stderr
    assert "The scheduler is longest" in done.stderr and "As it is" in done.stdout


def test_without_the_package_its_name_is_refused(package: Path) -> None:
    for folder in package.glob("*.dist-info"):
        (folder / "entry_points.txt").unlink()
    done = run(package, "-m", *commands(PAGE)[0].split())
    assert done.returncode == 1
    assert "there is no implementation 'longest'; there are default, plain" in done.stderr


def test_links_on_the_page_lead_somewhere() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert links and all((ROOT / PAGE).parent.joinpath(link).exists() for link in links)
