"""Policies and swappers by name: those that come with Greenroom, and how a configuration combines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from greenroom.core.events import Limits
from greenroom.core.policy.base import Policies, Policy, PolicyFactory
from greenroom.core.policy.coordinator import Coordinator
from greenroom.core.policy.coresidency import Coresidency, coresidency_under
from greenroom.core.policy.default import ByCost
from greenroom.core.policy.fifo import FirstCome
from greenroom.core.policy.swapper import ByMemory, Swapper

# Called with the coresidency rules of the configuration, or None.
SwapperFactory = Callable[[Coresidency | None], Swapper]
Swappers = Mapping[str, SwapperFactory]

BUILT_IN: Mapping[str, PolicyFactory] = {"default": ByCost, "fifo": FirstCome}
SWAPPERS: Mapping[str, SwapperFactory] = {"memory": ByMemory, "coordinator": Coordinator}


def make_policy(limits: Limits, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> Policy:
    """The policy that these limits name, with the swapper that they name."""
    company = None if limits.company is None else coresidency_under(limits.company)
    return policies[limits.policy](limits, swappers[limits.swapper](company))
