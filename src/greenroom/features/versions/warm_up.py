"""The request by which a new version proves itself: it must be answered, in time, and not with nothing.

Owns what is asked and what counts as an answer. The request waits for its slot like every other, so that nothing makes
the version leave while it answers; it goes to the engine directly, because no caller gets what comes back.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Final

import msgspec

from greenroom.config.schema import Ability, ModelVersions
from greenroom.core.events import RequestArrived
from greenroom.core.model import RequestId
from greenroom.errors import GreenroomError, WarmUpFailed
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.loop import Tickets
from greenroom.runtime.moves.process_moves import EngineCall
from greenroom.runtime.scheduler_loop import SchedulerLoop

# Of an engine's own words in the error.
SAID_CHARS_MAX: Final = 500


class WarmUp:
    def __init__(self, tickets: Tickets, loop: SchedulerLoop) -> None:
        self._tickets = tickets
        self._loop = loop
        self._numbers = itertools.count(1)

    async def ask(self, entry: Entry, asked: ModelVersions) -> None:
        """Returns when this version has answered. Raises WarmUpFailed, or why it was not granted a slot."""
        request = _request(entry, asked)
        if request is None:
            return
        now, limit_s = self._loop.clock(), asked.warm_up_timeout_s
        id = RequestId(f"warm-up-{next(self._numbers)}")
        ticket = self._tickets.arrive(RequestArrived(now, id, (entry.id,), give_up_at=now + limit_s))
        try:
            async with asyncio.timeout(limit_s):
                await ticket.wait(None)
                slot = ticket.slot
                assert slot is not None
                target, body = request
                status, answer = await EngineCall(slot.pool.address)("POST", target, msgspec.json.encode(body))
        except TimeoutError:
            raise WarmUpFailed(f"{entry.id} did not answer its warm-up request within {limit_s:g} s.") from None
        except (OSError, ValueError) as error:
            raise WarmUpFailed(f"{entry.id} broke off its warm-up request: {error}.") from error
        except GreenroomError as error:
            raise WarmUpFailed(
                f"{entry.id} could not be asked its warm-up request: {error.message}", details=error.details
            ) from error
        finally:
            self._tickets.close(ticket)
        if status != 200 or not _says_something(answer):
            what = f"with {status}" if status != 200 else "with nothing"
            said = answer[:SAID_CHARS_MAX].decode("utf-8", "replace")
            raise WarmUpFailed(f"{entry.id} answered its warm-up request {what}.", details=said)


def _request(entry: Entry, asked: ModelVersions) -> tuple[str, dict[str, Any]] | None:
    """Path and body; None for models that no text can be asked: that they are loaded is their proof."""
    abilities = entry.facts.abilities
    body: dict[str, Any] = {"model": entry.config.use_model_name or entry.engine_name}
    text = {"max_tokens": asked.warm_up_tokens, "temperature": 0.0}
    if abilities is None or Ability.CHAT in abilities:
        return "/v1/chat/completions", body | text | {"messages": [{"role": "user", "content": asked.warm_up}]}
    if Ability.COMPLETIONS in abilities:
        return "/v1/completions", body | text | {"prompt": asked.warm_up}
    if Ability.EMBEDDINGS in abilities:
        return "/v1/embeddings", body | {"input": asked.warm_up}
    if Ability.RERANK in abilities:
        return "/v1/rerank", body | {"query": asked.warm_up, "documents": [asked.warm_up]}
    return None


def _says_something(answer: bytes) -> bool:
    """True if it has a text that is more than spaces, a vector, or a rank."""
    try:
        said = msgspec.json.decode(answer)
    except msgspec.MsgspecError:
        return False
    if not isinstance(said, dict):
        return False
    found = [*_list(said.get("choices")), *_list(said.get("data")), *_list(said.get("results"))]
    return any(_has_content(one) for one in found if isinstance(one, dict))


def _has_content(one: dict[str, Any]) -> bool:
    message = one.get("message")
    told = message if isinstance(message, dict) else one
    texts = [told.get(key) for key in ("content", "reasoning_content", "reasoning", "text")]
    has_text = any(isinstance(text, str) and text.strip() for text in texts)
    return has_text or bool(told.get("tool_calls") or one.get("embedding")) or "relevance_score" in one


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
