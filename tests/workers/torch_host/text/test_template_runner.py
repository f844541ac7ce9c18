"""Templates that loop, grow or are killed, and the processes this happens in."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from greenroom.workers.torch_host.sandbox.pool import PROGRAM, JobKind, SandboxPool, Stopped, Unavailable
from greenroom.workers.torch_host.text.templates import (
    TEMPLATES,
    Complaint,
    RenderedTooLong,
    TemplateRunner,
    jinja_folders,
)
from tests.waiting import PATIENCE_S, until
from tests.workers.torch_host import worker_rig
from tests.workers.torch_host.samples.tokenizer_folders import LOOPING

pytestmark = pytest.mark.slow

CHARS_MAX = 10_000
# One instruction that takes minutes, written so that it is found when the template is read, and when it is run.
NUMBERS = ("{{ 10 ** 100000000 }}", "{{ messages[0].number ** 100000000 }}")
# A worker with a template that does not end.
WORKER = f"""
import asyncio
from greenroom.workers.torch_host.sandbox.pool import SandboxPool
from greenroom.workers.torch_host.text.templates import TEMPLATES, TemplateRunner

order = dict(template={LOOPING!r}, messages=[dict(role="user")], tools=None, names=dict())
asyncio.run(TemplateRunner(SandboxPool(TEMPLATES)).render(order, 1000, {PATIENCE_S}))
"""


def order(template: str = "{{ messages[0].content }}", content: str = "hi") -> dict[str, Any]:
    messages = [{"role": "user", "content": content, "number": 10}]
    return {"template": template, "messages": messages, "tools": None, "names": {}}


async def written(runner: TemplateRunner, said: dict[str, Any], deadline_s: float = PATIENCE_S) -> str:
    return await runner.render(said, CHARS_MAX, deadline_s)


def running(parent: int | None = None) -> list[int]:
    """The template processes of a worker, this one if none is named, that have not ended."""
    return [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_sandbox(pid, parent or os.getpid())
    ]


def _is_sandbox(pid: int, parent: int | None) -> bool:
    try:
        state, ppid = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and b"template_job.py" in command and parent in (None, int(ppid))


def busy_s(pid: int) -> float:
    """How long it has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_a_template_process_is_started_when_it_is_needed_and_kept(templates: SandboxPool) -> None:
    runner = TemplateRunner(templates)
    assert running() == []
    assert await written(runner, order()) == "hi"
    (pid,) = running()
    assert await written(runner, order(content="ho")) == "ho"
    assert await written(TemplateRunner(templates), order("{{ 1 + 1 }}")) == "2"
    assert running() == [pid]
    await templates.close()
    assert running() == []


async def test_a_template_that_takes_all_memory_is_stopped_and_the_next_is_written(templates: SandboxPool) -> None:
    runner = TemplateRunner(templates)
    for template in ('{{ "a" * 3000000000 }}', "{% set x = messages[0].content * 400000000 %}{{ x ~ x ~ x }}"):
        with pytest.raises(Stopped, match="memory"):
            await written(runner, order(template))
        await until(lambda: running() == [])
        assert await written(runner, order()) == "hi"


async def test_a_template_of_which_much_is_left_does_not_stay(templates: SandboxPool) -> None:
    # The text becomes part of the program that is kept ready.
    assert await written(TemplateRunner(templates), order("{% set x = 'a' * 70000000 %}{{ x | length }}")) == "70000000"
    await until(lambda: running() == [])
    assert await written(TemplateRunner(templates), order()) == "hi"


@pytest.mark.parametrize("template", [LOOPING, *NUMBERS])
async def test_a_template_that_does_not_end_is_stopped_beside_others(templates: SandboxPool, template: str) -> None:
    stuck = asyncio.create_task(written(TemplateRunner(templates), order(template), deadline_s=1.5))
    others = 0
    while not stuck.done():
        assert await written(TemplateRunner(templates), order()) == "hi"
        others += 1
    with pytest.raises(Stopped, match=r"within 1\.5 s"):
        await stuck
    assert others > 1
    await until(lambda: len(running()) == 1)


async def test_one_model_never_keeps_all_template_processes_busy(templates: SandboxPool) -> None:
    runner = TemplateRunner(templates)
    stuck = [asyncio.create_task(written(runner, order(LOOPING))) for _ in range(TEMPLATES.processes_max + 2)]
    await until(lambda: len(running()) == TEMPLATES.processes_a_model)
    assert await written(TemplateRunner(templates), order()) == "hi"
    assert len(running()) == TEMPLATES.processes_a_model + 1
    assert not any(task.done() for task in stuck)
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
    await until(lambda: len(running()) == 1)


async def test_there_are_never_more_template_processes_than_allowed(templates: SandboxPool) -> None:
    runners = [TemplateRunner(templates) for _ in range(TEMPLATES.processes_max * 2)]
    asked = [written(runner, order(content=str(place))) for place, runner in enumerate(runners * 3)]
    assert await asyncio.gather(*asked) == [str(place) for place in range(len(asked))]
    assert len(running()) <= TEMPLATES.processes_max


async def test_a_request_that_waits_too_long_for_a_template_process_is_refused() -> None:
    templates = SandboxPool(replace(TEMPLATES, processes_max=1, wait_s=0.1))
    stuck = asyncio.create_task(written(TemplateRunner(templates), order(LOOPING)))
    await until(running)
    with pytest.raises(Unavailable, match="Try again"):
        await written(TemplateRunner(templates), order())
    stuck.cancel()
    await asyncio.wait([stuck])
    assert await written(TemplateRunner(templates), order()) == "hi"
    await templates.close()


async def test_a_template_process_ends_when_its_call_is_cancelled(templates: SandboxPool) -> None:
    task = asyncio.create_task(written(TemplateRunner(templates), order(NUMBERS[0])))
    await until(lambda: running() and busy_s(running()[0]) > 0.3)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await until(lambda: running() == [])


async def test_a_caller_that_leaves_at_any_moment_leaves_nothing_behind(templates: SandboxPool) -> None:
    for pause_s in (0, 0, 0.001, 0.01, 0.05, 0.1, 0.2):
        task = asyncio.create_task(written(TemplateRunner(templates), order(LOOPING)))
        await asyncio.sleep(pause_s)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: running() == [])
    # A process that is gone does not count as busy.
    assert await asyncio.gather(*(written(TemplateRunner(templates), order()) for _ in range(8))) == ["hi"] * 8


async def test_a_template_process_that_is_killed_fails_its_order_only(templates: SandboxPool) -> None:
    runner = TemplateRunner(templates)
    task = asyncio.create_task(written(runner, order(LOOPING)))
    await until(lambda: running() and busy_s(running()[0]) > 0.3)
    os.kill(running()[0], signal.SIGKILL)
    with pytest.raises(Stopped, match="signal 9"):
        await task
    assert await written(runner, order()) == "hi"
    # One that is killed while it is idle is not missed.
    os.kill(running()[0], signal.SIGKILL)
    await until(lambda: running() == [])
    assert await written(runner, order()) == "hi"


async def test_an_answer_that_is_too_long_is_not_brought(templates: SandboxPool) -> None:
    runner = TemplateRunner(templates)
    assert await written(runner, order("{{ 'é' * 10000 }}")) == "é" * CHARS_MAX
    with pytest.raises(RenderedTooLong) as refused:
        await written(runner, order("{{ 'é' * 10001 }}"))
    assert refused.value.chars == CHARS_MAX + 1


async def test_large_orders_and_answers_come_through(templates: SandboxPool) -> None:
    content = "Grüße 🙂 " * 500_000
    assert await TemplateRunner(templates).render(order(content=content), len(content), PATIENCE_S) == content


async def test_text_that_is_no_unicode_is_a_complaint_and_nothing_worse(templates: SandboxPool) -> None:
    runner = TemplateRunner(templates)
    assert await written(runner, order("{{ messages[0].content | length }}", content="\ud800")) == "1"
    with pytest.raises(Complaint, match="surrogates"):
        await written(runner, order(content="\ud800"))
    assert await written(runner, order()) == "hi"


async def test_a_template_process_is_bare_and_bounded(templates: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    read, write = os.pipe()
    os.set_inheritable(read, True)
    try:
        await written(TemplateRunner(templates), order())
        (pid,) = running()
        process = Path(f"/proc/{pid}")
        assert {entry.name for entry in (process / "fd").iterdir()} == {"0", "1", "2"}
    finally:
        os.close(read)
        os.close(write)
    assert b"secret" not in (process / "environ").read_bytes()
    assert os.readlink(process / "cwd") == "/"
    limits = {line[:25].strip(): line[25:].split()[:2] for line in (process / "limits").read_text().splitlines()}
    assert limits["Max core file size"] == ["0", "0"]
    soft, hard = map(int, limits["Max address space"])
    assert soft == hard < 2 * 2**30
    assert b"torch" not in (process / "maps").read_bytes().replace(b".venv-torch", b"")


async def test_a_template_process_ends_with_its_worker_however_that_ends() -> None:
    environment = {**os.environ, "PYTHONPATH": str(worker_rig.PROGRAM.parents[2])}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], env=environment)
    try:
        await until(lambda: running(worker.pid) and busy_s(running(worker.pid)[0]) > 0.3)
        (pid,) = running(worker.pid)
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: not _is_sandbox(pid, None))


async def test_a_template_process_whose_worker_is_gone_before_it_began_ends_at_once() -> None:
    # Its parent is not the worker that is named.
    setup = {"worker": 1, "module": str(TEMPLATES.module), "folders": jinja_folders()}
    command = [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(setup)]
    ended = subprocess.run(command, stdin=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1


# --- programs that misbehave -----------------------------------------------------------------------------------


Odd = Callable[..., TemplateRunner]


@pytest.fixture
async def odd(tmp_path: Path) -> AsyncIterator[Odd]:
    """Makes a runner whose processes run this program instead."""

    def become(program: str, **bounds: Any) -> TemplateRunner:
        file = tmp_path / "odd.py"
        file.write_text(f"import os, time\n{program}")
        kind: JobKind = replace(TEMPLATES, program=file, **bounds)
        return TemplateRunner(SandboxPool(kind))

    yield become
    await until(lambda: running() == [])


async def test_a_template_process_that_does_not_start_says_how_it_ended(odd: Odd) -> None:
    with pytest.raises(Unavailable, match="code 3"):
        await written(odd("os._exit(3)"), order())


async def test_a_template_process_that_is_never_ready_is_given_up(odd: Odd) -> None:
    with pytest.raises(Unavailable, match=r"not ready after 0\.2 s"):
        await written(odd("time.sleep(600)", start_s=0.2), order())


async def test_a_template_process_that_says_more_than_was_asked_for_is_ended(odd: Odd) -> None:
    with pytest.raises(Stopped, match="without an end"):
        await written(odd("os.write(0, b'rtext' + b'\\xff' * 8)\ntime.sleep(600)"), order())


async def test_a_python_that_cannot_be_started_is_told(templates: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="/nowhere/python"):
        await written(TemplateRunner(templates), order())


@pytest.fixture
def fresh_look() -> Iterator[None]:
    """Where Jinja lies is looked up once; here it is looked up again, before and after."""
    jinja_folders.cache_clear()
    yield
    jinja_folders.cache_clear()


@pytest.mark.parametrize("version", ["3.1.5", "2.11"])
async def test_a_jinja_whose_sandbox_has_holes_is_not_used(
    templates: SandboxPool, monkeypatch: pytest.MonkeyPatch, fresh_look: None, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    with pytest.raises(Unavailable, match=r"pip install 'jinja2>=3\.1\.6'"):
        await written(TemplateRunner(templates), order())


async def test_a_python_without_jinja_says_what_to_type(
    templates: SandboxPool, monkeypatch: pytest.MonkeyPatch, fresh_look: None
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="pip install"):
        await written(TemplateRunner(templates), order())


async def test_newer_versions_of_jinja_are_used(
    templates: SandboxPool, monkeypatch: pytest.MonkeyPatch, fresh_look: None
) -> None:
    for version in ("3.1.6", "3.2", "3.10.0rc1", "4.0.dev0"):
        jinja_folders.cache_clear()
        monkeypatch.setattr(importlib.metadata, "version", lambda package, own=version: own)
        assert await written(TemplateRunner(templates), order()) == "hi"


async def test_a_worker_without_descriptors_left_says_so(
    templates: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as starved, pytest.raises(Unavailable, match="Too many open files"):
        starved.setattr(socket, "socketpair", none_left)
        await written(TemplateRunner(templates), order())
