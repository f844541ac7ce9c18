"""The real vLLM, its CPU build, behind a gateway: `make test-vllm`. A start takes half a minute and more.

It serves, streams, reports usage, keeps prefixes apart by tenant, and is stopped and started by swaps: on the host it
cannot sleep.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.config.schema import Model
from greenroom.core.model import DeviceId
from greenroom.engines.base import LaunchPlace
from greenroom.engines.builtin.vllm import VllmEngine
from tests.harness import gateway
from tests.integration.facts import at_rest
from tests.integration.faults import is_alive
from tests.integration.raw import CHAT, Answer, Raw, asking, chat, http
from tests.models import tiny_hf

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

PYTHON = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
KEYS = [{"name": name, "key": f"key-{name}", "admin": name == "ops"} for name in ("lab", "shop", "ops")]
HEADERS = {key["name"]: {"Authorization": f"Bearer {key['key']}"} for key in KEYS}
# One thread: on a busy machine more make it slower. Blocks on the host have 128 tokens by default.
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
ARGS = ("--enforce-eager", "--block-size", "32")
LONG = "word " * 80
PARSING = """
import sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers())
said = parser.parse_args(sys.argv[1:])
print(said.tensor_parallel_size, said.gpu_memory_utilization, said.enable_sleep_mode, said.uds)
"""


def model(name: str) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "path": str(tiny_hf(name, hidden=256)),
        "python": str(PYTHON),
        "dtype": "float32",
        "ctx_size": 1024,
        "concurrency": 4,
        "memory_mib": 3_000,
        "env": ENV,
        "args": list(ARGS),
        "aliases": [f"{name}-too"],
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """Two models and memory for one."""
    assert PYTHON.exists(), "there is no .venv-vllm here; type `make test-vllm`"
    models = {"alpha": model("alpha"), "bravo": model("bravo")}
    host = {"memory_mib": 5_000, "margin_mib": 0}
    server = {"api_keys": KEYS, "stream_wait_max_s": 800, "heartbeat_every_s": 5}
    async with gateway(tmp_path_factory.mktemp("vllm"), models, gpus=[], host=host, server=server) as app:
        yield app


async def ask(app: App, who: str = "lab", name: str = "alpha", **more: Any) -> Answer:
    return await chat(app, name, headers=HEADERS[who], temperature=0, **more)


async def said_by(app: App, name: str) -> str:
    """What it says in a stream: heartbeats come while it starts."""
    async with await Raw.open(app) as raw:
        raw.ask(asking(name, stream=True, temperature=0, max_tokens=8), headers=HEADERS["lab"])
        answer = await raw.rest(*await raw.head())
    assert answer.status == 200 and answer.data[-1] == "[DONE]", answer.body
    pieces = [choice["delta"].get("content") for event in answer.data[:-1] for choice in event["choices"]]
    return "".join(piece for piece in pieces if piece)


async def test_it_serves_by_each_of_its_names_and_counts_tokens(app: App) -> None:
    assert "alpha" in await said_by(app, "alpha")
    for name in ("alpha", "alpha-too"):
        answer = await ask(app, name=name, max_tokens=8)
        assert answer.status == 200 and "alpha" in answer.text, answer.body
        assert answer.json()["usage"]["completion_tokens"] > 0
    found = await http(app, "GET", f"/api/v1/requests/{answer.headers['x-request-id']}", headers=HEADERS["ops"])
    assert found.json()["completion_tokens"] == answer.json()["usage"]["completion_tokens"]


async def test_it_streams_and_reports_usage(app: App) -> None:
    answer = await ask(app, stream=True, stream_options={"include_usage": True}, max_tokens=8)
    assert answer.status == 200 and answer.data[-1] == "[DONE]"
    assert answer.data[-2]["usage"]["completion_tokens"] > 0


async def test_prefixes_are_kept_apart_by_tenant(app: App) -> None:
    async def cached(who: str, **more: Any) -> int:
        answer = await ask(app, who, messages=[{"role": "user", "content": LONG}], max_tokens=1, **more)
        assert answer.status == 200, answer.body
        return int((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    assert await cached("lab") == 0
    assert await cached("lab") > 0, "its own"
    assert await cached("shop") == 0, "another tenant's"
    assert await cached("shop") > 0
    assert await cached("lab", cache_salt="apart") == 0


async def test_client_that_leaves_is_worked_for_no_longer(app: App) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await ask(app, messages=[{"role": "user", "content": "count"}], max_tokens=900, ignore_eos=True)
    await at_rest(app)


async def test_it_understands_what_it_is_told_on_gpus(tmp_path: Path) -> None:
    """There are none here, so its own parser is asked."""
    gpus = (DeviceId("GPU-a"), DeviceId("GPU-b"))
    place = LaunchPlace(dict.fromkeys(gpus, 10_000), None, "/run/x.sock", gpus, (20_000, 20_000), (20_000, 20_000))
    keys = {"quantization": "fp8", "trust_remote_code": True, "chat_template": "x.jinja", "args": ()}
    told = Model(**{**model("alpha"), **keys})
    for said in (told, told.model_copy(update={"embedding": True})):
        argv = VllmEngine().launch("alpha", said, place).command.argv
        run = await asyncio.create_subprocess_exec(PYTHON, "-c", PARSING, *argv[3:], cwd=tmp_path, stdout=PIPE)
        out, _ = await run.communicate()
        assert run.returncode == 0 and out.split()[-4:] == [b"2", b"0.4621", b"True", b"/run/x.sock"]


async def test_its_control_is_ours(app: App) -> None:
    for path in ("/sleep", "/collective_rpc", "/reset_prefix_cache"):
        assert (await http(app, "POST", f"/upstream/alpha{path}", {}, headers=HEADERS["ops"])).status == 403
    answer = await http(app, "POST", CHAT, {"model": "alpha", "messages": "nonsense"}, headers=HEADERS["lab"])
    assert answer.status == 400, answer.body


async def test_swaps_stop_it_and_start_it(app: App) -> None:
    pid = await pid_of_admin(app, "alpha")
    assert "bravo" in await said_by(app, "bravo")
    assert not is_alive(pid)
    assert "alpha" in await said_by(app, "alpha")
    await at_rest(app)


async def pid_of_admin(app: App, name: str) -> int:
    shown = (await http(app, "GET", f"/api/v1/models/{name}", headers=HEADERS["ops"])).json()
    assert "stopped instead" in shown["no_sleep"]
    return int(shown["pid"])
