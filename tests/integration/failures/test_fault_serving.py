"""Engines that fail while they answer: lost, stopped, or saying what no engine should say; and clients that dawdle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, cast

import pytest

from greenroom.app import App
from greenroom.core.model import ModelId, MoveKind
from greenroom.errors import EngineLost
from greenroom.http.limits import MIB
from greenroom.http.upstream import EngineAddress, Pool
from greenroom.process import proc
from tests.harness import fake, gateway
from tests.http.wires import OddLoop
from tests.integration.facts import Journal, at_rest, is_ready, pids
from tests.integration.faults import ENDLESS, assert_ended_by, first_events, loaded, rest_of, stop
from tests.integration.raw import LIMIT_BYTES, Answer, Raw, asking, chat, http
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


# --- kill -9 --------------------------------------------------------------------------------------------------------


async def test_stream_whose_engine_is_lost_before_the_first_heartbeat_gets_them_during_the_reload(
    tmp_path: Path,
) -> None:
    server = {"heartbeat_after_s": 1.0, "heartbeat_every_s": 0.2}
    async with gateway(tmp_path, {"alpha": fake("alpha", "--load-s", "2.5")}, server=server) as app:
        pid = await loaded(app, "alpha")
        stop(pid)
        waiting = asyncio.create_task(chat(app, "alpha", stream=True, stream_options={"include_usage": True}))
        await until(lambda: app.loop.scheduler.state.grants, "the request is granted")
        os.kill(pid, signal.SIGKILL)
        answer = await waiting
    assert answer.data[-1] == "[DONE]"
    assert sum(event.startswith(": waiting") for event in answer.events) >= 3


async def test_many_requests_lost_together_are_all_answered_after_one_reload(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    model = fake("alpha", *journal.switches, "--token-s", "0.05", concurrency=4)
    async with gateway(tmp_path, {"alpha": model}) as app:
        pid = await loaded(app, "alpha")
        stop(pid)
        waiting = [asyncio.create_task(chat(app, "alpha")) for _ in range(12)]
        await until(lambda: len(app.loop.scheduler.state.grants) == 4, "as many are granted as it answers at once")
        os.kill(pid, signal.SIGKILL)
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        assert journal.count("start") == 2
        await at_rest(app)
        # None was answered twice.
        await until(lambda: journal.count("done", pid=pids(app, "alpha")[0]) == 12, "the engine has told of all")


@pytest.mark.parametrize("tokens", [1, 25])
async def test_engine_lost_in_the_middle_of_a_stream_ends_it_with_one_error_event(tmp_path: Path, tokens: int) -> None:
    journal = Journal(tmp_path)
    model = fake("alpha", *journal.switches, "--token-s", "0.01", "--tokens", str(ENDLESS))
    async with gateway(tmp_path, {"alpha": model}) as app:
        pid = await loaded(app, "alpha")
        async with await Raw.open(app) as raw:
            raw.ask(asking("alpha", stream=True))
            await first_events(raw, tokens)
            os.kill(pid, signal.SIGKILL)
            assert_ended_by(await rest_of(raw), "engine_lost", 502)
        await at_rest(app)
        # The next request brings it back.
        assert (await chat(app, "alpha", tokens=2)).text == "alpha 1"
        assert journal.count("start") == 2
        assert journal.count("request") == 3


async def test_engine_lost_in_the_middle_of_a_long_body_truncates_the_answer(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", "--half-body", "--tokens", "20000")}) as app:
        async with await Raw.open(app) as raw:
            raw.ask(asking("alpha"))
            status, headers = await raw.head()
            got = await raw.reader.readexactly(10)
            os.kill(pids(app, "alpha")[0], signal.SIGKILL)
            got += await raw.reader.read(LIMIT_BYTES)
            while more := await raw.reader.read(LIMIT_BYTES):
                got += more
        assert status == 200
        assert 0 < len(got) < int(headers["content-length"])
        await at_rest(app)


async def test_engine_lost_in_the_middle_of_a_short_body_is_an_error(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", "--half-body")}) as app:
        async with await Raw.open(app) as raw:
            raw.ask(asking("alpha"))
            # It is held until it is whole, so that nothing of it is seen outside.
            await until(lambda: any(live.in_flight for live in app.loop.scheduler.state.slots.values()), "it is served")
            await asyncio.sleep(1.0)
            os.kill(pids(app, "alpha")[0], signal.SIGKILL)
            answer = await raw.answer()
        assert (answer.status, answer.error["code"]) == (502, "engine_lost")
        await at_rest(app)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_kills_its_engine_twice_is_refused(tmp_path: Path, stream: bool) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"alpha": fake("alpha", *journal.switches, "--crash-at", "request")}) as app:
        answer = await chat(app, "alpha", stream=stream)
        assert answer.status == 502
        assert answer.error["code"] == "engine_lost"
        assert journal.count("start") == 2
        assert journal.count("request") == 2
        await at_rest(app)


async def test_an_engine_that_ends_again_and_again_is_told_as_the_cause_of_the_pause(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha")}) as app:
        for _ in range(2):
            await app.operations.move(MoveKind.LOAD, ModelId("alpha"))
            os.kill(pids(app, "alpha")[0], signal.SIGKILL)
            await until(lambda: not app.slots.live and not is_ready(app, "alpha"), "it is lost")
        refused = await chat(app, "alpha")
        assert refused.status == 503 and refused.error["code"] == "model_load_failed"
        assert refused.error["message"] == "alpha was lost: its engine ended (killed by SIGKILL)."


# --- it hangs -------------------------------------------------------------------------------------------------------


async def test_engine_stopped_in_the_middle_of_a_stream_is_given_up_and_can_be_unloaded(tmp_path: Path) -> None:
    model = fake("alpha", "--token-s", "0.01", "--tokens", str(ENDLESS), stop_timeout_s=0.5)
    async with gateway(tmp_path, {"alpha": model}, server={"answer_idle_max_s": 0.5}) as app:
        pid = await loaded(app, "alpha")
        async with await Raw.open(app) as raw:
            raw.ask(asking("alpha", stream=True))
            await first_events(raw, 3)
            stop(pid)
            assert_ended_by(await rest_of(raw), "engine_timeout", 504)
        await at_rest(app)
        assert app.slots.live
        assert all(live.pool.open_count == live.pool.idle_count for live in app.slots.live.values())
        await app.operations.move(MoveKind.UNLOAD, ModelId("alpha"))
        assert not proc.stat(pid)
        assert (await chat(app, "alpha", tokens=1)).text == "alpha"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_accepts_and_never_answers_is_a_timeout(tmp_path: Path, stream: bool) -> None:
    journal = Journal(tmp_path)
    model = fake("alpha", *journal.switches, "--hang", "serve")
    async with gateway(tmp_path, {"alpha": model}, server={"answer_idle_max_s": 0.5}) as app:
        answer = await chat(app, "alpha", stream=stream)
        assert answer.status == 504
        assert answer.error["code"] == "engine_timeout"
        # Its connection is closed, so that the engine can stop working on it.
        await until(lambda: journal.count("cancelled") == 1, "the engine hears of it")
        await at_rest(app)


async def test_answer_that_stalls_after_some_tokens_is_a_timeout(tmp_path: Path) -> None:
    model = fake("alpha", "--stall-after", "3")
    async with gateway(tmp_path, {"alpha": model}, server={"answer_idle_max_s": 0.5}) as app:
        answer = await chat(app, "alpha", stream=True)
        assert [len(answer.data), answer.status] == [4, 200]
        assert_ended_by(answer, "engine_timeout", 504)


# --- it says odd things ---------------------------------------------------------------------------------------------


async def odd(folder: Path, kind: str, *more: str, **server: Any) -> Answer:
    models = {"alpha": fake("alpha", "--sse-weird", kind, *more)}
    async with gateway(folder, models, server=server) as app:
        answer = await chat(app, "alpha", stream=True)
        await at_rest(app)
        return answer


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat"])
async def test_a_translated_stream_that_ends_in_an_error_is_recorded_as_failed(tmp_path: Path, path: str) -> None:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    if path == "/v1/responses":
        said = {"input": "hi"}
    async with gateway(tmp_path, {"alpha": fake("alpha", "--sse-weird", "error-event")}) as app:
        answer = await http(app, "POST", path, {"model": "alpha", "stream": True, **said})
        await at_rest(app)
        record = app.activity.get(answer.headers["x-request-id"])
    assert answer.status == 200 and answer.whole
    assert [b"no memory" in line for line in answer.body.split(b"\n") if line][-2:] == [False, True]
    assert record is not None and (record.status, record.error_code) == (502, "engine_error")
    assert (record.state, record.details) == ("done", "no memory")


async def test_the_error_of_a_lost_engine_continues_the_numbers_of_its_stream(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", "--crash-at", "token:3")}) as app:
        answer = await http(app, "POST", "/v1/responses", {"model": "alpha", "stream": True, "input": "hi"})
        await at_rest(app)
    assert answer.status == 200 and answer.whole
    events = [json.loads(event.partition("data: ")[2]) for event in answer.events]
    assert events[-1]["type"] == "error" and len(events) > 3
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_stream_without_done_is_passed_on_without_done(tmp_path: Path) -> None:
    answer = await odd(tmp_path, "no-done")
    assert answer.whole
    assert len(answer.data) == 5
    assert "[DONE]" not in answer.data and not any("error" in event for event in answer.data)


async def test_stream_that_breaks_within_an_event_is_cut(tmp_path: Path) -> None:
    # A client that asks for usage gets every byte as it comes, the half event too.
    models = {"alpha": fake("alpha", "--sse-weird", "broken-event")}
    async with gateway(tmp_path, models) as app:
        answer = await chat(app, "alpha", stream=True, stream_options={"include_usage": True})
        await at_rest(app)
    assert not answer.whole
    assert answer.body.endswith(b'{"del')
    assert b"error" not in answer.body


async def test_half_an_event_that_was_held_back_is_replaced_by_an_error_event(tmp_path: Path) -> None:
    # Usage that was not asked for is filtered out, so an event is passed on when it is complete.
    answer = await odd(tmp_path, "broken-event")
    assert_ended_by(answer, "engine_lost", 502)
    assert len(answer.data) == 5 and b'{"del"' not in answer.body.rpartition(b"data: ")[2]


async def test_line_of_ten_megabytes_passes(tmp_path: Path) -> None:
    answer = await odd(tmp_path, "huge-line", "--huge-line-bytes", str(10 * MIB))
    assert answer.whole and answer.data[-1] == "[DONE]"
    assert any(len(event["choices"][0]["delta"].get("content", "")) == 10 * MIB for event in answer.data[:-2])


async def test_answer_that_is_no_stream_is_passed_on_as_it_is(tmp_path: Path) -> None:
    answer = await odd(tmp_path, "non-sse-200")
    assert answer.headers["content-type"] == "application/json"
    assert answer.text.startswith("alpha")


async def test_error_of_the_engine_is_passed_on_as_it_is(tmp_path: Path) -> None:
    answer = await odd(tmp_path, "error-500")
    assert answer.status == 500
    assert answer.error["message"] == "the engine failed as told"


@pytest.mark.parametrize(("kind", "status"), [("non-sse-200", 502), ("error-500", 500)])
async def test_after_heartbeats_what_is_no_stream_is_an_error_event(tmp_path: Path, kind: str, status: int) -> None:
    answer = await odd(tmp_path, kind, "--load-s", "0.6", heartbeat_after_s=0.1, heartbeat_every_s=0.1)
    assert answer.status == 200 and answer.events[0].startswith(": waiting")
    assert_ended_by(answer, "engine_error", status)
    assert "alpha answered" in answer.data[-1]["error"]["message"]


# --- slow clients ---------------------------------------------------------------------------------------------------


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


async def dawdler(app: App, model: str) -> socket.socket:
    """A client with the smallest buffer there is, that asks for an endless answer and does not read it."""
    host, _, port = app.edge.addresses[0].rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    writer = (await asyncio.open_connection(sock=sock.dup()))[1]
    Raw(sock, asyncio.StreamReader(), writer).ask(asking(model, stream=True, tokens=ENDLESS))
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await writer.drain()
    return sock


def cpu_ticks(pid: int) -> int:
    """Hundredths of a second this process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def ticks_within(pid: int, seconds: float) -> int:
    before = cpu_ticks(pid)
    await asyncio.sleep(seconds)
    return cpu_ticks(pid) - before


async def test_clients_that_read_a_byte_a_second_cost_no_memory_and_slow_no_other_down(tmp_path: Path) -> None:
    models = {"alpha": fake("alpha", concurrency=32), "bravo": fake("bravo")}
    async with gateway(tmp_path, models, server={"write_timeout_s": 300}) as app:
        engine = await loaded(app, "alpha")
        await loaded(app, "bravo")
        before_mib = resident_mib()
        slow = [await dawdler(app, "alpha") for _ in range(8)]
        # Eight endless answers: an engine that is not held back computes without a pause.
        deadline = time.monotonic() + PATIENCE_S
        while await ticks_within(engine, 0.5) > 5:
            assert time.monotonic() < deadline, "the engine is never held back"
        for round in range(10):
            for sock in slow:
                assert len(await asyncio.get_running_loop().sock_recv(sock, 1)) == 1
            answer = await chat(app, ("alpha", "bravo")[round % 2])
            assert answer.status == 200
        deadline = time.monotonic() + PATIENCE_S
        # It may have been slow before for want of a processor, and be held back only now.
        while await ticks_within(engine, 1) >= 15:
            assert time.monotonic() < deadline, "the engine is not held back any more"
        # 8 × 256 KiB is what they may take here; the rest waits in the kernel and in the engine.
        assert resident_mib() - before_mib < 40
        for sock in slow:
            sock.close()


async def test_client_that_takes_nothing_for_too_long_is_cut_and_its_engine_freed(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    async with gateway(tmp_path, {"alpha": fake("alpha", *journal.switches)}, server={"write_timeout_s": 1}) as app:
        await loaded(app, "alpha")
        sock = await dawdler(app, "alpha")
        await until(lambda: app.edge.stats.write_timeouts == 1, "it is cut")
        await until(lambda: journal.count("cancelled") == 1, "the engine is told that its client left")
        await at_rest(app)
        sock.close()


async def test_how_an_engine_was_lost_is_told_until_the_model_is_unloaded(tmp_path: Path) -> None:
    async with gateway(tmp_path, {"alpha": fake("alpha", ttl_s=0)}) as app:
        os.kill(await loaded(app, "alpha"), signal.SIGKILL)
        await until(lambda: "alpha was lost" in str(app.mover.failures.get(ModelId("alpha"))), "the loss is told")
        await http(app, "POST", "/api/v1/models/alpha/unload")
        (shown,) = json.loads((await http(app, "GET", "/api/v1/status")).body)["models"]
        assert (shown["tier"], shown["last_error"]) == ("cold", None)


class Listener:
    """A sink that only wants to know whether it was told."""

    def __init__(self) -> None:
        self.upstream: Any = None
        self.losses: list[EngineLost] = []

    @property
    def wanted(self) -> bool:
        return not self.losses

    def lost(self, error: EngineLost, before_first_byte: bool) -> None:
        assert before_first_byte
        self.losses.append(error)

    def answer(self, status: int, headers: Any, body: bytes) -> None: ...
    def head(self, status: int, headers: Any) -> None: ...
    def body(self, data: bytes) -> None: ...
    def complete(self) -> None: ...
    def upgraded(self, headers: Any, rest: bytes) -> None: ...


async def told_once(sink: Listener) -> None:
    await until(lambda: sink.losses)
    # Every task that could tell it again has ended.
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert len(sink.losses) == 1


async def test_retry_that_has_not_begun_when_the_pool_closes_is_told_once() -> None:
    """The broken connection and the engine's end are heard in one turn of the loop: the retry never gets its first."""
    pool, sink = Pool(EngineAddress(path="/no/such/socket")), Listener()
    pool.retry(b"POST / HTTP/1.1\r\n\r\n", b"", sink)
    pool.close()
    await told_once(sink)


async def test_retry_that_is_connecting_when_the_pool_closes_is_told_once() -> None:
    loop, sink = OddLoop(), Listener()
    pool = Pool(EngineAddress(host="127.0.0.1", port=9), loop=cast(asyncio.AbstractEventLoop, loop))
    pool.retry(b"POST / HTTP/1.1\r\n\r\n", b"", sink)
    await loop.is_asked.wait()
    pool.close()
    await told_once(sink)
