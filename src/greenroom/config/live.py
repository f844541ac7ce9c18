"""What changes while a gateway runs: its configuration, which a reload replaces, and whether it starts or drains."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from greenroom.config.schema import Config


@dataclass(slots=True)
class GatewayState:
    """Read afresh each time. Only `app.py` sets its fields; `config` is replaced as a whole."""

    config: Config
    is_starting: bool = True
    """Until models can be asked for."""
    is_draining: bool = False
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by what replaces the configuration, and by what needs it to stay as it is."""
