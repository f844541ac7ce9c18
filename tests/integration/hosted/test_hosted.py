"""Models that live in workers: they sleep, wake, share a process, and outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.events import SlotsLost
from greenroom.core.model import ModelId, MoveKind, Tier
from greenroom.errors import LoadFailed, LoadOutOfMemory, UnusableModel
from greenroom.runtime.timeouts import TIMEOUTS, Timeouts
from tests.harness import gateway, write_config
from tests.integration.facts import at_rest
from tests.integration.hosted_rig import Folder, arenas, move, nothing_left, tier, until_in, worker_of, worker_timeouts
from tests.integration.raw import chat, http
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left")
__all__ = ["nothing_left"]

QUIET: dict[str, Any] = {"memory": {"spare_worker": False}}


@contextlib.asynccontextmanager
async def hosting(
    tmp_path: Path, timeouts: Timeouts = TIMEOUTS, beside: Sequence[str] = (), **conduct: Any
) -> AsyncIterator[tuple[App, Folder]]:
    """A gateway with the model alpha, whose worker behaves like this, and others that behave well."""
    folder, (_, models) = Folder(tmp_path, "alpha", **conduct), several(tmp_path, *beside)
    async with gateway(tmp_path, {"alpha": folder.model(), **models}, timeouts=timeouts, **QUIET) as app:
        yield app, folder


def several(tmp_path: Path, *names: str) -> tuple[dict[str, Folder], dict[str, Any]]:
    folders = {name: Folder(tmp_path, name) for name in names}
    return folders, {name: folder.model() for name, folder in folders.items()}


async def test_a_model_is_loaded_answers_and_leaves_nothing_when_it_is_unloaded(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, folder):
        answer = await chat(app, "alpha")
        assert answer.status == 200 and answer.text.startswith("alpha")
        assert folder.events() == ["open", "wake"] and arenas()
        assert "worker: opening alpha" in "\n".join(app.slots.log(ModelId("alpha")).tail(20))
        await move(app, MoveKind.UNLOAD, "alpha")
        assert folder.events() == ["open", "wake", "close"]
        assert not arenas() and not app.hosted_slots.there and not app.slots.live


async def test_models_that_do_not_fit_together_change_places_without_being_read_again(tmp_path: Path) -> None:
    folders, models = several(tmp_path, "alpha", "beta")
    async with gateway(tmp_path, models, budget_mib=150, **QUIET) as app:
        for name in ("alpha", "beta", "alpha", "beta"):
            assert (await chat(app, name)).text.startswith(name)
        assert folders["alpha"].events() == ["open", "wake", "sleep", "wake", "sleep"]
        assert folders["beta"].events() == ["open", "wake", "sleep", "wake"]
        assert (tier(app, "alpha"), tier(app, "beta")) == (Tier.ASLEEP, Tier.READY)
        assert len(app.hosted_slots.workers) == 1
        assert worker_of(app, "alpha") == worker_of(app, "beta")


async def test_a_prepared_model_sleeps_until_it_is_asked_for(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, folder):
        await move(app, MoveKind.PREPARE, "alpha")
        assert (tier(app, "alpha"), folder.events()) == (Tier.ASLEEP, ["open"])
        assert (await chat(app, "alpha")).status == 200
        await move(app, MoveKind.SLEEP, "alpha")
        assert (tier(app, "alpha"), folder.events()) == (Tier.ASLEEP, ["open", "wake", "sleep"])
        await move(app, MoveKind.UNLOAD, "alpha")
        assert not arenas()


async def test_what_a_wake_takes_until_all_has_arrived_is_learned(tmp_path: Path) -> None:
    async with hosting(tmp_path, expected_s=30) as (app, _):
        await move(app, MoveKind.PREPARE, "alpha")
        await chat(app, "alpha")
        learned = app.loop.scheduler.state.models[ModelId("alpha")].learned_s
        assert 30 <= learned[MoveKind.WAKE] < 60


async def test_a_request_that_stops_waiting_is_told_the_progress_of_the_load(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path, "alpha", at={"open": "slow 5"}), Folder(tmp_path, "other")
    models = {"alpha": folder.model(), "other": other.model()}
    async with gateway(tmp_path, models, server={"wait_max_s": 3}, **QUIET) as app:
        await move(app, MoveKind.LOAD, "other")
        answer = await chat(app, "alpha")
        assert (answer.status, answer.error["code"]) == (503, "model_loading")
        assert answer.error["loading"]["progress"] == 0.5
        await until_in(app, "alpha", Tier.READY)


# --- processes ------------------------------------------------------------------------------------------------------


async def test_an_isolated_model_has_a_process_of_its_own_and_it_ends_with_it(tmp_path: Path) -> None:
    folders = {name: Folder(tmp_path, name) for name in ("alpha", "beta")}
    models = {"alpha": folders["alpha"].model(), "beta": folders["beta"].model(isolate=True)}
    async with gateway(tmp_path, models, **QUIET) as app:
        await chat(app, "alpha")
        await chat(app, "beta")
        own = worker_of(app, "beta")
        assert own != worker_of(app, "alpha")
        await move(app, MoveKind.UNLOAD, "beta")
        await until(lambda: not os.path.exists(f"/proc/{own}"), "its process has ended")
        assert (await chat(app, "alpha")).status == 200


async def test_models_with_an_environment_of_their_own_have_a_worker_of_their_own(tmp_path: Path) -> None:
    folders = {name: Folder(tmp_path, name) for name in ("alpha", "beta")}
    models = {"alpha": folders["alpha"].model(), "beta": folders["beta"].model(env={"A": "b"})}
    async with gateway(tmp_path, models, **QUIET) as app:
        await chat(app, "alpha")
        await chat(app, "beta")
        assert worker_of(app, "alpha") != worker_of(app, "beta")
        environment = Path(f"/proc/{worker_of(app, 'beta')}/environ").read_bytes().split(b"\0")
        assert b"A=b" in environment and b"HF_HUB_OFFLINE=1" in environment


async def test_many_loads_at_once_share_the_start_of_one_worker(tmp_path: Path) -> None:
    _, models = several(tmp_path, "a", "b", "c")
    async with gateway(tmp_path, models, **QUIET) as app:
        answers = await asyncio.gather(*(chat(app, name) for name in models))
        assert [answer.status for answer in answers] == [200] * 3
        assert len(app.hosted_slots.workers) == 1


async def test_a_worker_that_dies_leaves_its_models_asleep_and_they_wake_in_the_spare(tmp_path: Path) -> None:
    folders, models = several(tmp_path, "alpha", "beta", "gamma")
    recording = tmp_path / "events.jsonl"
    async with gateway(tmp_path, models, server={"record_events": str(recording)}, timeouts=worker_timeouts()) as app:
        for name in models:
            await chat(app, name)
        on_stage = [slot.id for slot in app.hosted_slots.there.values() if slot.entry.id != "gamma"]
        await move(app, MoveKind.SLEEP, "gamma")
        await until(lambda: len(app.hosted_slots.workers) == 2, "a spare is there")
        dead = worker_of(app, "alpha")
        (spare,) = [worker.pid for worker in app.hosted_slots.workers.values() if worker.pid != dead]
        os.kill(dead, signal.SIGKILL)
        for name in models:
            await until_in(app, name, Tier.ASLEEP)
        assert len(arenas()) == 3
        for name in models:
            assert (await chat(app, name)).text.startswith(name)
            assert worker_of(app, name) == spare
            assert [line["filled"] for line in folders[name].lines("open")] == [False, True]
        await until(lambda: len(app.hosted_slots.workers) == 2, "there is a spare again")
    lost = [line for line in recording.read_text().splitlines() if '"SlotsLost"' in line]
    assert len(lost) == 1, "all slots that were ready, in one event"
    assert f'"slots":{json.dumps(on_stage, separators=(",", ":"))}' in lost[0] and '"is":"asleep"' in lost[0]


async def test_a_worker_that_ends_again_and_again_is_told_as_the_cause_of_the_pause(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, _):
        await chat(app, "alpha")
        for _ in range(2):
            await move(app, MoveKind.LOAD, "alpha")
            assert ModelId("alpha") not in app.mover.failures, "it is there, whatever went before"
            os.kill(worker_of(app, "alpha"), signal.SIGKILL)
            await until_in(app, "alpha", Tier.ASLEEP)
        refused = await chat(app, "alpha")
        assert refused.status == 503 and refused.error["code"] == "model_load_failed"
        assert refused.error["message"] == "alpha was lost: its worker ended (killed by SIGKILL)."
        shown = (await http(app, "GET", "/api/v1/models/alpha")).json()
        assert shown["last_error"]["message"] == refused.error["message"] and shown["retry_in_s"] > 0


@pytest.mark.slow
async def test_a_worker_that_stands_still_is_ended_and_its_models_are_served_by_the_next(tmp_path: Path) -> None:
    async with hosting(tmp_path, worker_timeouts(look_every_s=0.1, answer_s=3.0)) as (app, _):
        await chat(app, "alpha")
        pid = worker_of(app, "alpha")
        os.kill(pid, signal.SIGSTOP)
        assert (await chat(app, "alpha")).status == 200
        assert worker_of(app, "alpha") != pid
        await at_rest(app)


@pytest.mark.slow
async def test_a_worker_whose_slot_refuses_connections_is_ended_and_its_models_go_on_elsewhere(tmp_path: Path) -> None:
    models = {name: Folder(tmp_path, name).model() for name in ("alpha", "bravo")}
    async with gateway(tmp_path, models, **QUIET) as app:
        await move(app, MoveKind.LOAD, "alpha")
        assert (await chat(app, "bravo")).status == 200
        pid = worker_of(app, "alpha")
        assert worker_of(app, "bravo") == pid
        # As by a program that tidies up folders.
        (alpha,) = [slot for slot in app.slots.live.values() if slot.entry.id == "alpha"]
        assert alpha.socket is not None
        Path(alpha.socket).unlink()
        assert [(await chat(app, name)).status for name in models] == [200] * 2
        assert worker_of(app, "alpha") == worker_of(app, "bravo") != pid
        await at_rest(app)


async def test_a_spare_is_there_after_the_first_load_and_ends_with_the_gateway(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "alpha")
    async with gateway(tmp_path, {"alpha": folder.model()}, timeouts=worker_timeouts()) as app:
        assert not app.hosted_slots.workers
        await chat(app, "alpha")
        await until(lambda: len(app.hosted_slots.workers) == 2, "a spare is there")
        await move(app, MoveKind.UNLOAD, "alpha")
        await until(lambda: len(app.hosted_slots.workers) == 1, "one of them is enough")
        await chat(app, "alpha")


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "mute"])
async def test_a_worker_that_crashes_or_hangs_up_in_a_wake_is_replaced(tmp_path: Path, how: str) -> None:
    async with hosting(tmp_path, at={"wake": f"once {how}"}) as (app, folder):
        assert (await chat(app, "alpha")).status == 200
        assert folder.events() == ["open", "wake", "open", "wake"]
        assert folder.lines("open")[1]["filled"]


async def test_a_model_that_crashes_every_worker_fails_and_leaves_nothing(tmp_path: Path) -> None:
    async with hosting(tmp_path, at={"wake": "crash"}) as (app, folder):
        answer = await chat(app, "alpha")
        assert (answer.status, answer.json()["error"]["code"]) == (503, "model_load_failed")
        assert "worker ended (exit code 70)" in answer.json()["error"]["message"]
        await until(lambda: not app.hosted_slots.there and not app.hosted_slots.workers, "nothing is left")
        assert folder.events() == ["open", "wake"] * 2


@pytest.mark.slow
async def test_a_crash_at_open_is_tried_again_only_if_another_may_have_caused_it(tmp_path: Path) -> None:
    bad, good = Folder(tmp_path, "bad", at={"open": "crash"}), Folder(tmp_path, "good")
    async with gateway(tmp_path, {"bad": bad.model(), "good": good.model()}, **QUIET) as app:
        with pytest.raises(LoadFailed):
            await move(app, MoveKind.LOAD, "bad")
        assert bad.events() == ["open"], "it was alone"
        await chat(app, "good")
        with pytest.raises(LoadFailed):
            await move(app, MoveKind.LOAD, "bad")
        assert bad.events() == ["open"] * 3
        assert (await chat(app, "good")).status == 200
        assert [line["filled"] for line in good.lines("open")] == [False, True]


async def test_what_a_worker_says_of_a_failed_open_is_told(tmp_path: Path) -> None:
    kinds = {"bad_model": UnusableModel, "out_of_memory": LoadOutOfMemory, "failed": LoadFailed}
    async with hosting(tmp_path, beside=("other",)) as (app, folder):
        await chat(app, "other")
        for kind, error in kinds.items():
            folder.behave(at={"open": f"fail {kind}"})
            with pytest.raises(error, match="open fails as told"):
                await move(app, MoveKind.LOAD, "alpha")
            await until(lambda: len(app.hosted_slots.there) == 1 and not app.mover.moving, "the other one is there")
            assert len(arenas()) == 1 and (await chat(app, "other")).status == 200


@pytest.mark.slow
async def test_an_open_that_hangs_ends_at_its_deadline_and_the_worker_goes_on(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path, "alpha", at={"open": "hang"}), Folder(tmp_path, "other")
    models = {"alpha": folder.model(load_timeout_s=1), "other": other.model()}
    async with gateway(tmp_path, models, **QUIET) as app:
        await chat(app, "other")
        pid = worker_of(app, "other")
        with pytest.raises(LoadFailed, match="it took more than 1 s"):
            await move(app, MoveKind.LOAD, "alpha")
        assert worker_of(app, "other") == pid and len(arenas()) == 1


@pytest.mark.slow
async def test_a_worker_that_cannot_close_is_ended_and_its_neighbours_go_on_elsewhere(tmp_path: Path) -> None:
    async with hosting(
        tmp_path, worker_timeouts(close_s=0.2, close_shared_s=0.5), beside=("other",), at={"close": "hang"}
    ) as (app, _):
        await chat(app, "alpha")
        await chat(app, "other")
        pid = worker_of(app, "other")
        await move(app, MoveKind.UNLOAD, "alpha")
        await until_in(app, "other", Tier.ASLEEP)
        assert (await chat(app, "other")).status == 200
        assert worker_of(app, "other") != pid and len(arenas()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail failed", "hang", "crash"])
async def test_a_sleep_that_goes_wrong_frees_the_memory_all_the_same(tmp_path: Path, how: str) -> None:
    folders, models = several(tmp_path, "alpha", "beta")
    limits = worker_timeouts(sleep_s=0.3, close_s=0.3) if how == "hang" else worker_timeouts()
    async with gateway(tmp_path, models, budget_mib=150, timeouts=limits, **QUIET) as app:
        await chat(app, "alpha")
        folders["alpha"].behave(at={"sleep": f"once {how}"})
        assert (await chat(app, "beta")).text.startswith("beta")
        # A crash is as good as a sleep: the weights are safe.
        assert tier(app, "alpha") is (Tier.ASLEEP if how == "crash" else Tier.COLD)
        assert (await chat(app, "alpha")).text.startswith("alpha")


@pytest.mark.slow
async def test_a_wake_that_hangs_ends_and_the_model_is_loaded_anew(tmp_path: Path) -> None:
    async with hosting(tmp_path, worker_timeouts(wake_s=0.3, sleep_s=0.3), at={"wake": "once hang"}) as (app, _):
        with pytest.raises(LoadFailed, match="did not wake within"):
            await move(app, MoveKind.LOAD, "alpha")

        async def wakes() -> bool:
            # The limit is short for a good wake, too, where the machine is busy.
            with contextlib.suppress(LoadFailed):
                await move(app, MoveKind.LOAD, "alpha")
            return tier(app, "alpha") is Tier.READY

        await until(wakes, "it is loaded anew")


@pytest.mark.parametrize("phase", ["open", "wake"])
async def test_a_load_that_is_called_off_leaves_nothing(tmp_path: Path, phase: str) -> None:
    async with hosting(tmp_path, worker_timeouts(sleep_s=0.3), at={phase: "slow 30"}) as (app, folder):
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: phase in folder.events(), f"{phase} is under way")
        await move(app, MoveKind.UNLOAD, "alpha")
        assert (await waiting).status == 503
        await until(lambda: not app.mover.moving, "all has ended")
        assert not arenas() and not app.hosted_slots.there


async def test_an_open_that_is_called_off_and_cannot_stop_is_waited_for(tmp_path: Path) -> None:
    async with hosting(tmp_path, worker_timeouts(close_s=0.2), beside=("other",), at={"open": "deaf"}) as (app, folder):
        await chat(app, "other")
        pid = worker_of(app, "other")
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: bool(folder.events()), "it is being opened")
        leaving = asyncio.create_task(move(app, MoveKind.UNLOAD, "alpha"))
        assert (await waiting).status == 503
        assert (await chat(app, "other")).status == 200
        assert not leaving.done() and len(arenas()) == 2, "it holds its memory as long as the worker does"
        folder.behave()
        await leaving
        assert worker_of(app, "other") == pid and len(arenas()) == 1
        assert (await chat(app, "alpha")).status == 200
        assert worker_of(app, "alpha") == pid


async def test_a_wake_that_is_called_off_and_cannot_stop_is_waited_for(tmp_path: Path) -> None:
    async with hosting(tmp_path, worker_timeouts(sleep_s=0.2), beside=("other",)) as (app, folder):
        await chat(app, "other")
        pid = worker_of(app, "other")
        await move(app, MoveKind.PREPARE, "alpha")
        folder.behave(at={"wake": "deaf"})
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: "wake" in folder.events(), "it wakes")
        leaving = asyncio.create_task(move(app, MoveKind.SLEEP, "alpha"))
        assert (await waiting).status == 503
        assert (await chat(app, "other")).status == 200 and not leaving.done()
        folder.behave()
        await leaving
        assert (tier(app, "alpha"), folder.events()) == (Tier.ASLEEP, ["open", "wake", "sleep"])
        assert worker_of(app, "other") == worker_of(app, "alpha") == pid


@pytest.mark.slow
async def test_a_worker_that_stays_deaf_after_a_load_has_failed_is_ended(tmp_path: Path) -> None:
    folder, other = Folder(tmp_path, "alpha", at={"open": "deaf 60"}), Folder(tmp_path, "other")
    models = {"alpha": folder.model(load_timeout_s=1), "other": other.model()}
    async with gateway(tmp_path, models, timeouts=worker_timeouts(close_s=0.2, close_shared_s=1.0), **QUIET) as app:
        await chat(app, "other")
        pid = worker_of(app, "other")
        with pytest.raises(LoadFailed, match="it took more than 1 s"):
            await move(app, MoveKind.LOAD, "alpha")
        await until_in(app, "other", Tier.ASLEEP)
        assert (await chat(app, "other")).status == 200
        assert worker_of(app, "other") != pid


async def test_a_deaf_worker_that_serves_no_other_model_is_ended_soon(tmp_path: Path) -> None:
    folders = [Folder(tmp_path, name, at={"open": "deaf 60"}) for name in ("alpha", "beta")]
    models = {"alpha": folders[0].model(), "beta": folders[1].model()}
    async with gateway(tmp_path, models, timeouts=worker_timeouts(close_s=0.2), **QUIET) as app:
        waiting = [asyncio.create_task(chat(app, name)) for name in models]
        await until(lambda: all(folder.events() for folder in folders), "both are being opened")
        # Each is the other's neighbour; a neighbour that is leaving too is not waited for.
        await asyncio.gather(*(move(app, MoveKind.UNLOAD, name) for name in models))
        assert [(await one).status for one in waiting] == [503, 503]
        await until(lambda: not app.hosted_slots.workers, "the worker was ended")


@pytest.mark.slow
@pytest.mark.parametrize("wakes_in_time", [True, False])
async def test_a_second_call_off_does_not_interrupt_the_first_one(tmp_path: Path, wakes_in_time: bool) -> None:
    """Also where it was the deadline of the wake that came first, which nothing outside knows of."""
    async with hosting(tmp_path, worker_timeouts(wake_s=60.0 if wakes_in_time else 0.3)) as (app, folder):
        await move(app, MoveKind.PREPARE, "alpha")
        folder.behave(at={"wake": "slow 2"})
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: "wake" in folder.events(), "it wakes")
        # The deadline passes, long before the worker is asleep again.
        passed_at = app.clock() + 0.3
        await until(lambda: app.clock() > passed_at, "the deadline has passed")
        await asyncio.gather(*(move(app, MoveKind.SLEEP, "alpha") for _ in range(2)))
        assert folder.events() == ["open", "wake", "sleep"], "it is over when the worker has given the memory back"
        assert (await waiting).status == 503
        assert tier(app, "alpha") is Tier.ASLEEP and not app.slots.live
        assert not any(slot.is_ready for slot in app.hosted_slots.there.values())
        folder.behave()

        async def is_served() -> bool:
            # The deadline is short for a good wake, too, where the machine is busy.
            return (await chat(app, "alpha")).status == 200

        await until(is_served)


async def test_a_load_that_is_called_off_while_its_worker_starts_leaves_no_worker(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, _):
        waiting = asyncio.create_task(chat(app, "alpha"))
        await until(lambda: bool(app.hosted_slots.there), "it begins")
        await move(app, MoveKind.UNLOAD, "alpha")
        assert (await waiting).status == 503
        assert not app.hosted_slots.there and not app.hosted_slots.workers


async def test_a_worker_start_goes_on_for_a_model_when_another_is_unloaded(tmp_path: Path) -> None:
    folders, models = several(tmp_path, "alpha", "beta")
    async with gateway(tmp_path, models, **QUIET) as app:
        waiting = [asyncio.create_task(chat(app, name)) for name in models]
        await until(lambda: len(app.hosted_slots.there) == 2, "both begin")
        await move(app, MoveKind.UNLOAD, "alpha")
        assert [(await one).status for one in waiting] == [503, 200]
        assert len(app.hosted_slots.workers) == 1 and not folders["alpha"].events()


async def test_a_gateway_that_stops_while_a_worker_starts_leaves_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "alpha")
    async with gateway(tmp_path, {"alpha": folder.model(preload=True)}, **QUIET) as app:
        await until(lambda: bool(app.hosted_slots.there), "it begins")
    assert not app.hosted_slots.there and not app.hosted_slots.workers


async def test_a_slot_that_the_scheduler_has_given_up_is_forgotten(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, folder):
        await move(app, MoveKind.PREPARE, "alpha")
        (slot,) = app.hosted_slots.there
        app.hosted_moves.reconcile(slot)
        assert app.hosted_slots.there, "the scheduler counts with it"
        app.loop.post(SlotsLost(app.clock(), (slot,), Tier.COLD, "it is lost"))
        app.hosted_moves.reconcile(slot)
        await until(lambda: not app.hosted_slots.there, "it is forgotten")
        assert not arenas() and folder.events() == ["open", "close"]


async def test_a_flush_reaches_the_worker_of_a_ready_model_only(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, folder):
        await chat(app, "alpha")
        (slot,) = app.hosted_slots.there
        assert await app.hosted_moves.flush(slot, "me", None) == (2, 1024)
        await move(app, MoveKind.SLEEP, "alpha")
        assert await app.hosted_moves.flush(slot, "me", None) == (0, 0)
        assert folder.events().count("flush") == 1


async def test_a_changed_model_is_opened_anew_and_the_old_arena_is_given_back(tmp_path: Path) -> None:
    async with hosting(tmp_path) as (app, folder):
        await chat(app, "alpha")
        await move(app, MoveKind.SLEEP, "alpha")
        write_config(tmp_path, {"alpha": folder.model(ctx_size=512)}, **QUIET)
        await app.reload()
        await until(lambda: not app.hosted_slots.there, "the old one has left")
        assert (await chat(app, "alpha")).status == 200
        assert len(arenas()) == 1
