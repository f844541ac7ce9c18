"""Every request that the runner API shows, sent to a runner as it is shown, and every answer compared with its answer.

The runner is configured by the variables of that API alone: its operations are signed, it has no keys, and its models
are repositories in the hub's cache, which llama.cpp serves. Where the API says awq-4bit the files here are fp16, one of
its other words: llama.cpp serves no AWQ. Answers are compared key by key with `SHAPES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.core.model import ModelId
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import key_file, shared_token
from tests.harness import gateway, tiny
from tests.integration.governance.test_governance import now, with_key
from tests.integration.raw import CHAT, Answer, Raw, http
from tests.models import tiny as tiny_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE, SMALL = "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"
OTHERS = ["mistralai/Mistral-7B-Instruct-v0.3", "deepseek-ai/deepseek-r1-distill-llama-70b"]
LOAD, UNLOAD, FLUSH = "/v1/models/load", "/v1/models/unload", "/v1/cache/flush"
ORDER = {
    "modelId": LARGE,
    "quantization": "fp16",
    "maxContextLength": 32768,
    "gpuMemoryBudgetMB": 40000,
    "evictModel": SMALL,
}
TENANT_FLUSH = {"scope": "tenant", "tenantId": "community-x", "modelId": None}
CACHE_HEADERS = {
    "X-Cache-Mode": "prefix",
    "X-Cache-Tag": "session-abc123",
    "X-Tenant-ID": "community-x",
    "X-Priority": "high",
}
SIGNERS = ["admin1", "admin2", "admin3"]
# What each answer holds, by the kind of its values: `int`, `float` (any number), `str`, `bool`; a tuple where null is
# one of them; a list of one shape. Keys that begin with + are ours, and clients of the API do not know them.
NUMBER, MAYBE_INT, MAYBE_NUMBER = (int, float), (int, type(None)), (int, float, type(None))
MAYBE_TEXT = (str, type(None))
SHAPES: dict[str, Any] = {
    "capabilities": {
        "runnerType": str,
        "runnerId": str,
        "models": {
            "loaded": [
                {
                    "id": str,
                    "quantization": MAYBE_TEXT,
                    "contextLength": MAYBE_INT,
                    "loadedAt": MAYBE_INT,
                    "gpuMemoryMB": int,
                }
            ],
            "loading": [{"id": str, "progress": NUMBER, "eta": MAYBE_INT}],
            "available": [str],
        },
        "resources": {
            "gpuIds": [int],
            "gpuMemoryTotalMB": int,
            "gpuMemoryUsedMB": int,
            "gpuMemoryFreeMB": int,
            "gpuUtilization": MAYBE_NUMBER,
            "kvCacheSizeMB": MAYBE_INT,
            "kvCacheUtilization": MAYBE_NUMBER,
        },
        "queue": {"depth": int, "maxDepth": int, "avgWaitMs": MAYBE_NUMBER, "p95WaitMs": MAYBE_NUMBER},
        "capabilities": {
            **dict.fromkeys(("streaming", "prefixCaching", "multiTenant"), bool),
            **dict.fromkeys(("visionInput", "audioInput", "functionCalling"), bool),
            "+byModel": dict,
        },
        "health": str,
    },
    "load taken": {"taskId": str, "status": str, "progress": NUMBER, "eta": MAYBE_NUMBER},
    "load done": {
        "taskId": str,
        "status": str,
        "modelId": str,
        "gpuMemoryUsedMB": int,
        "loadTimeMs": int,
        "+progress": NUMBER,
        "+estimated": bool,
        "+eta": MAYBE_NUMBER,
        "+error": MAYBE_TEXT,
        "+errorCode": MAYBE_TEXT,
    },
    "unloaded": {"modelId": str, "gpuMemoryFreedMB": int, "kvCacheFlushed": bool},
    "flushed": {"flushed": bool, "entriesRemoved": MAYBE_INT, "memoryFreedMB": MAYBE_NUMBER},
    "health": {
        "status": str,
        "uptime": int,
        "modelsLoaded": int,
        "queueDepth": int,
        "+leaseStore": MAYBE_TEXT,
        "+keyFile": MAYBE_TEXT,
    },
    "queue full": {"error": {"code": str, "message": str, "queueDepth": int, "avgWaitMs": MAYBE_NUMBER, "+": None}},
    "rate limited": {"error": {"code": str, "message": str, "limit": int, "remaining": int, "resetAt": int, "+": None}},
}


def misfits(value: Any, shape: Any, where: str = "") -> list[str]:
    """Where a value is not of this shape: keys that are missing, of another kind, or unknown."""
    if isinstance(shape, dict):
        ours = {key[1:]: kind for key, kind in shape.items() if key.startswith("+")}
        theirs = {key: kind for key, kind in shape.items() if not key.startswith("+")}
        found = [f"{where}.{key} is missing" for key in theirs if key not in value]
        found += [f"{where}.{key} is unknown" for key in value if key not in theirs | ours and "" not in ours]
        known = {key: kind for key, kind in (theirs | ours).items() if key in value}
        return found + [text for key, kind in known.items() for text in misfits(value[key], kind, f"{where}.{key}")]
    if isinstance(shape, list):
        return [text for at, one in enumerate(value) for text in misfits(one, shape[0], f"{where}[{at}]")]
    kinds = shape if isinstance(shape, tuple) else (shape,)
    is_right = isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)
    return [] if is_right else [f"{where} is {value!r}"]


def fits(answer: Answer, name: str) -> Any:
    """The answer's JSON, which has this shape."""
    value = answer.json()
    assert misfits(value, SHAPES[name]) == [], name
    return value


# The host by which the platform's client calls, and the tenants of its requests.
HOST = {"Host": "safebox-model-llm:8080"}


def variables(folder: Path) -> dict[str, str]:
    """Every variable of the API, the image's HOST, and METRICS_ALIASES."""
    return {
        "HOST": "0.0.0.0",
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_HOME": f"{folder}/hub",
        "MODEL_BASE_PATH": f"{folder}/models",
        "VLLM_ENABLE_PREFIX_CACHING": "true",
        "VLLM_MAX_MODEL_LEN": "32768",
        "VLLM_GPU_MEMORY_UTILIZATION": "0.9",
        "ENABLE_MULTI_TENANT": "true",
        "DEFAULT_RATE_LIMIT": "100req/min",
        "TENANT_RATE_LIMIT_community-x": "100req/min",
        "TENANT_RATE_LIMIT_community-y": "500req/min",
        "TENANT_RATE_LIMIT_default": "50req/min",
        "VERIFIED_OP_TOKEN_KEY_PATH": key_file(folder),
        "LOG_LEVEL": "info",
        "LOG_FORMAT": "json",
        "ENABLE_METRICS": "true",
        "METRICS_PORT": "0",
        "METRICS_ALIASES": "runner-api",
        "MAX_QUEUE_DEPTH": "16",
        "QUEUE_TIMEOUT_MS": "30000",
    }


class Platform:
    """The platform's client: no key, a token for each operation, and a load that is polled to its end."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def get(self, path: str) -> Answer:
        return await http(self._app, "GET", path, headers=HOST)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        return await http(self._app, "POST", path, body, headers={**HOST, **(headers or {})})

    async def governed(self, operation: str, path: str, body: Mapping[str, Any]) -> Answer:
        token = shared_token(operation=operation, modelId=body.get("modelId"), issuedAt=now(), signers=SIGNERS)
        # As text it begins like every token of this kind.
        assert as_text(token).startswith("eyJ")
        return await self.post(path, {**body, "verifiedOpToken": as_text(token)})

    async def load(self, **order: Any) -> dict[str, Any]:
        """Raises what the load failed with."""
        answer = await self.governed("model-load", "/v1/models/load", order)
        assert answer.status == 202, answer.body
        taken = fits(answer, "load taken")
        assert (taken["status"], taken["progress"]) == ("loading", 0.0)
        for _ in range(1_200):
            await asyncio.sleep(0.05)
            status: dict[str, Any] = (await self.get(f"/v1/models/load/{taken['taskId']}")).json()
            if status["status"] == "completed":
                assert misfits(status, SHAPES["load done"]) == [] and status["taskId"] == taken["taskId"]
                return status
            if status["status"] == "failed":
                raise RuntimeError(f"Model load failed: {status['error']}")
        raise AssertionError("it never ended")


def in_hub(hub: Path, repository: str, file: Path) -> None:
    """Put a file into the hub's cache as the only one of this repository."""
    folder = hub / ("models--" + repository.replace("/", "--"))
    (folder / "snapshots" / "0a1b2c").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0a1b2c")
    shutil.copy(file, folder / "snapshots" / "0a1b2c" / f"{repository.rpartition('/')[2]}-F16.gguf")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runner(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("runner")
    (folder / "models").mkdir()
    for name in (LARGE, SMALL, *OTHERS):
        in_hub(folder / "hub" / "hub", name, tiny_model("alpha"))
    with_key(folder)
    # One whose answers take long, for a queue.
    models = {"busy": tiny(tiny_model("counts", loop=True), ctx_size=4096, parallel=1)}
    names = {"id": "safebox-model-llm-1", "type": "vllm-0.6.0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(folder).items():
            patch.setenv(name, value)
        async with gateway(folder, models, budget_mib=81920, runner=names) as app:
            await until(lambda: len(app.library.records) == 4, "the hub's cache was looked at")
            yield app


async def ask(runner: App, model: str, **headers: str) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return await Platform(runner).post(CHAT, body, headers)


# --- capabilities, loading, unloading ---------------------------------------------------------------------------------


async def test_capabilities_of_a_runner_that_was_never_asked(runner: App) -> None:
    answer = await Platform(runner).get("/v1/capabilities")
    told = fits(answer, "capabilities")
    assert (answer.status, told["runnerType"], told["runnerId"]) == (200, "vllm-0.6.0", "safebox-model-llm-1")
    assert {LARGE, SMALL, *OTHERS} <= set(told["models"]["available"])
    resources = told["resources"]
    assert (resources["gpuIds"], resources["gpuMemoryTotalMB"]) == ([0], 81920)
    assert resources["gpuMemoryUsedMB"] + resources["gpuMemoryFreeMB"] == 81920
    assert (told["queue"]["depth"], told["queue"]["maxDepth"], told["health"]) == (0, 16, "healthy")
    can = told["capabilities"]
    assert (can["streaming"], can["prefixCaching"], can["multiTenant"]) == (True, True, True)
    assert "max-age=5" in answer.headers["cache-control"]


async def test_a_model_is_loaded_in_place_of_another_and_unloaded(runner: App) -> None:
    platform = Platform(runner)
    assert (await ask(runner, SMALL)).status == 200
    # Polled as its client polls; raises what it failed with.
    done = await platform.load(**ORDER)
    name = done["modelId"]
    assert (done["status"], name) == ("completed", LARGE)
    assert done["gpuMemoryUsedMB"] > 0 and done["loadTimeMs"] > 0

    async def loaded() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = fits(await platform.get("/v1/capabilities"), "capabilities")["models"]["loaded"]
        return found

    # An answer is kept for five seconds.
    for _ in range(80):
        if [one["id"] for one in await loaded()] == [name]:
            break
        await asyncio.sleep(0.1)
    (one,) = await loaded()
    assert (one["id"], one["quantization"].lower(), one["contextLength"]) == (name, "f16", 32768)
    assert one["loadedAt"] > 1_700_000_000 and one["gpuMemoryMB"] == done["gpuMemoryUsedMB"]
    gone = fits(await platform.governed("model-unload", UNLOAD, {"modelId": name}), "unloaded")
    assert (gone["modelId"], gone["kvCacheFlushed"]) == (name, True) and gone["gpuMemoryFreedMB"] > 0


async def test_a_task_that_is_not_known_is_404(runner: App) -> None:
    assert (await Platform(runner).get(f"{LOAD}/load-abc123")).status == 404


# --- tokens -----------------------------------------------------------------------------------------------------------


def token(**changed: Any) -> Any:
    return shared_token(
        **{"operation": "model-unload", "modelId": SMALL, "issuedAt": now(), "signers": SIGNERS} | changed
    )


async def test_lifecycle_operations_need_a_token_as_it_is_shown(runner: App) -> None:
    platform = Platform(runner)

    async def unloaded(given: Any) -> tuple[int, str]:
        answer = await platform.post(UNLOAD, {"modelId": SMALL, "verifiedOpToken": given})
        return answer.status, "" if answer.status == 200 else answer.error["code"]

    assert (await ask(runner, SMALL)).status == 200, "requests to models need none"
    for path, body in ((LOAD, ORDER), (UNLOAD, {"modelId": SMALL}), (FLUSH, TENANT_FLUSH)):
        assert (await platform.post(path, body)).status == 401, path
    shown = token()
    assert sorted(shown) == ["opToken", "signature"]
    assert sorted(shown["opToken"]) == ["issuedAt", "modelId", "nonce", "operation", "signers"]
    forged = {**shown, "signature": "A" * len(shown["signature"])}
    old, other = token(issuedAt=now() - 400), token(modelId=LARGE)
    for refused in (forged, old, other, token(operation="model-load")):
        status, code = await unloaded(refused)
        assert status in (401, 403) and code.startswith("token_"), (status, code)
    # As an object and as text; and each once.
    assert await unloaded(shown) == (200, "")
    assert (await unloaded(shown))[1] == (await unloaded(as_text(shown)))[1] == "token_replayed"
    assert await unloaded(as_text(token())) == (200, "")


# --- requests and their headers ---------------------------------------------------------------------------------------


async def test_headers_of_requests_and_answers(runner: App) -> None:
    answers = [await ask(runner, SMALL, **CACHE_HEADERS) for _ in range(2)]
    for answer in answers:
        assert answer.status == 200 and answer.headers["x-cache-hit"] in ("true", "false")
        for name in ("x-cache-tokens-reused", "x-queue-wait-ms", "x-gpu-time-ms"):
            assert re.fullmatch("[0-9]+", answer.headers[name]), name
    again = answers[1].headers
    assert again["x-cache-hit"] == "true" and int(again["x-cache-tokens-reused"]) > 0
    for mode in ("none", "auto", "prefix"):
        answer = await ask(runner, SMALL, **CACHE_HEADERS | {"X-Cache-Mode": mode})
        assert (answer.status, answer.headers["x-cache-hit"]) == (200, "false" if mode == "none" else "true")
    for priority in ("high", "normal", "low"):
        assert (await ask(runner, SMALL, **{"X-Priority": priority})).status == 200
    for name, wrong in (("X-Cache-Mode", "some"), ("X-Cache-Tag", "x" * 65), ("X-Priority", "urgent")):
        assert (await ask(runner, SMALL, **{name: wrong})).status == 400, name


async def test_caches_are_flushed_by_every_scope(runner: App) -> None:
    platform = Platform(runner)
    tag = {"scope": "tag", "tag": "session-abc123"}
    for order in (TENANT_FLUSH, tag, {"scope": "model", "modelId": SMALL}, {"scope": "all"}):
        for _ in range(2):
            assert (await ask(runner, SMALL, **CACHE_HEADERS)).status == 200
        flushed = fits(await platform.governed("cache-flush", FLUSH, order), "flushed")
        assert flushed["flushed"] is True and flushed["entriesRemoved"] > 0, order
        assert flushed["memoryFreedMB"] > 0, "what these tokens took"
        assert (await ask(runner, SMALL, **CACHE_HEADERS)).headers["x-cache-hit"] == "false", order


# --- health, a full queue, a rate, metrics ----------------------------------------------------------------------------


async def test_health_until_the_queue_is_full(runner: App) -> None:
    platform, view = Platform(runner), runner.loop.scheduler.view
    long = {"model": "busy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000}

    def has_its_place(before: int) -> bool:
        is_answered = any(slot.in_flight for slot in view.slots_of(ModelId("busy")))
        return is_answered and view.waitlist.depth == before

    async with contextlib.AsyncExitStack() as raws:
        for number in range(17):
            raw = await raws.enter_async_context(await Raw.open(runner))
            raw.ask(long, headers=HOST)
            # One is answered, the others wait.
            await until(partial(has_its_place, number), "it has its place")
            if number == 3:
                health = await platform.get("/health")
                told = fits(health, "health")
                assert (health.status, told["status"], told["queueDepth"]) == (200, "healthy", 3)
                assert told["modelsLoaded"] >= 1 and told["uptime"] >= 0
        full = await platform.post(CHAT, long)
        error = fits(full, "queue full")["error"]
        assert (full.status, error["code"], error["queueDepth"]) == (503, "queue_full", 16)
        assert int(full.headers["retry-after"]) >= 1 and "16" in error["message"]
        health = await platform.get("/health")
        assert (health.status, fits(health, "health")["queueDepth"]) == (503, 16)
    await until(lambda: not runner.inference.running, "all have left")
    assert (await platform.get("/health")).status == 200


async def test_metrics_have_the_lines_that_are_shown(runner: App) -> None:
    assert (await ask(runner, SMALL, **CACHE_HEADERS)).status == 200
    answer = await Platform(runner).get("/metrics")
    text = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/plain")
    kinds = {
        "vllm_requests_total": "counter",
        "vllm_cache_hit_rate": "gauge",
        "vllm_queue_depth": "gauge",
        "vllm_gpu_memory_used": "gauge",
        "vllm_inference_duration_seconds": "histogram",
    }
    assert [name for name, kind in kinds.items() if f"# TYPE {name} {kind}\n" not in text] == []
    assert [name for name in kinds if f"# HELP {name} " not in text] == []
    series = {
        (line[0], frozenset(re.findall(r'(\w+)="', line[1]))) for line in re.findall(r"^(\w+)(\{.*\})? ", text, re.M)
    }
    histogram = "vllm_inference_duration_seconds"
    for name, labels in (
        ("vllm_requests_total", {"model", "tenant", "status"}),
        ("vllm_cache_hit_rate", {"model"}),
        ("vllm_queue_depth", set()),
        ("vllm_gpu_memory_used", {"gpu"}),
        (f"{histogram}_bucket", {"model", "le"}),
        (f"{histogram}_sum", {"model"}),
        (f"{histogram}_count", {"model"}),
    ):
        assert (name, frozenset(labels)) in series, name
    counted = [line for line in text.splitlines() if line.startswith("vllm_requests_total{")]
    assert any(f'model="{SMALL}"' in one and 'tenant="community-x"' in one and '"success"' in one for one in counted)


async def test_the_hundred_and_first_request_of_a_minute_is_refused(runner: App) -> None:
    """Last, because nothing more of this tenant is answered then."""
    missing = {"model": "not-there", "messages": []}
    async with await Raw.open(runner) as raw:
        for _ in range(101):
            raw.ask(missing, headers={**HOST, "X-Tenant-ID": "community-x"})
            answer = await raw.answer()
            if answer.status == 429:
                break
    error = fits(answer, "rate limited")["error"]
    assert (answer.status, error["code"], error["limit"], error["remaining"]) == (429, "rate_limit_exceeded", 100, 0)
    assert error["message"] == "Tenant community-x exceeded 100 req/min"
    assert error["resetAt"] >= now() and 0 < int(answer.headers["retry-after"]) <= 120
    assert (await ask(runner, SMALL, **{"X-Tenant-ID": "community-y"})).status == 200
