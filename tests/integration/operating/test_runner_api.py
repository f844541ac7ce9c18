"""A platform drives the gateway by the runner API, as docs/runner-api.md says: every call in its client's order.

The gateway is a running one with real engines, configured as a container is, by variables alone; its operations are
signed by the shared key. Answers are compared key by key with `SHAPES`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from greenroom.app import App
from greenroom.features.governance.tokens import as_text
from tests.features.governance.token_rig import key_file, shared_token
from tests.harness import gateway, tiny
from tests.integration.governance.test_governance import now, with_key
from tests.integration.raw import Answer, http
from tests.models import tiny as tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GUIDE = Path(__file__).parents[3] / "docs" / "runner-api.md"

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


# --- as a container, with tokens --------------------------------------------------------------------------------------

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
        "TENANT_RATE_LIMIT_community-y": "1req/min",
        "TENANT_RATE_LIMIT_default": "50req/min",
        "VERIFIED_OP_TOKEN_KEY_PATH": key_file(folder),
        "LOG_LEVEL": "info",
        "LOG_FORMAT": "json",
        "ENABLE_METRICS": "true",
        "METRICS_PORT": "0",
        "METRICS_ALIASES": "runner-api",
        "MAX_QUEUE_DEPTH": "1",
        "QUEUE_TIMEOUT_MS": "60000",
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def container(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    folder = tmp_path_factory.mktemp("container")
    for name in ("hub", "models"):
        (folder / name).mkdir()
    with_key(folder)
    shutil.copy(tiny_model("gamma"), folder / "models" / "gamma.gguf")
    models = {
        **{name: tiny(tiny_model(name)) for name in ("alpha", "beta")},
        "broken": {"cmd": "/bin/false ${PORT}", "memory_mib": 100},
    }
    runner = {"id": "safebox-model-llm-1", "type": "vllm-0.6.0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables(folder).items():
            patch.setenv(name, value)
        async with gateway(folder, models, runner=runner) as app:
            yield app
    assert "MAX_QUEUE_DEPTH" not in os.environ


class Platform:
    """The platform's client: no key, a token for each operation, and a load that is polled to its end."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def get(self, path: str) -> Answer:
        return await http(self._app, "GET", path, headers=HOST)

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        return await http(self._app, "POST", path, body, headers={**HOST, **(headers or {})})

    async def governed(self, operation: str, path: str, body: Mapping[str, Any]) -> Answer:
        token = shared_token(
            operation=operation, modelId=body.get("modelId"), issuedAt=now(), signers=["admin1", "admin2", "admin3"]
        )
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

    async def shows_loaded(self, model: str) -> None:
        """It is told within the five seconds for which an answer is kept."""
        for _ in range(300):
            now_there = fits(await self.get("/v1/capabilities"), "capabilities")
            if [one["id"] for one in now_there["models"]["loaded"]] == [model]:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(now_there["models"])


async def test_a_platform_drives_the_gateway(container: App) -> None:
    platform = Platform(container)
    # What can it do?
    before = fits(await platform.get("/v1/capabilities"), "capabilities")
    assert (before["runnerId"], before["runnerType"]) == ("safebox-model-llm-1", "vllm-0.6.0")
    assert before["models"]["loaded"] == [] and {"alpha", "beta"} <= set(before["models"]["available"])
    assert (before["queue"]["depth"], before["queue"]["maxDepth"], before["health"]) == (0, 1, "healthy")
    # Without proof nothing is done.
    refused = await platform.post("/v1/models/load", {"modelId": "alpha"})
    assert (refused.status, refused.error["code"]) == (401, "token_missing")
    # Load a model, and another in its place.
    first = await platform.load(modelId="alpha", quantization=None, maxContextLength=None)
    assert first["modelId"] == "alpha" and first["gpuMemoryUsedMB"] > 0 and first["loadTimeMs"] > 0
    by_path = f"{container.config.library.roots[0]}/gamma.gguf"
    third = await platform.load(modelId=by_path, maxContextLength=256, evictModel="alpha")
    assert third["modelId"] == by_path
    await platform.shows_loaded(by_path)
    second = await platform.load(modelId="beta", evictModel=by_path)
    assert second["modelId"] == "beta"
    await platform.shows_loaded("beta")
    # Ask it, as a tenant with a session; twice, so that the prompt is cached.
    headers = {
        "x-cache-mode": "prefix",
        "x-cache-tag": "session-abc123",
        "x-tenant-id": "community-x",
        "x-priority": "high",
    }
    for _ in range(2):
        answer = await platform.post("/v1/chat/completions", {"model": "beta", **CHAT}, headers)
        assert answer.status == 200, answer.body
        assert answer.headers["x-cache-hit"] in ("true", "false")
        for name in ("x-cache-tokens-reused", "x-queue-wait-ms", "x-gpu-time-ms"):
            assert int(answer.headers[name]) >= 0, name
    # How is it?
    health = fits(await platform.get("/health"), "health")
    assert (health["status"], health["modelsLoaded"], health["queueDepth"]) == ("healthy", 1, 0)
    # Forget what the tenant said.
    order = {"scope": "tenant", "tenantId": "community-x", "modelId": None}
    flushed = await platform.governed("cache-flush", "/v1/cache/flush", order)
    assert flushed.status == 200 and fits(flushed, "flushed")["flushed"] is True
    # Take the model away.
    gone = await platform.governed("model-unload", "/v1/models/unload", {"modelId": "beta"})
    assert gone.status == 200 and fits(gone, "unloaded")["kvCacheFlushed"] is True
    assert gone.json()["modelId"] == "beta" and gone.json()["gpuMemoryFreedMB"] > 0


async def test_a_load_that_fails_is_told_to_its_poller(container: App) -> None:
    with pytest.raises(RuntimeError, match="Model load failed: broken could not be loaded"):
        await Platform(container).load(modelId="broken")
    # One model of four: the others can be served.
    assert (await Platform(container).get("/health")).status == 200


async def test_the_guide_names_every_route_that_is_called_here() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    called = ("/v1/capabilities", "/v1/models/load", "/v1/models/load/{taskId}", "/v1/models/unload", "/health")
    assert [path for path in (*called, "/v1/cache/flush") if f"{path}`" not in guide] == []
    assert "`verifiedOpToken`" in guide and "ALLOWED_HOSTS" in guide
