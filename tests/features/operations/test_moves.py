"""What an operator is told of an order that could not be carried out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.schema import Config
from greenroom.core.decide.green_room import Shortfall
from greenroom.core.effects import OpOutcome
from greenroom.core.events import Event, MoveAsked
from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import (
    GreenroomError,
    LeaseStoreUnavailable,
    LoadFailed,
    ModelPinned,
    NoPlace,
    TooLarge,
    Unsupported,
)
from greenroom.features.operations.moves import OperatorMoves
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.loop import AsyncEffects
from greenroom.runtime.memory.slot_memory import SlotMemory
from greenroom.runtime.moves.mover import Mover
from greenroom.runtime.shell import Shell

QWEN = ModelId("qwen")


class Rig:
    """A scheduler that answers every order with the same outcome, at once."""

    def __init__(
        self,
        outcome: OpOutcome,
        failure: GreenroomError | None = None,
        shortfall: Shortfall | None = None,
        no_device: str = "",
        kept: tuple[ModelId, ...] = (),
    ) -> None:
        self.asked: list[MoveAsked] = []
        self._outcome = outcome
        self._effects = SimpleNamespace(operations=dict[Any, asyncio.Future[OpOutcome]]())
        self.failures = {} if failure is None else {QWEN: failure}
        catalog = Catalog()
        keys = {"path": "/models/qwen.gguf", "memory_mib": 1, "pinned": QWEN in kept}
        catalog.fill(Config.model_validate({"models": {QWEN: keys}}))
        view = SimpleNamespace(slots_of=lambda model: [model], green_room_shortfall=lambda _: shortfall)
        loop = SimpleNamespace(post=self._post, clock=lambda: 5.0, view=view)
        self.operations = OperatorMoves(
            cast(AsyncEffects, self._effects),
            cast(Mover, SimpleNamespace(failures=self.failures)),
            cast(Shell, SimpleNamespace(loop=loop, catalog=catalog)),
            cast(SlotMemory, SimpleNamespace(no_device=lambda _: no_device)),
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


@pytest.mark.parametrize("kind", [MoveKind.UNLOAD, MoveKind.SLEEP, MoveKind.LOAD, MoveKind.PREPARE])
async def test_what_is_kept_leaves_only_by_force(kind: MoveKind) -> None:
    rig = Rig(OpOutcome.DONE, kept=(QWEN,))
    comes = kind in (MoveKind.LOAD, MoveKind.PREPARE)
    model, evict = (ModelId("other"), (QWEN,)) if comes else (QWEN, ())
    with pytest.raises(ModelPinned, match="qwen is pinned"):
        await rig.operations.move(kind, model, evict=evict)
    assert rig.asked == []
    await rig.operations.move(kind, model, evict=evict, force=True)
    assert len(rig.asked) == 1
    if comes:
        await rig.operations.move(kind, QWEN)


@pytest.mark.parametrize("kind", [MoveKind.SLEEP, MoveKind.PREPARE])
async def test_a_model_that_cannot_sleep_is_named_with_its_engine_and_what_works_instead(kind: MoveKind) -> None:
    error = await refusal(kind, OpOutcome.REFUSED)
    assert isinstance(error, Unsupported) and error.param == "model"
    what = "prepare it" if kind is MoveKind.PREPARE else "put it to sleep"
    for word in ("qwen", "llamacpp", "`unload`", what):
        assert word in error.message


async def test_a_load_that_rules_exclude_says_where_the_models_are_named() -> None:
    said = await refusal(MoveKind.LOAD, OpOutcome.EXCLUDED)
    assert said.code == "model_excluded" and "`greenroom explain qwen`" in said.message


@pytest.mark.parametrize("kind", [MoveKind.LOAD, MoveKind.PREPARE])
async def test_an_order_for_a_model_whose_devices_are_not_there_says_which_are(kind: MoveKind) -> None:
    with pytest.raises(TooLarge, match=r"^qwen may use only gpu7\.$"):
        await Rig(OpOutcome.TOO_LARGE, no_device="qwen may use only gpu7.").operations.move(kind, QWEN)


async def test_too_large_for_the_green_room_is_told_apart_from_too_large_to_be_ready() -> None:
    stage, green_room = [await refusal(kind, OpOutcome.TOO_LARGE) for kind in (MoveKind.LOAD, MoveKind.PREPARE)]
    assert isinstance(stage, TooLarge) and isinstance(green_room, TooLarge)
    assert "green_room_mib" in green_room.message and "green_room_mib" not in stage.message


@pytest.mark.parametrize(
    ("shortfall", "said"),
    [
        (
            Shortfall(9_000, 8_000, 0),
            "qwen takes 9,000 MiB of host memory asleep, and the green room has 8,000 MiB. Raise "
            "`memory.green_room_mib`.",
        ),
        (
            Shortfall(5_000, 8_000, 4_000),
            "qwen takes 5,000 MiB of host memory asleep, and the green room has 8,000 MiB, of which pinned models keep "
            "4,000. Raise `memory.green_room_mib`, or unpin one; `greenroom ps` shows them.",
        ),
    ],
)
async def test_too_large_for_the_green_room_says_by_how_much_and_names_pins_only_where_there_are_some(
    shortfall: Shortfall, said: str
) -> None:
    with pytest.raises(TooLarge) as refused:
        await Rig(OpOutcome.TOO_LARGE, shortfall=shortfall).operations.move(MoveKind.PREPARE, QWEN)
    assert refused.value.message == said


async def test_an_unload_ends_the_note_of_how_the_model_was_lost() -> None:
    rig = Rig(OpOutcome.DONE, LoadFailed("qwen was lost: its engine ended (signal 9)."))
    await rig.operations.move(MoveKind.SLEEP, QWEN)
    assert QWEN in rig.failures
    await rig.operations.move(MoveKind.UNLOAD, QWEN)
    assert not rig.failures


async def test_an_unload_that_failed_leaves_the_note() -> None:
    rig = Rig(OpOutcome.FAILED, LoadFailed("qwen was lost: its engine ended (signal 9)."))
    with pytest.raises(LoadFailed):
        await rig.operations.move(MoveKind.UNLOAD, QWEN)
    assert QWEN in rig.failures


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
