"""Every rejection becomes an error that says what to do."""

import pytest

from greenroom.core.effects import RejectCode, Rejection, because
from greenroom.core.model import ModelId
from greenroom.errors import (
    BudgetPassed,
    GreenroomError,
    LoadFailed,
    ModelLoading,
    QueueFull,
    ShuttingDown,
    TooLarge,
    Unloaded,
)
from greenroom.runtime.rejections import RETRY_AFTER_MAX_S, Rejections

M = ModelId("qwen")


def error(code: RejectCode, **numbers: float) -> GreenroomError:
    return Rejections({}, lambda: False).error_for(Rejection(code, M, **numbers))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", list(RejectCode))
def test_every_code_names_what_it_is_about(code: RejectCode) -> None:
    said = error(code, retry_after_s=3.0)
    assert said.status >= 400 and said.message
    assert "qwen" in said.message or isinstance(said, QueueFull | ShuttingDown)


def test_full_queue_tells_its_numbers() -> None:
    said = error(RejectCode.QUEUE_FULL, retry_after_s=2.0, queue_depth=16, avg_wait_s=1.5)
    assert said.beside == {"queueDepth": 16, "avgWaitMs": 1500}


def test_too_large_tells_need_and_room() -> None:
    said = error(RejectCode.TOO_LARGE, needs_mib=41_000, free_mib=23_920)
    assert isinstance(said, TooLarge) and said.final
    assert "41,000" in said.message and "23,920" in said.message


def test_failed_load_carries_the_engines_last_lines() -> None:
    failures = {M: LoadFailed("qwen could not be loaded: boom.", details="line 1\nline 2")}
    said = Rejections(failures, lambda: False).error_for(Rejection(RejectCode.LOAD_FAILED, M, retry_after_s=40.0))
    assert (said.message, said.details, said.retry_after_s) == (failures[M].message, "line 1\nline 2", 40.0)


def test_nobody_is_sent_away_for_long() -> None:
    said = error(RejectCode.EXPIRED, retry_after_s=4_000.0)
    assert isinstance(said, ModelLoading) and said.retry_after_s == RETRY_AFTER_MAX_S
    assert said.beside["loading"]["eta_s"] == 4_000.0
    assert error(RejectCode.LOAD_FAILED, retry_after_s=0.001).retry_after_s == 1.0


def test_cut_says_whether_it_was_the_shutdown_or_an_unload() -> None:
    over = because("grace_over", model="qwen")
    assert isinstance(Rejections({}, lambda: True).error_for_cut(over), ShuttingDown)
    assert isinstance(Rejections({}, lambda: False).error_for_cut(over), Unloaded)


@pytest.mark.parametrize("is_draining", [True, False])
def test_answer_cut_for_its_callers_budget_says_so(is_draining: bool) -> None:
    said = Rejections({}, lambda: is_draining).error_for_cut(because("budget"))
    assert isinstance(said, BudgetPassed) and said.status == 504


def test_ready_model_that_takes_too_long_is_not_said_to_load() -> None:
    said = error(RejectCode.EXPIRED, retry_after_s=0.0)
    assert "is ready" in said.message
    assert said.beside["loading"] == {"state": "ready", "eta_s": 0.0}
