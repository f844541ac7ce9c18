"""What the tests of hosted models look at besides answers: descriptors, and what models hold."""

from __future__ import annotations

import os
from typing import Any

from greenroom.app import App
from tests.integration.raw import chat

MEMFD = "/memfd:"


async def says(app: App, model: str, **more: Any) -> str:
    """What a model says, which must have its name."""
    answer = await chat(app, model, temperature=0, **more)
    assert answer.status == 200, answer.body
    assert model in answer.text
    return answer.text


def memfds() -> set[str]:
    """The memory this process holds by descriptor; a gateway in it holds the weights of hosted models so."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            inode = os.fstat(int(descriptor)).st_ino
        except OSError:
            # The one that listed them is gone by now.
            continue
        if target.startswith(MEMFD):
            found.add(f"{target} {inode}")
    return found


def held(app: App) -> dict[str, dict[str, int]]:
    """MiB by device of every slot that holds any, as the scheduler counts them."""
    state = app.loop.scheduler.state
    claims = {slot: state.ledger.held_by(slot) for slot in state.slots}
    return {str(slot): {str(device): mib for device, mib in claim.items()} for slot, claim in claims.items() if claim}
