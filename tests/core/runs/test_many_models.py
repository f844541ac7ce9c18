"""Very many models waiting at once: none is hidden behind others, all are served, and a round stays short."""

from __future__ import annotations

import pytest

from greenroom.core.apply import ASKED_MAX, ROUND_WITH_MANY_S
from greenroom.core.events import Limits
from greenroom.core.model import DeviceId, Tier
from greenroom.core.policy.default import BoundedFirstCome
from greenroom.core.queue.index import LEADING_MIN, REFRESHED_BY_LEADING
from greenroom.core.queue.waitlist import MODELS_FEW, Queue
from tests.core.queue.test_order import ready
from tests.core.world import Fate, World, gpu, model

GPU0, GPU1 = DeviceId("gpu0"), DeviceId("gpu1")


@pytest.mark.untraced
@pytest.mark.parametrize("others", [ASKED_MAX // 2, ASKED_MAX + 4, MODELS_FEW + 6])
def test_models_waiting_for_a_busy_device_hide_none_that_waits_for_an_idle_one(others: int) -> None:
    busy = [model(f"busy{number}", 6_000, devices=(GPU0,)) for number in range(others)]
    idle = [model(f"idle{number}", 6_000, devices=(GPU1,)) for number in range(2)]
    world = World([*busy, *idle], devices=(gpu(0, 8_000), gpu(1, 8_000)))
    world.arrive("hold", "busy0", takes_s=300.0)
    world.run(6.0)
    for number in range(1, others):
        world.arrive(f"r{number}", f"busy{number}", takes_s=1.0)
    world.arrive("first", "idle0", takes_s=10.0)
    second = world.arrive("second", "idle1", takes_s=1.0)
    world.run(60.0)
    assert second.fate is Fate.SERVED and second.granted_at < 40.0


def test_in_a_crowd_a_small_model_is_not_hidden_behind_large_ones() -> None:
    large = [model(f"large{number}", 7_000) for number in range(MODELS_FEW + 6)]
    world = World([model("held", 5_000), *large, model("small", 2_000)], devices=(gpu(0, 8_000),))
    world.arrive("hold", "held", takes_s=50.0)
    world.run(6.0)
    for spec in large:
        world.arrive(f"r-{spec.id}", spec.id, takes_s=1.0)
    small = world.arrive("small", "small", takes_s=1.0)
    world.run(20.0)
    assert small.fate is Fate.SERVED and world.tier("held") is Tier.READY


def crowd(*sizes_mib: int) -> World:
    """One request waits for each of these models, on a device that is taken for half a minute."""
    models = [model(f"m{number:03}", mib) for number, mib in enumerate(sizes_mib)]
    world = World([model("held", 7_900), *models], devices=(gpu(0, 8_000),))
    world.arrive("hold", "held", takes_s=30.0)
    world.run(6.0)
    for spec in models:
        world.arrive(f"r-{spec.id}", spec.id, takes_s=0.1)
    return world


def hopeful_crowd(models: int) -> World:
    """Each wants a little less than the one before, so each might fare better; but a round must end."""
    return crowd(*(7_500 - number for number in range(models)))


def watched(world: World) -> list[str]:
    """The models that rounds ask for from now on."""
    asked: list[str] = []
    rounds = world.scheduler._rounds
    decide_on = rounds._ask_for
    rounds._ask_for = lambda queue, residents, now: (asked.append(queue.model), decide_on(queue, residents, now))[1]  # type: ignore[func-returns-value,method-assign]
    return asked


@pytest.mark.pure
def test_one_round_asks_for_no_more_than_so_many_of_a_few() -> None:
    world = hopeful_crowd(2 * ASKED_MAX + 8)
    asked = watched(world)
    world.scheduler._rounds.bring(world.now)
    assert len(asked) == 2 * ASKED_MAX


@pytest.mark.pure
def test_one_round_asks_for_a_bounded_number_of_models_and_for_all_in_turn() -> None:
    world = hopeful_crowd(MODELS_FEW + 16)
    asked, rounds = watched(world), world.scheduler._rounds
    ever: set[str] = set()
    for _ in range(2 * (MODELS_FEW + 16) // REFRESHED_BY_LEADING):
        asked.clear()
        rounds.bring(world.now)
        assert len(asked) <= LEADING_MIN + ASKED_MAX
        ever.update(asked)
    assert len(ever) == MODELS_FEW + 16


@pytest.mark.untraced
def test_rounds_that_end_early_still_serve_every_request() -> None:
    world = hopeful_crowd(MODELS_FEW + 16)
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values()) and world.is_at_rest()


@pytest.mark.untraced
@pytest.mark.parametrize("models", [MODELS_FEW + 16, 2 * MODELS_FEW + 32])
@pytest.mark.pure
def test_a_round_ranks_no_more_than_so_many_however_many_wait(models: int) -> None:
    world = crowd(*[7_000] * models)
    ranked: list[str] = []
    policy = world.scheduler.state.policy
    rank = policy.rank
    policy.rank = lambda queue, now: (ranked.append(queue.model), rank(queue, now))[1]  # type: ignore[func-returns-value,method-assign]
    for _ in range(models // REFRESHED_BY_LEADING):
        before = len(ranked)
        world.scheduler._rounds.bring(world.now)
        assert len(ranked) - before <= 2 * REFRESHED_BY_LEADING
    assert len(set(ranked)) == models, "each of them was ranked in turn"


def test_in_a_crowd_there_is_a_round_soon_so_that_no_rank_grows_old() -> None:
    world = crowd(*[7_000] * (MODELS_FEW + 16))
    world.scheduler._rounds.bring(world.now)
    assert world.scheduler._rounds.looks_at <= world.now + ROUND_WITH_MANY_S


def test_among_many_models_urgent_requests_go_before_all_that_are_not_late() -> None:
    world = crowd(*[7_000] * (MODELS_FEW + 16))
    world.run(world.now + 20.0)
    urgent = world.arrive("urgent", f"m{MODELS_FEW + 15:03}", takes_s=1.0, priority=0)
    world.run(world.now + 30.0)
    assert urgent.fate is Fate.SERVED
    granted = [
        call.candidates for call in world.calls_by_id.values() if call.grants and call.granted_at <= urgent.granted_at
    ]
    assert set(granted) == {("held",), urgent.candidates}


@pytest.mark.slow
def test_arrivals_and_departures_among_many_models_leave_all_others_served() -> None:
    models = [model(f"m{number}", 3_000, concurrency=4) for number in range(MODELS_FEW + 40)]
    world = World(models, devices=(gpu(0, 8_000),), limits=Limits(queue_depth_max=10_000))
    leaving = [f"m{number}" for number in range(0, len(models), 8)]
    for turn in range(3):
        for number, spec in enumerate(models):
            if turn == 0 or spec.id not in leaving:
                world.arrive(f"{spec.id}-{turn}", spec.id, takes_s=0.5, priority=0 if number % 9 == turn else 1)
    for name in leaving:
        world.go(f"{name}-0")
    world.run()
    stayed = {call.fate for name, call in world.calls_by_id.items() if name.removesuffix("-0") not in leaving}
    assert stayed == {Fate.SERVED} and world.is_at_rest()


@pytest.mark.untraced
def test_models_that_are_removed_in_a_crowd_are_no_longer_ranked() -> None:
    world = crowd(*[7_000] * (MODELS_FEW + 16))
    for _ in range(MODELS_FEW // REFRESHED_BY_LEADING + 2):
        world.scheduler._rounds.bring(world.now)
    world.config(removed=("m000", "m001"))
    world.scheduler._rounds.bring(world.now)
    assert world.calls_by_id["r-m000"].fate is Fate.REJECTED
    world.run(world.now + 60.0)
    assert world.calls_by_id["r-m002"].fate is Fate.SERVED


@pytest.mark.pure
def test_no_question_is_asked_when_an_answer_ends_where_a_model_leaves_before_the_last() -> None:
    ranked: list[str] = []

    class Noting(BoundedFirstCome):
        def rank(self, queue: Queue, now: float) -> tuple[float, ...]:
            ranked.append(queue.model)
            return super().rank(queue, now)

    models = [model(name, 6_000, concurrency=2) for name in ("a", "b", "c")]
    world = World(models, policies={"default": BoundedFirstCome, "noting": Noting}, limits=Limits(policy="noting"))
    ready(world, "a")
    for name in ("first", "last"):
        world.arrive(name, "a", takes_s=300.0)
    world.arrive("urgent", "b", priority=0, takes_s=1.0)
    world.arrive("waits", "c", takes_s=1.0)
    world.run(30.0)
    assert world.scheduler.state.ledger.promises, "a is closed for b, and still busy"
    ranked.clear()
    world.finish("first")
    assert not ranked
    world.finish("last")
    assert ranked
    world.run()
    assert all(call.fate is Fate.SERVED for call in world.calls_by_id.values())
