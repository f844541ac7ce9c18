"""Two tenants with the same prompts: what each reuses, by counters and by the time to the first token."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from tests.integration.raw import Answer, http

KEYS: list[dict[str, Any]] = [{"name": name, "key": f"{name}-key"} for name in ("lab", "shop")]
KEYS += [{"name": "ops", "key": "ops-key", "admin": True}]
ROUNDS, ROUNDS_MAX = 2, 60
# A prompt that is reused takes a small part of the time.
FASTER = 2.0


async def ask(app: App, who: str, prompt: str, model: str = "alpha") -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": 1}
    answer = await http(app, "POST", "/v1/completions", body, headers={"Authorization": f"Bearer {who}-key"})
    assert answer.status == 200, answer.body
    return answer


async def reused(app: App, who: str, prompt: str) -> int:
    return int((await ask(app, who, prompt)).headers["x-cache-tokens-reused"])


def prompt_of(number: int, words: int) -> str:
    """No two begin alike."""
    return f"{number}{number} and " + " ".join(f"{number + word}" for word in range(words))


async def assert_time_tells_nothing(app: App, words: int) -> None:
    """Of one token, the time is that to the first: of a tenant's first request, of its second, of another tenant's.

    The least of many times is compared, which a busy machine does not change: it only takes more rounds to be seen."""
    await ask(app, "lab", "warm")
    await ask(app, "shop", "warm")
    took: dict[str, list[float]] = {"first": [], "own": [], "other": []}
    for number in range(1, ROUNDS_MAX + 1):
        prompt = prompt_of(number, words)
        for what, who in (("first", "lab"), ("own", "lab"), ("other", "shop")):
            began = time.perf_counter()
            tokens = int((await ask(app, who, prompt)).headers["x-cache-tokens-reused"])
            took[what].append(time.perf_counter() - began)
            assert tokens > words if what == "own" else tokens < 20, (what, tokens)
        first, own, other = (min(times) for times in took.values())
        if number >= ROUNDS and min(first, other) > FASTER * own:
            break
    assert first > FASTER * own, f"this prompt is too short to tell: {took}"
    assert other > FASTER * own, f"the second tenant's answer comes as if it were known: {took}"


async def assert_nothing_is_left(
    app: App, prompt: str, leave: MoveKind, reused: Callable[[App, str, str], Awaitable[int]] = reused
) -> None:
    """Asleep and awake again, or stopped and started: no tenant finds another's, and each its own afterwards."""
    await ask(app, "lab", prompt)
    assert await reused(app, "lab", prompt) > 0
    await app.operations.move(leave, ModelId("alpha"))
    assert await reused(app, "shop", prompt) == 0, "the first after it came back"
    await ask(app, "lab", prompt)
    assert await reused(app, "shop", prompt) > 0 and await reused(app, "lab", prompt) > 0
