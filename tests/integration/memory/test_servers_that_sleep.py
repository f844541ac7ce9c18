"""vLLM and SGLang by stand-ins: swaps by sleep, what goes wrong, and engines that size themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from greenroom.core.model import DeviceId, ModelId, MoveKind
from greenroom.runtime.timeouts import TIMEOUTS
from tests.harness import FAKE_ENGINE, fake, gateway, served
from tests.integration.facts import Journal, at_rest, is_loading, pid_of, view
from tests.integration.faults import is_alive
from tests.integration.raw import chat, http
from tests.standins import fake_gpu
from tests.waiting import until

KINDS = ("vllm", "sglang")


@contextlib.asynccontextmanager
async def serving(folder: Path, kind: str, faults: str = "", **keys: Any) -> AsyncIterator[tuple[App, Journal]]:
    """Two models and room for one."""
    journal = Journal(folder)
    model = served(kind, folder / "server", *journal.switches, faults=faults, memory_mib=3_000, **keys)
    models = dict.fromkeys(("alpha", "bravo"), model)
    async with gateway(folder, models, budget_mib=5_000, scheduler={"backoff_s": 0.01}) as app:
        yield app, journal


@pytest.mark.parametrize("kind", KINDS)
async def test_models_change_places_without_a_restart(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path, kind) as (app, journal):
        for name in ("alpha", "bravo", "alpha", "bravo"):
            assert (await chat(app, name)).text.startswith(name)
        assert journal.count("start") == 2, "each was started once"
        assert (journal.count("sleep"), journal.count("wake")) == (3, 2)
        asleep, ready = await view(app, "alpha"), await view(app, "bravo")
        assert (asleep["tier"], ready["tier"], asleep["no_sleep"]) == ("asleep", "ready", None)
        assert asleep["memory"]["host"] > 0 and asleep["pid"] not in (None, ready["pid"])
        await at_rest(app)


async def test_vllm_that_would_die_of_its_wake_is_stopped_instead(tmp_path: Path) -> None:
    async with serving(tmp_path, "vllm", args=["--kv-offloading-size", "4"]) as (app, journal):
        for name in ("alpha", "bravo", "alpha"):
            assert (await chat(app, name)).text.startswith(name)
        assert (journal.count("start"), journal.count("sleep")) == (3, 0)
        assert "--kv-offloading-size" in (await view(app, "alpha"))["no_sleep"]


# SGLang has no endpoint that tells whether it sleeps.
@pytest.mark.parametrize(
    ("kind", "fault"),
    [("vllm", "sleep-fails"), ("vllm", "sleep-lies"), ("vllm", "is_sleeping-garbage"), ("sglang", "sleep-fails")],
)
async def test_one_that_cannot_sleep_is_unloaded(tmp_path: Path, kind: str, fault: str) -> None:
    async with serving(tmp_path, kind, fault) as (app, journal):
        for name in ("alpha", "bravo", "alpha"):
            assert (await chat(app, name)).text.startswith(name)
        assert journal.count("start") == 3
        bravo = await view(app, "bravo")
        assert (bravo["tier"], bravo["memory"], bravo["pid"]) == ("cold", {}, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wake-fails", "it answered 500 to /"),
        # Long enough for a busy machine to load it in.
        pytest.param("wake-hangs", "it took more than 8 s", marks=pytest.mark.slow),
        ("wake-garbage", "it woke with other weights than it had"),
    ],
)
async def test_one_that_does_not_wake_is_ended_and_restarted(tmp_path: Path, kind: str, fault: str, said: str) -> None:
    async with serving(tmp_path, kind, fault, load_timeout_s=8 if fault == "wake-hangs" else 60) as (app, journal):
        await chat(app, "alpha")
        await app.operations.move(MoveKind.SLEEP, ModelId("alpha"))
        pid = await pid_of(app, "alpha")
        answer = await chat(app, "alpha")
        assert (answer.status, answer.error["code"]) == (503, "model_load_failed")
        assert "alpha could not be woken: " in answer.error["message"] and said in answer.error["message"]
        await until(lambda: not app.loop.scheduler.state.slots_of(ModelId("alpha")), "nothing is left of it")
        assert not is_alive(pid)
        alpha = await view(app, "alpha")
        assert (alpha["tier"], alpha["memory"]) == ("cold", {})
        await app.operations.move(MoveKind.LOAD, ModelId("alpha"))
        assert (await chat(app, "alpha")).text.startswith("alpha")
        assert journal.count("start") == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_one_that_ends_in_its_sleep_is_cold(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path, kind) as (app, journal):
        await chat(app, "alpha")
        await app.operations.move(MoveKind.SLEEP, ModelId("alpha"))
        (live,) = app.slots.live.values()
        await live.child.stop(2)
        await until(lambda: not app.slots.live, "its end was seen")
        assert (await view(app, "alpha"))["tier"] == "cold"
        assert (await chat(app, "alpha")).text.startswith("alpha")
        assert journal.count("start") == 2


async def test_a_shutdown_ends_sleepers(tmp_path: Path) -> None:
    async with serving(tmp_path, "vllm") as (app, _):
        await chat(app, "alpha")
        await asyncio.gather(chat(app, "bravo"), chat(app, "alpha"))


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_server_takes_its_other_processes_with_it(tmp_path: Path, kind: str) -> None:
    """The process that computes outlives the one that was killed, and holds its memory until it is ended."""
    async with serving(tmp_path, kind) as (app, journal):
        await chat(app, "alpha")
        (core,) = [line["child"] for line in journal.lines("forked")]
        assert is_alive(core)
        os.kill(await pid_of(app, "alpha"), signal.SIGKILL)
        await until(lambda: not is_alive(core), "the process that computes is gone, too")
        assert (await chat(app, "alpha")).text.startswith("alpha")


async def test_vllm_takes_what_it_was_given_and_no_more(tmp_path: Path) -> None:
    """The stand-in takes the share of the GPU that its switch says; the fake GPU refuses what does not fit."""
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 20_000))
    journal = Journal(tmp_path)
    model = served("vllm", tmp_path / "server", *journal.switches, "--gpu-file", str(file), memory_mib=12_000)
    memory = {"probe": "file", "file": str(file), "look_every_s": 0.1}
    async with gateway(tmp_path, {"alpha": model, "bravo": model}, gpus=[], memory=memory) as app:
        for name in ("alpha", "bravo") * 3:
            assert (await chat(app, name)).text.startswith(name)
        assert (journal.count("start"), journal.count("sleep"), journal.count("wake")) == (2, 5, 4)
        held = (await view(app, "bravo"))["memory"]["GPU-a"]
        assert held == 12_000, "the claim is the truth"
        assert app.loop.scheduler.state.ledger.foreign.get(DeviceId("GPU-a"), 0) == 0


@pytest.mark.parametrize(("kind", "switch"), [("vllm", "--tensor-parallel-size"), ("sglang", "--tp-size")])
async def test_one_that_no_gpu_holds_is_spread_in_equal_shares(tmp_path: Path, kind: str, switch: str) -> None:
    journal = Journal(tmp_path)
    model = served(kind, tmp_path / "server", *journal.switches, memory_mib=9_000)
    small = served(kind, tmp_path / "server", *journal.switches, memory_mib=2_000)
    gpus = [{"memory_mib": mib, "margin_mib": 0} for mib in (8_000, 6_000, 3_000)]
    async with gateway(tmp_path, {"alpha": model, "bravo": small}, gpus=gpus) as app:
        for name in ("bravo", "alpha", "bravo"):
            assert (await chat(app, name)).text.startswith(name)
        assert (await view(app, "alpha"))["memory"] == {"gpu0": 4_500, "gpu1": 4_500}
        argv = {line["name"]: line["argv"] for line in journal.lines("start")}
        assert [argv[name][argv[name].index(switch) + 1] for name in ("alpha", "bravo")] == ["2", "1"]


async def test_transformers_model_that_no_gpu_holds_goes_to_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    folder = tmp_path / "server"
    made = served("vllm", folder, *journal.switches, memory_mib=9_000)
    model = {key: value for key, value in made.items() if key not in ("engine", "program")}
    gpus = [{"memory_mib": 6_000, "margin_mib": 0}] * 2
    models = {"alpha": model, "small": {**model, "memory_mib": 5_000}}
    async with gateway(tmp_path, models, gpus=gpus) as app:
        refused = await chat(app, "alpha")
        assert (refused.status, refused.error["code"]) == (503, "model_too_large")
        said = "cannot be spread over several GPUs, which have 6,000, 6,000 MiB; vllm can, and is taken where"
        assert "alpha needs 9,000 MiB" in refused.error["message"] and said in refused.error["message"]
        assert (await view(app, "alpha"))["engine"] == "transformers"
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    async with gateway(tmp_path, models, gpus=gpus) as app:
        assert (await chat(app, "alpha")).text.startswith("alpha")
        alpha = await view(app, "alpha")
        assert (alpha["engine"], alpha["memory"]) == ("vllm", {"gpu0": 4_500, "gpu1": 4_500})
        assert (await view(app, "small"))["engine"] == "transformers", "one GPU holds it"


async def test_one_that_keeps_more_than_planned_is_not_waited_for_and_what_it_keeps_counts(tmp_path: Path) -> None:
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 20_000))
    model = served("vllm", tmp_path / "server", "--gpu-file", str(file), faults="sleep-keeps-half", memory_mib=12_000)
    memory = {"probe": "file", "file": str(file), "look_every_s": 0.1}
    patient = replace(TIMEOUTS, memory=replace(TIMEOUTS.memory, back_s=60.0))
    async with gateway(tmp_path, {"alpha": model}, gpus=[], memory=memory, timeouts=patient) as app:
        await chat(app, "alpha")
        begun = app.clock()
        await app.operations.move(MoveKind.SLEEP, ModelId("alpha"))
        assert app.clock() - begun < 20
        alpha = await view(app, "alpha")
        assert alpha["tier"] == "asleep" and 5_000 < alpha["memory"]["GPU-a"] < 6_000


async def test_on_a_machine_without_a_gpu_it_is_stopped_instead(tmp_path: Path) -> None:
    model = served("vllm", tmp_path / "server", *Journal(tmp_path).switches, memory_mib=3_000)
    models = {"alpha": model, "bravo": model}
    async with gateway(tmp_path, models, gpus=[], host={"memory_mib": 5_000, "margin_mib": 0}) as app:
        for name in ("alpha", "bravo", "alpha"):
            assert (await chat(app, name)).text.startswith(name)
        journal = Journal(tmp_path)
        assert (journal.count("start"), journal.count("sleep")) == (3, 0)
        (argv,) = {tuple(line["argv"]) for line in journal.lines("start", name="bravo")}
        assert "--enable-sleep-mode" not in argv
        assert "stopped instead" in (await view(app, "alpha"))["no_sleep"]
        for kind, says in (("sleep", "cannot put it to sleep here"), ("prepare", "cannot prepare it here")):
            refused = await http(app, "POST", f"/api/v1/models/alpha/{kind}")
            assert refused.status == 422 and says in refused.error["message"], refused.error


NAMES = ("alpha", "bravo")
LOADS_S = ("--load-s", "0.5")


def vllm(folder: Path) -> Path:
    """A program called `vllm`: the fake engine behind `vllm serve`."""
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -I -S {FAKE_ENGINE} "$@"\n')
    path.chmod(0o700)
    return path


def said(folder: Path, journal: Journal) -> dict[str, Any]:
    """Models of an unknown program, with the key."""
    return {name: fake(name, *LOADS_S, *journal.switches, sizes_itself=True) for name in NAMES}


def recognised(folder: Path, journal: Journal) -> dict[str, Any]:
    """Models of `vllm serve`, without the key."""
    models = {name: fake(name, *LOADS_S, *journal.switches) for name in NAMES}
    program = str(vllm(folder))
    return {
        name: {**model, "cmd": [program, "serve", *model["cmd"][model["cmd"].index("--port") :]]}
        for name, model in models.items()
    }


@pytest.mark.parametrize("models_of", [said, recognised])
async def test_two_that_start_at_once_on_one_gpu_load_one_after_the_other(tmp_path: Path, models_of: Any) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, models_of(tmp_path, journal)) as app:
        answers = await asyncio.gather(*(chat(app, name) for name in NAMES))
    assert [answer.status for answer in answers] == [200, 200]
    lines = [(line["event"], line["name"]) for line in journal.lines("start", "ready")]
    assert [event for event, _ in lines] == ["start", "ready", "start", "ready"]
    assert {name for _, name in lines} == set(NAMES)


async def test_each_has_a_gpu_of_its_own_so_both_load_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    models = said(tmp_path, journal)
    for number, model in enumerate(models.values()):
        model["devices"] = [f"gpu{number}"]
    await both_load_at_once(tmp_path, models, gpus=[{"memory_mib": 1_000}] * 2)


async def test_operator_says_that_vllm_does_not_size_itself(tmp_path: Path) -> None:
    models = recognised(tmp_path, Journal(tmp_path))
    await both_load_at_once(tmp_path, {name: {**model, "sizes_itself": False} for name, model in models.items()})


async def both_load_at_once(folder: Path, models: dict[str, Any], **sections: Any) -> None:
    async with gateway(folder, models, **sections) as app:
        asked = [asyncio.create_task(chat(app, name)) for name in NAMES]
        await until(lambda: all(is_loading(app, name) for name in NAMES), "both load")
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 200]
