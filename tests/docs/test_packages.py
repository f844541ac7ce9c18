"""The pages on policies, swappers and schedulers are true: their code runs, as it stands there.

`tests/core/test_contract.py` holds the contract against the scheduler.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.core.model import DeviceId, ModelId, SlotId, Tier
from greenroom.core.policy import BUILT_IN
from greenroom.core.policy.base import PolicyFactory
from greenroom.core.policy.swapper import Resident, Swapper, Target
from greenroom.sim.config import SimConfig
from greenroom.sim.world import World
from tests.chaos.play import Play
from tests.chaos.scenario import draw_scenario, draw_task_storm, under_plain
from tests.docs.pages import commands, defined_in, package_of, run
from tests.sim.settings import setting, sim_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

POLICY, SCHEDULER = "docs/design/writing-a-policy.md", "docs/design/writing-a-scheduler.md"
GPU = DeviceId("gpu0")


def in_turns() -> SimConfig:
    turns: PolicyFactory = defined_in(POLICY, "turns.py")["Turns"]
    models = [sim_model("busy", concurrency=1), sim_model("other", concurrency=1)]
    return setting(*models, policy="turns", policies={**BUILT_IN, "turns": turns})


def keep_busy(world: World, requests: int) -> None:
    """More work for one model than it can do while others wait, at two seconds each."""
    for _ in range(requests):
        world.arrive(ModelId("busy"), 0, 200)


def first_served(world: World, model: str) -> float:
    return min(call.granted_at for call in world.ended if call.model == model)


# --- the policy -------------------------------------------------------------------------------------------------------


def test_a_model_in_use_gives_way_after_its_turn() -> None:
    world = World(in_turns())
    keep_busy(world, 10)
    world.after(1.0, lambda world: world.arrive(ModelId("other"), 0, 100))
    world.after(6.0, lambda world: keep_busy(world, 50))
    world.run()
    assert world.is_at_rest
    # It is ready after 5 s, serves the first ten in 20 s, ends an answer of 2 s, leaves in 1 s; the other comes in 5 s.
    assert 25.0 < first_served(world, "other") <= 36.0


def test_without_it_the_other_would_have_waited_to_the_end() -> None:
    world = World(setting(sim_model("busy", concurrency=1), sim_model("other", concurrency=1)))
    keep_busy(world, 60)
    world.after(1.0, lambda world: world.arrive(ModelId("other"), 0, 100))
    world.run()
    assert first_served(world, "other") > 120.0


def test_an_idle_model_gives_way_at_once() -> None:
    world = World(in_turns())
    keep_busy(world, 1)
    world.after(20.0, lambda world: world.arrive(ModelId("other"), 0, 100))
    world.run()
    assert first_served(world, "other") == pytest.approx(26.0)


# --- the swapper ------------------------------------------------------------------------------------------------------


def resident(name: str, mib: int, *, loss: float, is_fixed: bool = False) -> Resident:
    return Resident(SlotId(f"slot of {name}"), ModelId(name), {GPU: mib}, Tier.COLD, 1, 0.0, False, is_fixed, loss=loss)


def leaves_for(mib: int, *residents: Resident) -> list[str] | None:
    swapper: Swapper = defined_in(POLICY, "largest.py")["LargestFirst"](None)
    found = swapper.eviction_for(Target(ModelId("new"), ({GPU: mib},), 1), residents, {GPU: 0})
    return None if found is None else [victim.model for victim in found.victims]


def test_the_largest_leaves_whatever_the_policy_says_of_its_loss() -> None:
    small, large = resident("small", 4_000, loss=0.0), resident("large", 8_000, loss=100.0)
    assert leaves_for(3_000, small, large) == ["large"]
    assert (small.loss, large.loss) == (0.0, 100.0)


def test_a_fixed_resident_stays_and_no_model_is_evicted_in_vain() -> None:
    small, large = resident("small", 4_000, loss=0.0), resident("large", 8_000, loss=0.0, is_fixed=True)
    assert leaves_for(3_000, small, large) == ["small"]
    assert leaves_for(5_000, small, large) is None


# --- the scheduler ----------------------------------------------------------------------------------------------------


def test_faults_do_not_confuse_the_scheduler() -> None:
    longest = defined_in(SCHEDULER, "longest.py")["LongestWait"]
    for scenario in (*map(draw_task_storm, range(20)), *map(draw_scenario, range(6))):
        played = Play(under_plain(scenario, longest)).to_the_end()
        assert played.judged["Invariants"] > 0


# --- the pages as packages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "names"),
    [(POLICY, ["fifo", "turns"]), (SCHEDULER, ["DefaultScheduler", "PlainScheduler", "Checked"])],
)
def test_the_example_compares_what_the_page_builds_in_the_simulator(
    page: str, names: list[str], tmp_path: Path
) -> None:
    package = package_of(page, tmp_path)
    done = run(package, str(package / "try_it.py"))
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == names
    assert len({figures for _, figures in lines}) == len(names), "they decide differently"


@pytest.mark.parametrize("page", [POLICY, SCHEDULER])
def test_what_is_installed_may_be_named_in_a_configuration_and_simulated(page: str, tmp_path: Path) -> None:
    package = package_of(page, tmp_path)
    check, simulate, _ = commands(page)
    done = run(package, "-m", *check.split())
    assert (done.returncode, "is right" in done.stdout) == (0, True), done.stderr
    done = run(package, "-m", *simulate.split())
    assert done.returncode == 0, done.stderr
    if page == POLICY:
        assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["default", "turns"]
    else:
        assert "The scheduler is longest" in done.stderr and "As it is" in done.stdout


@pytest.mark.parametrize(
    ("page", "refused"),
    [
        (POLICY, "there is no policy 'turns'; there are default, fifo"),
        (SCHEDULER, "there is no implementation 'longest'; there are default, plain"),
    ],
)
def test_without_the_package_its_names_are_refused(page: str, refused: str, tmp_path: Path) -> None:
    package = package_of(page, tmp_path)
    for folder in package.glob("*.dist-info"):
        (folder / "entry_points.txt").unlink()
    check, simulate, _ = commands(page)
    done = run(package, "-m", *check.split())
    assert done.returncode == 1 and refused in done.stderr
    done = run(package, "-m", *simulate.split())
    assert done.returncode != 0 and refused.partition(";")[0] in done.stderr
