"""Waits for a fact rather than for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Generous: the machine may be busy. Nothing waits this long when all is well.
PATIENCE_S = 60.0


async def until(fact: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)
