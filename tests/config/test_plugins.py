"""Schedulers, policies and swappers of other packages are found by name, and what is wrong with them is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config import limits
from greenroom.config.limits import Named
from greenroom.core.events import ConfigChanged, Limits
from greenroom.core.plain import PlainScheduler
from greenroom.core.policy import BUILT_IN, SWAPPERS, SwapperFactory
from greenroom.core.policy.base import PolicyFactory
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.scheduler import DefaultScheduler
from greenroom.errors import ConfigError
from tests.core.world import Recorder

GOOD = """
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import ByMemory

class Mine(FirstCome):
    pass

class MySwapper(ByMemory):
    pass
"""


def install(folder: Path, entries: str, **modules: str) -> None:
    """What pip would leave behind: modules, and a folder that says what they are good for."""
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def policies() -> Named[PolicyFactory]:
    """A table of its own, so that what one test has loaded is not there for the next."""
    return Named("policy", BUILT_IN, "greenroom.policies")


@pytest.fixture
def swappers() -> Named[SwapperFactory]:
    return Named("swapper", SWAPPERS, "greenroom.swappers")


def test_what_comes_with_greenroom_is_there(policies: Named[PolicyFactory], swappers: Named[SwapperFactory]) -> None:
    assert (list(policies), list(swappers)) == (["default", "fifo"], ["coordinator", "memory"])
    assert (policies["default"], policies["fifo"]) == (BoundedFirstCome, FirstCome)
    assert (len(policies), len(swappers)) == (2, 2)


@pytest.mark.pure
def test_an_installed_policy_is_used_by_its_name(
    site: Path, policies: Named[PolicyFactory], swappers: Named[SwapperFactory]
) -> None:
    entries = "[greenroom.policies]\nmine = acme_used:Mine\n[greenroom.swappers]\nmy = acme_used:MySwapper\n"
    install(site, entries, acme_used=GOOD)
    scheduler = DefaultScheduler(Recorder(), policies, swappers)
    scheduler.handle(ConfigChanged(0.0, devices=(), limits=Limits(policy="mine", swapper="my")))
    policy = scheduler.state.policy
    assert (type(policy).__name__, type(policy.swapper).__name__) == ("Mine", "MySwapper")
    assert list(policies) == ["default", "fifo", "mine"]


def test_an_unregistered_name_is_refused_with_those_there_are(
    site: Path, policies: Named[PolicyFactory], swappers: Named[SwapperFactory]
) -> None:
    install(site, "[greenroom.policies]\nmine = acme_named:Mine\n", acme_named=GOOD)
    with pytest.raises(ConfigError) as refused:
        policies["lifo"]
    assert refused.value.message == "there is no policy 'lifo'; there are default, fifo, mine"
    there_are = r"there is no swapper 'mine'; there are coordinator, memory$"
    with pytest.raises(ConfigError, match=f"^{there_are}"):
        swappers["mine"]


@pytest.mark.parametrize(
    ("module", "value", "why"),
    [
        ("acme_gone", "acme_nowhere:Mine", "No module named 'acme_nowhere'"),
        ("acme_bare", "acme_bare:Nobody", "has no attribute 'Nobody'"),
        ("acme_raises", "acme_raises:Mine", "out of paint"),
    ],
)
def test_one_that_does_not_load_is_told_with_its_reason(
    site: Path, policies: Named[PolicyFactory], module: str, value: str, why: str
) -> None:
    install(site, f"[greenroom.policies]\nmine = {value}\n", **{module: "raise RuntimeError('out of paint')\n"})
    if module == "acme_bare":
        (site / "acme_bare.py").write_text("")
    with pytest.raises(ConfigError) as refused:
        policies["mine"]
    assert refused.value.message.startswith(f"'mine' of {value} does not load: ")
    assert why in refused.value.message


def test_what_is_installed_but_not_named_is_not_imported(site: Path, policies: Named[PolicyFactory]) -> None:
    entries = "[greenroom.policies]\nbroken = acme_broken:Mine\nmine = acme_fine:Mine\n"
    install(site, entries, acme_broken="raise RuntimeError('imported')\n", acme_fine=GOOD)
    assert policies["mine"].__name__ == "Mine"
    assert "broken" in list(policies)


def test_a_package_cannot_take_the_name_of_a_built_in_one(site: Path, policies: Named[PolicyFactory]) -> None:
    install(site, "[greenroom.policies]\nfifo = acme_false:Mine\n", acme_false=GOOD)
    assert policies["fifo"] is FirstCome
    assert list(policies) == ["default", "fifo"]


def test_a_configuration_needs_both_its_policy_and_its_swapper() -> None:
    limits.require(Limits())
    limits.require(Limits(policy="fifo"))
    with pytest.raises(ConfigError, match=r"^scheduler\.policy: there is no policy 'lifo'"):
        limits.require(Limits(policy="lifo"))
    with pytest.raises(ConfigError, match="there is no swapper 'coin'"):
        limits.require(Limits(swapper="coin"))


SCHEDULERS = """
from greenroom.core.plain import PlainScheduler

def mine(effects):
    return PlainScheduler(effects)

def broken(effects):
    raise RuntimeError("out of paint")
"""


def test_an_installed_scheduler_replaces_the_whole_one(site: Path) -> None:
    entries = "[greenroom.schedulers]\nmine = acme_schedulers:mine\nbroken = acme_schedulers:broken\n"
    install(site, entries, acme_schedulers=SCHEDULERS)
    assert list(limits.SCHEDULERS) == ["broken", "default", "mine", "plain"]
    assert isinstance(limits.make_scheduler("mine", Recorder()), PlainScheduler)
    with pytest.raises(ConfigError, match=r"^scheduler\.implementation: 'broken' cannot be made: .*out of paint$"):
        limits.make_scheduler("broken", Recorder())


@pytest.mark.pure
def test_the_scheduler_is_found_by_its_name_and_uses_policies_by_theirs(site: Path) -> None:
    install(site, "[greenroom.policies]\nmine = acme_ours:Mine\n", acme_ours=GOOD)
    default = limits.make_scheduler("default", Recorder())
    assert isinstance(default, DefaultScheduler)
    default.handle(ConfigChanged(0.0, devices=(), limits=Limits(policy="mine")))
    assert type(default.state.policy).__name__ == "Mine"
    there_are = r"^scheduler\.implementation: there is no implementation 'coin'; there are default, plain$"
    with pytest.raises(ConfigError, match=there_are):
        limits.make_scheduler("coin", Recorder())
