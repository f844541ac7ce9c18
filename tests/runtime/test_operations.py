"""What an operator is told of an order that could not be carried out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.core.effects import OpOutcome
from greenroom.core.events import Event, MoveAsked
from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import GreenroomError, LeaseStoreUnavailable, LoadFailed, NoPlace, TooLarge, Unsupported
from greenroom.runtime.effects import AsyncEffects
from greenroom.runtime.mover import Mover
from greenroom.runtime.operations import Operations

QWEN = ModelId("qwen")


class Rig:
    """A scheduler that answers every order with the same outcome, at once."""

    def __init__(self, outcome: OpOutcome, failure: GreenroomError | None = None) -> None:
        self.asked: list[MoveAsked] = []
        self._outcome = outcome
        self._effects = SimpleNamespace(operations=dict[Any, asyncio.Future[OpOutcome]]())
        mover = SimpleNamespace(failures={} if failure is None else {QWEN: failure})
        self.operations = Operations(
            cast(AsyncEffects, self._effects), cast(Mover, mover), self._post, lambda: 5.0, lambda model: "llamacpp"
        )

    def _post(self, event: Event) -> None:
        assert isinstance(event, MoveAsked)
        self.asked.append(event)
        self._effects.operations[event.op].set_result(self._outcome)


async def refusal(kind: MoveKind, outcome: OpOutcome, failure: GreenroomError | None = None) -> GreenroomError:
    with pytest.raises(GreenroomError) as refused:
        await Rig(outcome, failure).operations.move(kind, QWEN)
    return refused.value


async def test_an_order_is_posted_as_it_was_given() -> None:
    rig = Rig(OpOutcome.DONE)
    await rig.operations.move(MoveKind.SLEEP, QWEN, grace_s=2.0)
    (asked,) = rig.asked
    assert (asked.now, asked.kind, asked.model, asked.evict, asked.grace_s) == (5.0, MoveKind.SLEEP, QWEN, (), 2.0)


@pytest.mark.parametrize("kind", [MoveKind.SLEEP, MoveKind.PREPARE])
async def test_who_cannot_sleep_is_named_with_its_engine_and_what_works_instead(kind: MoveKind) -> None:
    error = await refusal(kind, OpOutcome.REFUSED)
    assert isinstance(error, Unsupported) and error.param == "model"
    for word in ("qwen", "llamacpp", "`unload`", "transformers"):
        assert word in error.message


async def test_too_large_for_the_green_room_is_another_thing_than_for_the_stage() -> None:
    stage, green_room = [await refusal(kind, OpOutcome.TOO_LARGE) for kind in (MoveKind.LOAD, MoveKind.PREPARE)]
    assert isinstance(stage, TooLarge) and isinstance(green_room, TooLarge)
    assert "green_room_mib" in green_room.message and "green_room_mib" not in stage.message


async def test_a_sleep_for_which_there_was_no_place_says_that_the_model_is_gone() -> None:
    error = await refusal(MoveKind.SLEEP, OpOutcome.FAILED)
    assert isinstance(error, NoPlace) and error.status == 409
    assert "unloaded instead" in error.message


async def test_a_sleep_that_failed_says_why() -> None:
    why = LoadFailed("The worker of qwen ended.")
    assert await refusal(MoveKind.SLEEP, OpOutcome.FAILED, why) is why
    assert isinstance(await refusal(MoveKind.LOAD, OpOutcome.FAILED), LoadFailed)


@pytest.mark.parametrize("kind", [MoveKind.LOAD, MoveKind.PREPARE])
async def test_a_store_that_is_down_is_told_as_it_is_to_callers_and_not_as_a_load_that_failed(kind: MoveKind) -> None:
    error = await refusal(kind, OpOutcome.STORE_DOWN, LoadFailed("An older failure."))
    assert isinstance(error, LeaseStoreUnavailable) and (error.status, error.code) == (503, "lease_store_unavailable")
    assert error.retry_after_s and not error.final
    for word in ("qwen", "lease store does not answer", "Ask again", "/api/v1/status"):
        assert word in error.message
