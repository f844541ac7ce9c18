"""Which errors end a request and which end the process."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from greenroom.workers.torch_host.control import slots as slots_module
from greenroom.workers.torch_host.control.preparing import prepare
from greenroom.workers.torch_host.control.resources import WorkerResources
from greenroom.workers.torch_host.control.slots import SlotTable
from greenroom.workers.torch_host.failures import (
    MESSAGE_MAX_CHARS,
    BadModel,
    DriverError,
    Failure,
    OutOfMemory,
    is_fatal,
    translated,
)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        DriverError("cuMemUnmap", 700, "an illegal memory access was encountered"),
        caused(Failure("the step failed"), RuntimeError("CUDA error: unspecified launch failure")),
    ],
)
def test_a_lost_device_ends_the_process(error: Exception) -> None:
    assert is_fatal(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        DriverError("cuMemHostRegister", 712, "part or all of the requested memory range is already mapped"),
        DriverError("cuMemAddressReserve", 1, "invalid argument"),
        OutOfMemory("cuMemCreate found no memory."),
        BadModel("the file says: CUDA error"),
        ValueError("CUDA error"),
    ],
)
def test_other_errors_do_not(error: Exception) -> None:
    assert not is_fatal(error)


def test_foreign_errors_get_one_of_our_kinds_and_one_short_line() -> None:
    assert translated(MemoryError("Cannot allocate memory")).kind == "out_of_memory"
    assert translated(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")).kind == "out_of_memory"
    assert translated(KeyError("x")).kind == "failed"
    known = BadModel("broken")
    assert translated(known) is known
    long = str(translated(RuntimeError("line one\n" + "word " * 1000)))
    assert len(long) == MESSAGE_MAX_CHARS
    assert "\n" not in long


def test_a_worker_whose_device_is_lost_exits_with_seventy(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    ended = threading.Event()

    def exit_with(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", exit_with)
    loop = asyncio.new_event_loop()
    slots = SlotTable(WorkerResources(loop, on_fatal=lambda error, say: say(), prepare=prepare), saying_s=60.0)
    said: list[str] = []

    def say() -> None:
        # Longer than it may take to be heard.
        time.sleep(2 * slots_module.LAST_WORDS_S)
        said.append("first" if not codes else "too late")

    slots.lost(RuntimeError("CUDA error"), say)
    # A request that notices it later has not caused it.
    slots.lost(RuntimeError("CUDA error"), lambda: said.append("another"))
    assert ended.wait(60)
    assert (codes, said) == ([70], ["first"])
    loop.close()
