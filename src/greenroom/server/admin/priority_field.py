"""The field `priority` of orders.

Owns that whatever is wrong with it is refused in the same words as `x_priority` of requests. Ranges and names are
`tenancy/tenants.py`'s.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from greenroom.tenancy.tenants import parse_priority


def _read(said: object) -> int:
    """Raises BadRequest, which validation lets pass: it would name each kind that the value is not."""
    if isinstance(said, float) and said.is_integer():
        said = int(said)
    return parse_priority(said, param="priority")


Priority = Annotated[str | int, BeforeValidator(_read)]
