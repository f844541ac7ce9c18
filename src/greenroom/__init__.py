"""Greenroom: one OpenAI-compatible address in front of every model you own.

`greenroom.lease(…)` is for programs that share its GPUs; it is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from greenroom.leases.client import lease as lease

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "lease":
        from greenroom.leases.client import lease

        return lease
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
