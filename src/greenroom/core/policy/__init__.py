"""Rules that can be replaced: the order of the queue, the choice of evictions, which models may be ready together.

The names here are all that a policy or swapper of another package needs. They are stable. `make_policy` combines those
that a configuration names.
"""

from collections.abc import Callable, Mapping

from greenroom.core.events import Limits as Limits
from greenroom.core.model import Claim as Claim
from greenroom.core.model import DeviceId as DeviceId
from greenroom.core.model import ModelId as ModelId
from greenroom.core.model import SlotId as SlotId
from greenroom.core.model import Tier as Tier
from greenroom.core.policy.base import Policies as Policies
from greenroom.core.policy.base import Policy as Policy
from greenroom.core.policy.base import PolicyFactory as PolicyFactory
from greenroom.core.policy.base import Turn as Turn
from greenroom.core.policy.coordinator import Coordinator as Coordinator
from greenroom.core.policy.coresidency import Coresidency as Coresidency
from greenroom.core.policy.coresidency import coresidency_under as coresidency_under
from greenroom.core.policy.default import BoundedFirstCome as BoundedFirstCome
from greenroom.core.policy.fifo import FirstCome as FirstCome
from greenroom.core.policy.swapper import ByMemory as ByMemory
from greenroom.core.policy.swapper import Eviction as Eviction
from greenroom.core.policy.swapper import Resident as Resident
from greenroom.core.policy.swapper import Swapper as Swapper
from greenroom.core.policy.swapper import Target as Target
from greenroom.core.queue.waitlist import PriorityClass as PriorityClass
from greenroom.core.queue.waitlist import Queue as Queue
from greenroom.core.queue.waitlist import Waiter as Waiter
from greenroom.core.queue.waitlist import WaiterKind as WaiterKind

# Called with the coresidency rules of the configuration, or None.
SwapperFactory = Callable[[Coresidency | None], Swapper]
Swappers = Mapping[str, SwapperFactory]

BUILT_IN: Mapping[str, PolicyFactory] = {"default": BoundedFirstCome, "fifo": FirstCome}
SWAPPERS: Mapping[str, SwapperFactory] = {"memory": ByMemory, "coordinator": Coordinator}


def make_policy(limits: Limits, policies: Policies = BUILT_IN, swappers: Swappers = SWAPPERS) -> Policy:
    """The policy that these limits name, with the swapper that they name."""
    coresidency = None if limits.company is None else coresidency_under(limits.company)
    return policies[limits.policy](limits, swappers[limits.swapper](coresidency))
