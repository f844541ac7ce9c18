"""What a gateway is made of: parts that open, begin, take a changed configuration and close, each in its turn; and the
configuration of now, which they share.

`app.py` knows parts by this class alone, and runs each step for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from greenroom.config.diff import Changes
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


# Applies a configuration that was checked. Does not wait and does not fail.
Apply = Callable[[], object]


class Part:
    """Each step does nothing unless a part says otherwise."""

    # What the log calls it where that is not its class.
    name: ClassVar[str] = ""
    # Closing writes data: such parts close last, all at once.
    writes: ClassVar[bool] = False

    async def open(self) -> None:
        """Open files, ports and stores. Raises ConfigError or OSError: the gateway does not start."""

    def begin(self) -> None:
        """Start what runs by itself. All parts are open, and those before this one have begun."""

    async def draft(self, new: Config, changes: Changes) -> Apply:
        """Check a changed configuration. Raises ConfigError, and then nothing has changed."""
        return _nothing

    async def close(self) -> None:
        """End. One that takes long is left behind, and one that fails is logged: the others end all the same."""


def _nothing() -> None: ...
