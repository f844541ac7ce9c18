"""The shape of /v1/capabilities, whether its figures are true, and the three answers on health."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import greenroom
from greenroom.core.model import ModelId, Move, MoveId, MoveKind, Tier
from greenroom.engines.base import CacheFigures
from greenroom.errors import LoadOutOfMemory
from greenroom.features.operations.capabilities import KEPT_S
from greenroom.library.roots import Roots
from greenroom.runtime.memory.watch import MemoryLook
from greenroom.runtime.slots import LiveSlot
from tests.api.management_rig import GPU, NOW, Client, FakeGateway, FakeWatch, model
from tests.models import tiny
from tests.runtime.memory.readings import gpu, reading

PATH = "/v1/capabilities"


def gateway(**models: Any) -> FakeGateway:
    return FakeGateway({name: model(**said) for name, said in models.items()})


async def asked(gate: FakeGateway) -> Any:
    answer = await Client(gate).get(PATH)
    assert answer.status == 200
    return answer.json


async def test_the_whole_shape_is_there_and_no_figure_is_made_up() -> None:
    gate = gateway(a={"abilities": ("chat", "vision", "tools")}, b={}, hidden={"unlisted": True})
    slot = gate.add_slot("a", Tier.READY, last_used=NOW)
    live = SimpleNamespace(child=None, figures=CacheFigures(0.25), ready_since=NOW - 60)
    gate.slots.live[slot.id] = cast(LiveSlot, live)
    seen = reading(gpu("gpu0", total_mib=8192, used_mib=2048, utilisation=50))
    gate.memory_watch = FakeWatch(MemoryLook(NOW, seen), kind="nvml")
    gate.add_waiter("a", 1)
    told = await asked(gate)
    loaded_at = told["models"]["loaded"][0].pop("loadedAt")
    assert isinstance(loaded_at, int) and loaded_at > 1_700_000_000
    assert told == {
        "runnerType": f"greenroom-{greenroom.__version__}",
        "runnerId": told["runnerId"],
        "models": {
            "loaded": [{"id": "a", "quantization": None, "contextLength": None, "gpuMemoryMB": 100}],
            "loading": [],
            "available": ["b"],
        },
        "resources": {
            "gpuIds": [0],
            "gpuMemoryTotalMB": 8192,
            "gpuMemoryUsedMB": 2048,
            "gpuMemoryFreeMB": 6144,
            "gpuUtilization": 0.5,
            "kvCacheSizeMB": None,
            "kvCacheUtilization": 0.25,
        },
        "queue": {"depth": 1, "maxDepth": 1000, "avgWaitMs": None, "p95WaitMs": None},
        "capabilities": {
            "streaming": True,
            "prefixCaching": False,
            "multiTenant": True,
            "visionInput": True,
            "audioInput": False,
            "functionCalling": True,
            "byModel": {"a": ["chat", "tools", "vision"], "b": None},
        },
        "health": "healthy",
    }


async def test_without_gpus_their_figures_are_zero() -> None:
    gate = gateway(a={"abilities": ("images",)})
    gate.memory_watch.last = MemoryLook(NOW, reading())
    resources = (await asked(gate))["resources"]
    assert resources == {
        "gpuIds": [],
        "gpuMemoryTotalMB": 0,
        "gpuMemoryUsedMB": 0,
        "gpuMemoryFreeMB": 0,
        "gpuUtilization": 0.0,
        "kvCacheSizeMB": 0,
        "kvCacheUtilization": 0.0,
    }


async def test_a_driver_that_tells_no_utilisation_makes_it_null() -> None:
    gate = gateway(a={})
    gate.memory_watch.last = MemoryLook(NOW, reading(gpu("gpu0", total_mib=8192)))
    assert (await asked(gate))["resources"]["gpuUtilization"] is None


async def test_a_load_is_shown_with_its_progress() -> None:
    gate = gateway(a={})
    slot = gate.add_slot("a", Tier.COLD)
    slot.move = Move(MoveId("m"), MoveKind.LOAD, slot.id, ModelId("a"), 1, {GPU: 100}, NOW - 10)
    gate.state.models[ModelId("a")].learned_s[MoveKind.LOAD] = 40.0
    assert (await asked(gate))["models"]["loading"] == [{"id": "a", "progress": 0.25, "eta": 30}]


async def test_waits_are_those_of_the_last_requests() -> None:
    gate = gateway(a={})
    for number in range(100):
        gate.metrics.request_done(
            model="a",
            tenant="",
            route="/v1/chat/completions",
            status=200,
            seconds=1.0,
            wait_s=number / 100,
            not_there_s=0.0,
            first_byte_s=None,
        )
    # As the error of a full queue has it.
    gate.state.avg_wait_s = 0.2
    queue = (await asked(gate))["queue"]
    assert (queue["avgWaitMs"], queue["p95WaitMs"]) == (200, 940)


async def test_an_answer_is_kept_for_five_seconds() -> None:
    gate = gateway(a={})
    client = Client(gate)
    first = await client.get(PATH)
    assert first.headers["cache-control"] == "private, max-age=5"
    gate.add_waiter("a", 1)
    gate.now += KEPT_S - 0.1
    assert (await client.get(PATH)).json == first.json
    gate.now += 0.1
    assert (await client.get(PATH)).json["queue"]["depth"] == 1


async def test_it_is_503_while_the_gateway_starts_or_stops() -> None:
    gate = gateway(a={})
    gate.is_starting = True
    starting = await Client(gate).get(PATH)
    assert (starting.status, starting.error["code"]) == (503, "starting")
    assert (await Client(gate).get("/readyz")).status == 503
    gate.is_starting, gate.is_draining = False, True
    stopping = await Client(gate).get(PATH)
    assert (stopping.status, stopping.error["code"]) == (503, "shutting_down")
    assert stopping.headers["retry-after"]


async def test_the_first_answer_has_the_models_on_disk(tmp_path: Path) -> None:
    shutil.copy(tiny("alpha"), tmp_path / "alpha.gguf")
    gate = gateway()
    gate.library.use_roots(Roots((str(tmp_path),)))
    first = asyncio.create_task(asked(gate))
    await asyncio.sleep(0)
    await gate.library.refresh()
    told = await first
    assert told["models"]["available"] == ["alpha.gguf"] and told["capabilities"]["streaming"] is True


async def test_runner_is_named_by_the_configuration() -> None:
    gate = gateway()
    gate.config = gate.config.model_copy(
        update={"runner": type(gate.config.runner)(id="safebox-model-llm-1", type="vllm-0.6.0")}
    )
    told = await asked(gate)
    assert (told["runnerId"], told["runnerType"]) == ("safebox-model-llm-1", "vllm-0.6.0")


# --- health ---------------------------------------------------------------------------------------------------------


async def test_a_model_out_of_memory_is_told_by_health_alone() -> None:
    gate = gateway(a={}, b={})
    record = gate.state.models[ModelId("a")]
    record.failures, record.retry_at = 1, NOW + 5
    gate.mover.failures[ModelId("a")] = LoadOutOfMemory("no room")
    answer = await Client(gate).get("/health")
    assert (answer.status, answer.json["status"]) == (503, "out_of_memory")
    assert (await Client(gate).get("/healthz")).status == 200
    assert (await Client(gate).get("/readyz")).status == 200
    gate.now += 5
    assert (await Client(gate).get("/health")).status == 200


async def test_a_full_queue_is_alive_and_not_ready() -> None:
    gate = gateway(a={})
    for number in range(1000):
        gate.add_waiter("a", number)
    ready = await Client(gate).get("/readyz")
    assert (ready.status, ready.json) == (503, {"status": "saturated"})
    assert (await Client(gate).get("/healthz")).json == {"status": "ok"}
    assert (await Client(gate).get("/health")).status == 503


async def test_shutdown_is_alive_and_not_ready() -> None:
    gate = gateway(a={})
    gate.is_draining = True
    assert (await Client(gate).get("/readyz")).json == {"status": "draining"}
    assert (await Client(gate).get("/healthz")).status == 200


async def test_a_slot_shows_the_priority_of_its_last_request() -> None:
    gate = gateway(a={}, b={})
    gate.add_slot("a", Tier.READY, last_used=NOW - 1, last_priority=2)
    gate.add_slot("b", Tier.READY)
    models = (await Client(gate).get("/api/v1/status")).json["models"]
    assert [one["slots"][0]["last_priority"] for one in models] == [2, None]
