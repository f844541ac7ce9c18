"""Every rejection becomes an error that says what to do."""

import time
from collections.abc import Mapping
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from greenroom.config.part import GatewayState
from greenroom.config.schema import Config
from greenroom.core.contract import Scheduler
from greenroom.core.effects import RejectCode, Rejection, because
from greenroom.core.model import (
    Device,
    DeviceId,
    DeviceKind,
    LeaseId,
    ModelId,
    ModelSpec,
    Move,
    MoveId,
    MoveKind,
    Need,
    OtherLease,
    Slot,
    SlotId,
    Tier,
)
from greenroom.errors import (
    BudgetPassed,
    GreenroomError,
    LoadFailed,
    LoadOutOfMemory,
    ModelLoading,
    QueueFull,
    ShuttingDown,
    TooLarge,
    Unloaded,
    UnusableModel,
)
from greenroom.leases.records import Lease
from greenroom.runtime.catalogue import Catalog
from greenroom.runtime.memory.slot_memory import SlotMemory
from greenroom.runtime.rejections import RETRY_AFTER_MAX_S, RejectionErrors
from greenroom.runtime.scheduler_loop import SchedulerLoop
from greenroom.runtime.shell import Shell

M = ModelId("qwen")


class NoLeases:
    """Counts how often it is asked."""

    asked = 0

    def known(self) -> list[Lease]:
        self.asked += 1
        return []


def rejections(
    *,
    failed: GreenroomError | None = None,
    is_draining: bool = False,
    slots: tuple[Slot, ...] = (),
    no_device: str = "",
    gpus_mib: tuple[int, ...] = (),
    progress: float | None = None,
    leases: Mapping[LeaseId, str] = {},
    known: NoLeases | None = None,
) -> RejectionErrors:
    failures = {M: failed} if failed else {}
    config = Config.model_validate({"models": {M: {"cmd": "serve ${PORT}", "memory_mib": 1}}})
    catalog = Catalog()
    catalog.fill(config)
    devices = {DeviceId(f"gpu{n}"): Device(DeviceId(f"gpu{n}"), DeviceKind.GPU, mib) for n, mib in enumerate(gpus_mib)}
    others = [OtherLease(id, name, {}) for id, name in leases.items()]
    view = SimpleNamespace(slots_of=lambda _: slots, ledger=SimpleNamespace(devices=devices, others=others))
    shell = SimpleNamespace(
        live=GatewayState(config, is_draining=is_draining),
        # One of which nothing else is asked.
        loop=SchedulerLoop(cast(Scheduler, SimpleNamespace(view=view)), time.monotonic),
        catalog=catalog,
        hosted_slots=SimpleNamespace(progress_of=lambda _: progress),
    )
    memory = cast(SlotMemory, SimpleNamespace(no_device=lambda _: no_device))
    return RejectionErrors(cast(Shell, shell), failures, memory, known or NoLeases())


def error(code: RejectCode, *slots: Slot, **numbers: float) -> GreenroomError:
    return rejections(slots=slots).error_for(Rejection(code, M, **numbers))  # type: ignore[arg-type]


def slot(tier: Tier = Tier.COLD, move: MoveKind | None = None, **said: Any) -> Slot:
    spec = ModelSpec(id=M, need=Need(1))
    begun = None if move is None else Move(MoveId("m-1"), move, SlotId("s-1"), M, 1, {}, 0.0)
    return Slot(SlotId("s-1"), spec, {}, tier=tier, move=begun, **said)


READY, LOADING, WAKING = slot(Tier.READY), slot(move=MoveKind.LOAD), slot(Tier.ASLEEP, MoveKind.WAKE)
LEAVING = slot(Tier.READY, leaving_to=Tier.COLD)


@pytest.mark.parametrize("code", list(RejectCode))
def test_every_code_names_what_it_is_about(code: RejectCode) -> None:
    said = error(code, retry_after_s=3.0)
    assert said.status >= 400 and said.message
    assert "qwen" in said.message or isinstance(said, QueueFull | ShuttingDown)


def test_full_queue_tells_its_numbers() -> None:
    said = error(RejectCode.QUEUE_FULL, retry_after_s=2.2, queue_depth=16, avg_wait_s=1.5)
    assert said.message == "16 requests wait already; try again in 3 s.", "as Retry-After says it, in whole seconds"
    assert said.beside == {"queueDepth": 16, "avgWaitMs": 1500}


def test_excluded_names_the_pinned_models_to_operators_only() -> None:
    said = rejections().error_for(Rejection(RejectCode.EXCLUDED, M, beside=(ModelId("a"), ModelId("b"))))
    assert (said.status, said.code, said.final, said.retry_after_s) == (503, "model_excluded", True, None)
    assert f"does not let {M} be ready beside a, b (pinned)" in said.message
    assert "a, b" not in said.public


def test_a_wait_for_a_rule_is_not_told_as_one_for_memory() -> None:
    said = rejections().error_for(Rejection(RejectCode.EXPIRED, M, 5.0, beside=(ModelId("a"),)))
    assert said.code == "model_loading" and "does not let it be ready beside a." in said.message
    assert said.public == f"{M} waits until other models have left. Ask again." and "memory" not in said.beside


def test_a_model_that_leaves_does_not_wait_for_a_rule() -> None:
    said = error(RejectCode.EXPIRED, LEAVING, retry_after_s=5.0, beside=(ModelId("a"),))
    assert said.beside["loading"]["state"] == "leaving" and "is leaving" in said.message


LOWER = "Lower ctx_size or memory_mib, "


@pytest.mark.parametrize(
    ("numbers", "why", "told", "hidden"),
    [
        ({"needs_mib": 41_000, "free_mib": 23_920}, {}, ("41,000", "23,920"), ()),
        ({}, {"no_device": "qwen may use only gpu7."}, ("qwen may use only gpu7.",), ("gpu7",)),
        # Models are advised to be unpinned only where their memory would help.
        ({}, {}, (f"made free. {LOWER}or give it more devices.",), ()),
        ({"pinned": ("a", "b")}, {}, (f"{LOWER}unpin models (a, b), or give it more devices.",), ("unpin",)),
        (
            {},
            {"gpus_mib": (8_000, 6_000)},
            ("free. Its engine cannot be spread over several GPUs, which have 8,000, 6,000 MiB. Lower",),
            (),
        ),
        (
            {"held_by": ("lab", "ci")},
            {},
            ("at most 3 of 8,000 MiB can be made free; lab, ci hold some.",),
            ("lab", "8,000"),
        ),
    ],
)
def test_too_large_tells_need_and_room_and_names_to_operators_only(
    numbers: dict[str, Any], why: dict[str, Any], told: tuple[str, ...], hidden: tuple[str, ...]
) -> None:
    figures = {"needs_mib": 5, "free_mib": 3, "capacity_mib": 8_000, **numbers}
    said = rejections(**why).error_for(Rejection(RejectCode.TOO_LARGE, M, **figures))
    assert isinstance(said, TooLarge) and said.final
    assert all(words in said.message for words in told) and not any(words in said.public for words in hidden)
    memory = {name: figures[name] for name in ("needs_mib", "free_mib", "capacity_mib")}
    assert said.beside == {"memory": memory}


def test_what_a_model_may_not_use_is_told_to_others_without_names() -> None:
    rejection = Rejection(RejectCode.TOO_LARGE, M, needs_mib=5, free_mib=0)
    said = rejections(no_device="qwen may use only gpu7.").error_for(rejection)
    assert said.message == "qwen may use only gpu7."
    assert said.public == "The model may use only devices that are not there."


def test_a_request_that_waited_for_memory_is_told_how_much() -> None:
    said = error(RejectCode.EXPIRED, retry_after_s=9.0, needs_mib=6_000, free_mib=2_000, capacity_mib=8_000)
    assert "needs 6,000 MiB, and 2,000 of 8,000 MiB are free" in said.message
    assert said.public == "qwen waits for memory. Ask again."
    assert said.beside["loading"]["state"] == "waiting"
    assert said.beside["memory"] == {"needs_mib": 6_000, "free_mib": 2_000, "capacity_mib": 8_000}


def test_a_request_that_waited_for_leased_memory_is_told_of_the_leases_and_no_time() -> None:
    named = rejections(leases={LeaseId("l-1"): "train", LeaseId("l-2"): "ci"})
    numbers: Any = {"needs_mib": 6_000, "free_mib": 2_000, "capacity_mib": 8_000, "held_by": ("ci",), "room_s": inf}
    leases = (LeaseId("l-1"), LeaseId("l-2"))
    said = named.error_for(Rejection(RejectCode.EXPIRED, M, 5.0, leases=leases, **numbers))
    assert "leased (train, ci): it needs 6,000 MiB, and 2,000 of 8,000 MiB are free" in said.message
    assert "unload" not in said.message and (said.retry_after_s, said.beside["loading"]["eta_s"]) == (10.0, None)
    assert said.public == "qwen waits for memory that other programs hold. Ask again."


def test_names_of_many_leases_are_looked_up_once_and_few_are_told() -> None:
    leases, known = {LeaseId(f"l-{number}"): f"job {number}" for number in range(1_000)}, NoLeases()
    named = rejections(leases=leases, known=known)
    said = named.error_for(Rejection(RejectCode.EXPIRED, M, 5.0, leases=tuple(leases)))
    assert "leased (job 0, job 1, job 2, job 3, job 4 and 995 more)" in said.message
    named.error_for(Rejection(RejectCode.EXPIRED, M, 5.0))
    assert known.asked == 1


def test_a_load_that_holds_the_memory_counts_in_the_estimate() -> None:
    said = error(RejectCode.EXPIRED, retry_after_s=0.2, room_s=60.0)
    assert (said.retry_after_s, said.beside["loading"]["eta_s"]) == (60.2, 60.2)
    said = error(RejectCode.EXPIRED, retry_after_s=0.2, room_s=inf)
    assert (said.retry_after_s, said.beside["loading"]["eta_s"]) == (10.0, None), "it is not known"


@pytest.mark.parametrize(
    ("failed", "is_final"),
    [
        (LoadFailed("qwen could not be loaded: boom.", public="qwen is not well.", details="line 1\nline 2"), False),
        (LoadOutOfMemory("qwen ran out of memory.", details="x", beside={"memory": {"gpu0": {"given_mib": 5}}}), False),
        # Bad files are not to be tried again.
        (UnusableModel("qwen could not be loaded: model.safetensors is cut off."), True),
    ],
)
def test_a_failed_load_is_told_as_it_failed(failed: LoadFailed, is_final: bool) -> None:
    said = rejections(failed=failed).error_for(Rejection(RejectCode.LOAD_FAILED, M, retry_after_s=40.0))
    assert type(said) is type(failed) and said.final is is_final
    assert (said.message, said.public, said.details) == (failed.message, failed.public, failed.details)
    assert (said.status, said.beside, said.retry_after_s) == (failed.status, failed.beside, None if is_final else 40.0)


def test_retry_after_is_bounded() -> None:
    said = error(RejectCode.EXPIRED, retry_after_s=4_000.0)
    assert isinstance(said, ModelLoading) and said.retry_after_s == RETRY_AFTER_MAX_S
    assert said.beside["loading"]["eta_s"] == 4_000.0
    assert error(RejectCode.LOAD_FAILED, retry_after_s=0.001).retry_after_s == 1.0


def test_cut_says_whether_it_was_the_shutdown_or_an_unload() -> None:
    over = because("grace_over", model="qwen")
    assert isinstance(rejections(is_draining=True).error_for_cut(over), ShuttingDown)
    assert isinstance(rejections().error_for_cut(over), Unloaded)


@pytest.mark.parametrize("is_draining", [True, False])
def test_answer_cut_for_its_callers_budget_says_so(is_draining: bool) -> None:
    said = rejections(is_draining=is_draining).error_for_cut(because("budget"))
    assert isinstance(said, BudgetPassed) and said.status == 504


@pytest.mark.parametrize(
    ("slots", "eta_s", "state", "says"),
    [
        ((READY,), 0.0, "ready", "cannot give this answer"),
        ((READY,), 7.2, "ready", "busy"),
        ((LOADING,), 7.2, "loading", "goes on loading"),
        ((WAKING,), 7.2, "waking", "goes on waking up"),
        ((slot(move=MoveKind.PREPARE),), 7.2, "preparing", "read into the green room"),
        ((), 7.2, "waiting", "waits for room or for its turn"),
        ((slot(planned=MoveKind.LOAD),), 7.2, "waiting", "waits for room or for its turn"),
        ((slot(Tier.ASLEEP),), 7.2, "waiting", "waits for room or for its turn"),
        ((LEAVING,), 7.2, "leaving", "is leaving"),
        ((slot(Tier.READY, MoveKind.UNLOAD, leaving_to=Tier.COLD),), 7.2, "leaving", "is leaving"),
        ((slot(Tier.COLD, MoveKind.LOAD, leaving_to=Tier.COLD),), 7.2, "leaving", "is leaving"),
        # An older revision may leave beside a newer one.
        ((LEAVING, WAKING, LOADING), 7.2, "loading", "goes on loading"),
        ((LOADING, READY), 7.2, "ready", "busy"),
    ],
)
def test_a_wait_that_ended_tells_what_the_model_does(
    slots: tuple[Slot, ...], eta_s: float, state: str, says: str
) -> None:
    said = error(RejectCode.EXPIRED, *slots, retry_after_s=eta_s)
    assert says in said.message
    assert said.beside["loading"] == {"state": state, "eta_s": eta_s}


def test_a_model_that_would_fit_does_not_wait_for_memory() -> None:
    said = error(RejectCode.EXPIRED, retry_after_s=9.0, needs_mib=2_000, free_mib=6_000, capacity_mib=8_000)
    assert said.message == "qwen is not ready yet; it waits for room or for its turn. Ask again."


def test_a_request_that_gives_up_on_a_load_is_told_its_progress() -> None:
    halfway = rejections(slots=(LOADING,), progress=0.5)
    said = halfway.error_for(Rejection(RejectCode.EXPIRED, M, retry_after_s=4.0))
    assert said.beside["loading"] == {"state": "loading", "eta_s": 4.0, "progress": 0.5}
