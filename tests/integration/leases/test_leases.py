"""Training beside serving, with a real gateway and simulated GPUs: what gets memory when another dies or stops."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from greenroom.app import App
from tests.harness import GatewayProcess, fake, gateway, url, write_config
from tests.integration.facts import is_ready
from tests.integration.raw import Answer, http
from tests.ports import free_port
from tests.waiting import until

pytestmark = pytest.mark.slow

PATH = "/api/v1/leases"
# Leases asked for here by hand are not renewed, however slow the machine is.
LONG = {"ttl_s": 3_600}
# Of a holder that is made to stand still. Longer than a busy machine may keep it from renewing before that.
PAUSED_TTL_S = 4


def chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}]}


async def calling(gate: GatewayProcess, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, _, said = await asyncio.to_thread(gate.call, method, path, body)
    return status, said


async def ask(app: App, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    answer = await http(app, method, path, body)
    return answer.status, answer.json()


TRAINER = """
import sys, time
import greenroom
with greenroom.lease(int(sys.argv[2]), name="train", url=sys.argv[1], ttl_s=float(sys.argv[3]), wait_s=60) as lease:
    print("holds", lease.token, flush=True)
    while not lease.is_over:
        time.sleep(0.01)
print("lost", flush=True)
"""


class Trainer:
    """A program that holds a lease until it is lost, and says so."""

    def __init__(self, address: str, mib: int, ttl_s: float) -> None:
        argv = [sys.executable, "-c", TRAINER, address, str(mib), str(ttl_s)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)

    async def says(self) -> list[str]:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), 60)).split()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@contextmanager
def trainer(address: str, mib: int, ttl_s: float = 30.0) -> Iterator[Trainer]:
    one = Trainer(address, mib, ttl_s)
    try:
        yield one
    finally:
        one.close()


async def test_a_lease_evicts_an_idle_model_and_waits_for_a_busy_one(tmp_path: Path) -> None:
    models = {"a": fake("a", "--token-s", "0.2", "--tokens", "8", memory_mib=6_000), "b": fake("b", memory_mib=4_000)}
    async with gateway(tmp_path, models) as app:
        for model in ("a", "b"):
            assert (await ask(app, "POST", f"/api/v1/models/{model}/load"))[0] == 200
        # The busy one is left alone while the idle one's place will do.
        answering = asyncio.ensure_future(ask(app, "POST", "/v1/chat/completions", chat("a")))
        await until(lambda: len(app.tickets.open) == 1, "a is busy")
        status, first = await ask(app, "POST", PATH, {**LONG, "mib": 4_000, "wait_s": 60})
        assert status == 201 and not is_ready(app, "b") and is_ready(app, "a") and not answering.done()
        status, second = await ask(app, "POST", PATH, {**LONG, "mib": 6_000, "wait_s": 60})
        assert status == 201 and second["token"] > first["token"]
        # It came after the answer, which was not cut short.
        assert (await answering)[0] == 200 and not is_ready(app, "a")


async def test_a_model_waits_for_a_lease_and_comes_at_once_when_its_holder_is_killed(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"a": fake("a", memory_mib=6_000)}) as app:
        with trainer(url(app), 8_000, ttl_s=3_600) as training:
            assert (await training.says())[0] == "holds"
            asking = asyncio.ensure_future(ask(app, "POST", "/v1/chat/completions", chat("a")))
            await until(lambda: bool(list(app.loop.scheduler.state.waitlist)), "the request waits")
            training.process.kill()
            assert (await asking)[0] == 200


async def test_memory_that_a_lost_lease_still_uses_is_not_given_to_another(tmp_path: Path) -> None:
    described = tmp_path / "gpus.json"
    described.write_text(json.dumps({"gpus": [{"uuid": "GPU-a", "name": "fake", "memory_mib": 10_000}]}))
    uses = tmp_path / "gpus.json.d"
    uses.mkdir()
    memory = {"probe": "file", "file": str(described), "look_every_s": 0.2, "gpu_margin_mib": 0}
    async with gateway(tmp_path, {}, gpus=[], memory=memory) as app:
        with trainer(url(app), 8_000, ttl_s=PAUSED_TTL_S) as paused:
            assert (await paused.says())[0] == "holds"
            (uses / str(paused.process.pid)).write_text(json.dumps({"GPU-a": 8_000}))
            ledger = app.loop.scheduler.state.ledger
            await until(lambda: any(holding.seen for holding in ledger.holdings.values()), "its use is seen")
            assert sum(ledger.foreign.values()) == 0, "a lease's own use is not foreign"
            waiting = asyncio.ensure_future(ask(app, "POST", PATH, {**LONG, "mib": 8_000, "wait_s": 60}))
            await until(lambda: bool(list(app.loop.scheduler.state.waitlist)), "another waits for it")
            paused.process.send_signal(signal.SIGSTOP)
            await until(lambda: not app.leasing.owners(), "lost, and still in use")
            status, _ = await ask(app, "POST", PATH, {**LONG, "mib": 8_000, "wait_s": 1})
            assert status == 503 and not waiting.done(), "the memory is free on paper only"
            paused.process.kill()
            assert (await waiting)[0] == 201


async def test_a_gateway_that_is_killed_knows_its_leases_when_it_is_back(tmp_path: Path) -> None:
    models = {"a": fake("a", memory_mib=6_000, preload=True, pinned=True)}
    config = write_config(tmp_path, models, server={"port": free_port()})
    gate = GatewayProcess(tmp_path, config)
    try:
        await calling(gate, "POST", "/api/v1/models/a/unload", {"force": True})
        with trainer(gate.url, 8_000) as training, trainer(gate.url, 1_000) as doomed:
            said = await training.says()
            assert (await doomed.says())[0] == "holds"
            gate.kill()
            doomed.process.kill()
            doomed.process.wait()
            gate = GatewayProcess(tmp_path, config)
            _, shown = await calling(gate, "GET", PATH)
            programs = [one for one in shown["leases"] if one["kind"] == "program"]
            assert [(one["name"], one["token"]) for one in programs] == [("train", int(said[1]))]
            # The pinned model, which is wanted from the start, has not taken the trainer's memory.
            _, status = await calling(gate, "GET", "/api/v1/status")
            assert [model["tier"] for model in status["models"]] == ["cold"]
            renewed, lease = await calling(gate, "POST", f"{PATH}/{programs[0]['id']}/renew", {"token": int(said[1])})
            assert renewed == 200 and training.process.poll() is None
            status_code, new = await calling(gate, "POST", PATH, {**LONG, "mib": 100})
            assert status_code == 201 and new["token"] > lease["token"]
    finally:
        gate.kill()
        assert gate.nothing_left()


async def test_a_disk_that_takes_no_more_costs_new_leases_and_nothing_else(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"a": fake("a", memory_mib=1_000)})
    gate = GatewayProcess(tmp_path, config)
    try:
        _, lease = await calling(gate, "POST", PATH, {**LONG, "mib": 2_000, "id": "x"})
        assert (await calling(gate, "POST", "/api/v1/models/a/load"))[0] == 200
        pid, size = gate.process.pid, (tmp_path / "state" / "leases.jsonl").stat().st_size
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + 5, most))
        status, denied = await calling(gate, "POST", PATH, {**LONG, "mib": 2_000, "id": "y"})
        assert (status, denied["error"]["code"]) == (503, "lease_denied")
        assert "cannot be written down" in denied["error"]["message"]
        renewed, _ = await calling(gate, "POST", f"{PATH}/x/renew", {"token": lease["token"]})
        answered, _ = await calling(gate, "POST", "/v1/chat/completions", chat("a"))
        assert (renewed, answered) == (200, 200)
        # An end that could not be written is written with the next grant.
        assert (await calling(gate, "DELETE", f"{PATH}/x"))[0] == 204
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
        assert (await calling(gate, "POST", PATH, {**LONG, "mib": 8_000, "id": "z"}))[0] == 201
        gate.kill()
        gate = GatewayProcess(tmp_path, config)
        _, shown = await calling(gate, "GET", PATH)
        assert [one["id"] for one in shown["leases"]] == ["z"]
    finally:
        gate.kill()
        assert gate.nothing_left()


async def test_a_renewal_that_came_while_the_gateway_stood_still_is_in_time(tmp_path: Path) -> None:
    async with gateway(tmp_path, {}, gpus=[{"memory_mib": 10_000}]) as app:
        status, lease = await ask(app, "POST", PATH, {"mib": 4_000, "id": "train", "ttl_s": 2})
        assert status == 201
        address = urllib.parse.urlsplit(url(app))
        body = json.dumps({"token": lease["token"]})
        head = f"POST {PATH}/train/renew HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((address.hostname, address.port)) as renewal:
            renewal.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
            # One long piece of work in the gateway, which is this process: its TTL passes, but only just.
            time.sleep(2.2)
            answer = await asyncio.to_thread(lambda: renewal.makefile("rb").readline())
        assert b" 200 " in answer, answer


async def test_one_tenant_has_half_of_all_leases(tmp_path: Path) -> None:
    keys = [
        {"name": "greedy", "key": "greedy-key", "leases": True, "tenant": "lab"},
        {"name": "beside", "key": "beside-key", "leases": True, "tenant": "lab"},
        {"name": "other", "key": "other-key", "leases": True},
    ]
    async with gateway(tmp_path, {}, server={"api_keys": keys}) as app:

        async def take(key: str, **more: Any) -> Answer:
            return await http(app, "POST", PATH, {"mib": 1, **more}, headers={"Authorization": f"Bearer {key}-key"})

        first = await take("greedy", id="first")
        taken = [answer for _ in range(26) for answer in await asyncio.gather(*(take("greedy") for _ in range(20)))]
        assert sum(answer.status == 201 for answer in (first, *taken)) == 500
        refused = [answer for answer in taken if answer.status != 201]
        assert {(answer.status, answer.error["code"]) for answer in refused} == {(429, "too_many_of_key")}
        assert (await take("beside")).status == 429 and (await take("other")).status == 201
        # Asking for the same again takes no more.
        assert (await take("greedy", id="first")).status == 201
        ended = await http(app, "DELETE", f"{PATH}/first", headers={"Authorization": "Bearer greedy-key"})
        assert ended.status == 204 and (await take("beside")).status == 201
