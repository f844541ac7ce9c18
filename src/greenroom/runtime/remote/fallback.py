"""Whether a request may fall to a remote model when it asked for another: an operator's switch, kept over restarts.

Owns the switch and its file in the state directory; gateways with a common store share it (`shared.py`). Before it was
ever set, the environment says it, else it is on. It concerns fallbacks only: a remote model that is asked for by its
own name is never blocked.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from greenroom.base.detached import run_detached
from greenroom.base.plain_file import read_plain, replace_file
from greenroom.errors import ConfigError, ConfigNotKept
from greenroom.runtime.remote.spending import SpendingStore
from greenroom.telemetry.logs import get_logger

_log = get_logger("remote")

FILE_NAME: Final = "settings.json"
FILE_BYTES_MAX: Final = 64 * 1024
VARIABLE: Final = "MODEL_BOSS_ALLOW_CLOUD_FALLBACK"
KEY: Final = "allowCloudFallback"
_WORDS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


class CloudFallback:
    """Call `open` before anything is asked."""

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._path = folder / FILE_NAME
        self._environ = environ
        self._setting = asyncio.Lock()
        self.is_allowed = True
        # What was set, here or at another gateway; None if it never was, or cannot be read.
        self.known: bool | None = None
        # Sets it for all gateways that share a store. None where nothing is shared.
        self.shared: SpendingStore | None = None

    def open(self) -> None:
        """Read what was set before. Blocks. Raises ConfigError if the environment says neither true nor false."""
        try:
            said = json.loads(read_plain(self._path, FILE_BYTES_MAX))[KEY]
        except FileNotFoundError:
            self.is_allowed = self._seed()
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            said = error
        self.is_allowed = said is True
        if isinstance(said, bool):
            self.known = said
        else:
            # It may have forbidden what costs money.
            _log.error("cannot be read: no request falls to a remote model", file=str(self._path), error=str(said))

    def _seed(self) -> bool:
        said = self._environ.get(VARIABLE, "").strip().lower()
        if said and said not in _WORDS:
            raise ConfigError(f"{VARIABLE}: true or false is wanted.")
        return _WORDS.get(said, True)

    async def set(self, is_allowed: bool) -> None:
        """Set it for the requests that come from now on, here and at gateways that share a store. Raises ConfigNotKept,
        and then nothing has changed here."""
        async with self._setting:
            if self.shared is not None and not await self.shared.set(is_allowed):
                raise ConfigNotKept("The store that this gateway shares with others does not answer. Try again.")
            try:
                await self._keep(is_allowed)
            except OSError as error:
                raise ConfigNotKept(f"{self._path} cannot be written: {error.strerror or error}.") from error
        _log.info("fallbacks to remote models", allowed=is_allowed)

    async def hear(self, is_allowed: bool) -> None:
        """It was set, here or at another gateway. It is written down, so that it holds while the store is away."""
        if is_allowed is self.known:
            return
        self.is_allowed = self.known = is_allowed
        _log.info("fallbacks to remote models, as the store has it", allowed=is_allowed)
        try:
            await self._keep(is_allowed)
        except OSError as error:
            _log.error("the switch for fallbacks cannot be written", file=str(self._path), error=str(error))

    async def _keep(self, is_allowed: bool) -> None:
        text = json.dumps({"version": 1, KEY: is_allowed})
        await run_detached(partial(replace_file, self._path, text), "write settings")
        self.is_allowed = self.known = is_allowed
