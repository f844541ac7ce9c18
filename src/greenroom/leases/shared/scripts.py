"""The Lua scripts, one per operation, each with what they all begin with.

Owns where they lie and the names of the keys. Redis runs a script as one step, so nobody ever sees half an operation.
"""

from __future__ import annotations

from importlib import resources

OPERATIONS = ("acquire", "renew", "release", "leases", "publish", "pend", "hold", "recall")
# In the order in which the scripts unpack them.
_KEYS = ("meta", "leases", "expiry", "usable", "taken", "line", "gateways")


def source(operation: str) -> str:
    folder = resources.files(__package__) / "lua"
    return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("book", "line", operation))


def keys(host: str) -> list[str]:
    """Every key of one host; the braces put them into one slot of a cluster."""
    return [f"greenroom:{{{host}}}:{name}" for name in _KEYS]
