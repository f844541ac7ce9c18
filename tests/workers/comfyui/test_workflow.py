"""A workflow that is filled in, and ComfyUI as the worker asks and hears it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.workers.comfyui import client
from greenroom.workers.comfyui.api import WorkflowRun
from greenroom.workers.comfyui.client import Comfy, ComfyGone
from greenroom.workers.comfyui.main import is_ours, listeners
from greenroom.workers.comfyui.workflow import PICTURES_MAX, SEED_MAX, WorkflowPlan
from greenroom.workers.serving.errors import ApiError
from tests.standins.fake_comfyui import frame

WORKFLOW: dict[str, Any] = {
    "1": {"class_type": "KSampler", "inputs": {"seed": 1, "denoise": 1.0, "latent_image": ["2", 0]}},
    "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 8, "height": 8}},
    "a": {"class_type": "CLIPTextEncode", "inputs": {"text": "before", "text.2": "before"}},
}


def plan(**inputs: Any) -> WorkflowPlan:
    named = {"prompt": ["a.text"], **{name: [place] for name, place in inputs.items()}}
    return WorkflowPlan.of(WORKFLOW, named)


def test_operators_own_inputs_take_plain_values() -> None:
    own = plan(denoise="1.denoise")
    [filled] = own.runs({"prompt": "x", "denoise": 0.5, "user": "me", "quality": "high"})
    assert (filled["1"]["inputs"]["denoise"], filled["a"]["inputs"]["text"]) == (0.5, "x")
    for wrong in ([1, 0], {"a": 1}):
        with pytest.raises(ApiError) as told:
            own.runs({"prompt": "x", "denoise": wrong})
        # A list would connect the input to another node.
        assert told.value.param == "denoise"


def test_workflow_itself_is_never_changed() -> None:
    own = plan(seed="1.seed")
    first, second = own.runs({"prompt": "x", "n": 2, "seed": 5})
    assert (first["1"]["inputs"]["seed"], second["1"]["inputs"]["seed"]) == (5, 6)
    assert WORKFLOW["a"]["inputs"]["text"] == "before" and WORKFLOW["1"]["inputs"]["seed"] == 1


def test_one_value_may_go_to_several_places_and_names_may_have_dots() -> None:
    [filled] = WorkflowPlan.of(WORKFLOW, {"prompt": ["a.text", "a.text.2"]}).runs({"prompt": "x"})
    assert filled["a"]["inputs"] == {"text": "x", "text.2": "x"}


def test_seed_stays_in_its_range() -> None:
    own = plan(seed="1.seed")
    seeds = [run["1"]["inputs"]["seed"] for run in own.runs({"prompt": "x", "n": 3, "seed": SEED_MAX})]
    assert all(0 <= seed <= SEED_MAX for seed in seeds) and len(set(seeds)) == 3


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers()))
NAMES = ["prompt", "n", "size", "seed", "width", "height", "steps", "guidance_scale", "num_inference_steps"]


@given(st.dictionaries(st.sampled_from([*NAMES, "denoise", "other"]), VALUES))
def test_any_body_is_filled_in_or_refused(body: dict[str, Any]) -> None:
    own = plan(seed="1.seed", width="2.width", height="2.height", denoise="1.denoise")
    try:
        runs = own.runs(body)
    except ApiError as refused:
        assert 400 <= refused.status < 500
        return
    assert 1 <= len(runs) <= PICTURES_MAX
    assert all(run["2"]["inputs"]["width"] <= 4096 for run in runs)


# --- progress -------------------------------------------------------------------------------------------------------


def progress(value: Any, most: Any = 10, node: str = "1", prompt_id: str = "p") -> dict[str, Any]:
    return {"value": value, "max": most, "node": node, "prompt_id": prompt_id}


def test_progress_is_that_of_the_samplers_of_all_runs() -> None:
    samplers = frozenset(("1", "2"))
    generation = WorkflowRun(2, len(samplers))
    generation.prompt_id = "p"
    seen = []
    for event in (progress(5), progress(10), progress(5, node="2"), progress(10, node="2")):
        generation.hear("progress", event, samplers)
        seen.append(generation.progress)
    assert seen == [0.125, 0.25, 0.375, 0.5]
    generation.next_run()
    assert generation.progress == 0.5


@pytest.mark.parametrize(
    "event",
    [
        progress(5, node="9"),
        progress(5, prompt_id="other"),
        progress("5"),
        progress(11),
        progress(-1),
        progress(5, 0),
        progress(None, None),
        {},
    ],
)
def test_events_of_others_and_nonsense_are_no_progress(event: dict[str, Any]) -> None:
    generation = WorkflowRun(1, 1)
    generation.prompt_id = "p"
    generation.hear("progress", event, frozenset("1"))
    assert generation.progress == 0


# --- the port -------------------------------------------------------------------------------------------------------


def test_port_of_another_user_is_not_ours() -> None:
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    line = "   0: 0100007F:1FFC 00000000:0000 0A 00000000:00000000 00:00000000 00000000  {uid}        0 1 1 0\n"
    assert is_ours(0x1FFC, head + line.format(uid=os.getuid()))
    assert not is_ours(0x1FFC, head + line.format(uid=os.getuid() + 1))
    # Another port of that user is none of our business.
    assert is_ours(0x1FFD, head + line.format(uid=os.getuid() + 1))


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")])
def test_all_that_listen_on_a_port_are_seen(family: socket.AddressFamily, address: str) -> None:
    if family == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    with socket.create_server((address, 0), family=family) as listening:
        port, table = listening.getsockname()[1], listeners()
    theirs = table.replace(f" {os.getuid()} ", f" {os.getuid() + 1} ")
    assert is_ours(port, table) and not is_ours(port, theirs)


HEAD = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(said: bytes, heard: bytearray | None = None) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            if heard is not None:
                heard.extend(await reader.readexactly(6 + 4))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def heard_of(said: bytes) -> list[str]:
    async with serving(said) as port, asyncio.timeout(30):
        return [text async for text in client.texts(port, "/ws")]


async def test_texts_are_heard_whole_and_pictures_are_skipped() -> None:
    said = frame(1, b"one") + frame(2, bytes(70_000)) + frame(1, b"t", last=False) + frame(0, b"wo") + frame(10, b"")
    assert await heard_of(HEAD + said + frame(1, b"x" * 200) + frame(8, b"")) == ["one", "two", "x" * 200]


async def test_pings_are_answered_with_what_they_held() -> None:
    heard = bytearray()
    async with serving(HEAD + frame(9, b"ping"), heard) as port:
        assert [text async for text in client.texts(port, "/ws")] == []
    assert heard[:2] == bytes((0x8A, 0x84))
    assert bytes(byte ^ heard[2 + at % 4] for at, byte in enumerate(heard[6:])) == b"ping"


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 404 Not Found\r\n\r\n", b"x" * 100_000])
async def test_what_opens_no_websocket_is_told(said: bytes) -> None:
    with pytest.raises((OSError, ValueError)):
        await heard_of(said)


@pytest.mark.parametrize("said", [b"\x81\x7f" + b"\xff" * 8, b"\x81\x83masktxt"])
async def test_frames_that_no_server_sends_are_told(said: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        await heard_of(HEAD + said)


@given(st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_any_bytes_end(said: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        asyncio.run(heard_of(HEAD + said))


SHORT_S = 0.2


@contextlib.asynccontextmanager
async def answering(said: bytes | None) -> AsyncIterator[Comfy]:
    """A server that answers everything with these bytes, or never."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            if said is None:
                await reader.read()
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Comfy(server.sockets[0].getsockname()[1], "me", call_max_s=SHORT_S)


@pytest.mark.timeout(60)
async def test_silence_is_told_soon() -> None:
    async with answering(None) as comfy:
        for call in (comfy.submit({}), comfy.finished("x"), comfy.cancel("x"), comfy.free()):
            with pytest.raises(ComfyGone, match=r"did not answer within 0\.2 s"):
                await call
        # A picture is large, and gets more time.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3 * SHORT_S):
                await comfy.picture({"filename": "a"})
    assert client.CALL_MAX_S < client.PICTURE_MAX_S


@pytest.mark.parametrize("said", [b"", b"<html>", b"GIF8", b"RIFF1234WAVE", b"\x89PNG", b"\xff\xd8"])
async def test_what_is_no_picture_is_told(said: bytes) -> None:
    async with answering(said) as comfy:
        with pytest.raises(ApiError, match="no picture") as told:
            await comfy.picture({"filename": "a"})
    assert (told.value.status, told.value.code) == (502, "engine_error")


@pytest.mark.parametrize("said", [b"\x89PNG\r\n\x1a\nx", b"\xff\xd8\xffx", b"RIFF1234WEBPx", b"GIF89ax"])
async def test_pictures_come_as_they_are(said: bytes) -> None:
    async with answering(said) as comfy:
        assert await comfy.picture({"filename": "a"}) == said
