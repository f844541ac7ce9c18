"""Whether a JSON schema may be compiled in this process: tried in one that may fall, and remembered.

Owns the processes of `schema_trial.py`, how many run at once and which schemas have passed. A schema is seldom sent
once, so that few requests wait for a trial, which takes a tenth of a second. Never keeps a schema: only a hash of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .refusals import Refused, unavailable
from .schema_trial import CPU_S, WALL_S

AT_ONCE: Final = 2
# Who still waits for a place then is refused.
WAIT_S: Final = 60.0
PASSED_MAX: Final = 1_024
_PROGRAM: Final = Path(__file__).with_name("schema_trial.py")


class SchemaTrials:
    """Those of one model. To be used on one loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, schema: str, overrides: Mapping[str, Any], param: str) -> None:
        """Return if this schema is fit to be compiled here. Raises Refused."""
        order = json.dumps({"schema": schema, "overrides": overrides}).encode()
        key = hashlib.sha256(order).digest()
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        try:
            async with asyncio.timeout(WAIT_S), self._places:
                code, said = await _tried(order)
        except (TimeoutError, OSError) as error:
            raise unavailable(f"{param}: no process is left to try this schema. Try again.") from error
        if code != 0:
            raise too_complex(
                param, f"to compile it takes more than {CPU_S} s or too much memory, or to follow it too long"
            )
        if said:
            raise Refused(f"{param}: this schema cannot be held to: {said}", param=param)
        self._passed[key] = None
        if len(self._passed) > PASSED_MAX:
            self._passed.popitem(last=False)


def too_complex(param: str, why: str) -> Refused:
    return Refused(
        f"{param}: this schema is too complex: {why}. Use fewer or shorter alternatives, literals, patterns, multiples "
        "and chains of $ref.",
        status=422,
        param=param,
        code="schema_too_complex",
    )


async def _tried(order: bytes) -> tuple[int, str]:
    """How the trial ended, and what it said."""
    found = importlib.util.find_spec("llguidance")
    folder = str(Path(found.origin).parent.parent) if found is not None and found.origin else ""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_PROGRAM), folder),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
        cwd="/",
    )
    try:
        async with asyncio.timeout(WALL_S):
            said, _ = await process.communicate(order)
        return await process.wait(), said.decode(errors="replace")
    except TimeoutError:
        return -1, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
