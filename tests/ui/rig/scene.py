"""A running gateway with something on every page: all tiers, a queue, leases, versions, downloads, a failed model.

Owns the scene for tests that look and for the pictures of the documentation. Engines are stand-ins, so nothing here
needs a GPU or a download; the gateway, its process and its API are the real ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

from greenroom.config.kinds import id_problem
from tests.harness import GatewayProcess, fake, served, write_config
from tests.integration.hosted_rig import Folder
from tests.standins import fake_gpu
from tests.standins.standin_hub import StandinHub, standin_hub
from tests.ui.rig.hostile import PAYLOADS
from tests.waiting import until_now

FIRST, SECOND = "GPU-4f1d2c7a", "GPU-9be03158"
CHAT = "/v1/chat/completions"
REPO = "org/tiny-chat"
# What two of the models answer.
SAYINGS = (
    "A **green room** is where performers wait before they go on stage.\n\n"
    "In *Greenroom* it is host memory:\n\n"
    "- a model that is **ready** is on a GPU and answers at once,\n"
    "- one that is **asleep** waits in the green room and wakes in a moment,\n"
    "- one that is **cold** is on disk.\n\n"
    "```bash\ngreenroom sleep qwen3-14b\n```",
    "It is the lounge of a theatre: close to the stage, and comfortable. "
    "Here it holds models whose weights are in memory, but not on a GPU.",
)
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8}).encode()
# Longer than any test: what this holds up stays as it is until the scene ends.
FOR_EVER_S = "100000"
# Those that a configuration takes as an id; ${…} is a macro there.
HOSTILE_IDS = [text for text in PAYLOADS if id_problem(text) is None and "${" not in text]
# The one of them that is asked.
TALKER = HOSTILE_IDS[0]


class Scene:
    """What tests and pictures do with the gateway, besides looking at it in a browser."""

    def __init__(self, gate: GatewayProcess, hub: StandinHub, folder: Path) -> None:
        self.gate = gate
        self.hub = hub
        self.folder = folder
        self._callers = ThreadPoolExecutor(max_workers=16)

    @property
    def url(self) -> str:
        return self.gate.url

    def get(self, path: str) -> Any:
        return call(self.url, "GET", path)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return call(self.url, "POST", path, {} if body is None else body, headers)

    def order(self, model: str, what: str) -> Any:
        return self.post(f"/api/v1/models/{quote(model, safe='')}/{what}")

    def chat(self, model: str, **more: Any) -> Any:
        return self.post(CHAT, {"model": model, "messages": [{"role": "user", "content": "Hello"}]} | more)

    def begin(self, path: str, body: Any, **headers: str) -> Future[Any]:
        """Ask and do not wait for the answer."""
        return self._callers.submit(self._ask_quietly, path, body, headers)

    def tier(self, model: str) -> str:
        return str(self.model(model)["tier"])

    def model(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = next(one for one in self.get("/api/v1/status")["models"] if one["id"] == model)
        return found

    def close(self) -> None:
        self._callers.shutdown(wait=False, cancel_futures=True)

    def _ask_quietly(self, path: str, body: Any, headers: dict[str, str]) -> None:
        # The gateway is killed under these callers.
        with contextlib.suppress(OSError, HTTPException):
            self.post(path, body, **headers)


def call(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """Ask a gateway; None for an empty answer. Raises OSError, which an answer of 400 and above is too."""
    data = None if body is None else json.dumps(body).encode()
    about = {"Content-Type": "application/json", **(headers or {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, about, method=method)) as answer:
            said = answer.read()
    except urllib.error.HTTPError as refused:
        raise OSError(f"{method} {path}: {refused.code} {refused.read()!r}") from None
    return json.loads(said) if said else None


@contextlib.contextmanager
def scene(folder: Path, *, hostile: bool = True) -> Iterator[Scene]:
    """The gateway with everything under way. With `hostile`, names are attacks too; pictures are taken without."""
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(standin_hub())
        stack.enter_context(_hub_environment(hub, folder))
        gpus = fake_gpu.describe(
            folder / "gpus.json",
            fake_gpu.gpu(FIRST, 24_000, 1_800, utilisation=87, temperature_c=64) | {"name": "GeForce RTX 4090"},
            fake_gpu.gpu(SECOND, 16_000, utilisation=12, temperature_c=41) | {"name": "GeForce RTX 4080"},
        )
        config = write_config(
            folder, _models(folder, gpus) | (_hostile_models() if hostile else {}), gpus=[], **_sections(folder, gpus)
        )
        gate = GatewayProcess(folder, config)
        stack.callback(_end, gate)
        played = Scene(gate, hub, folder)
        stack.callback(played.close)
        _play(played, hostile=hostile)
        yield played


def _end(gate: GatewayProcess) -> None:
    gate.kill()
    assert gate.nothing_left()


@contextlib.contextmanager
def _hub_environment(hub: StandinHub, folder: Path) -> Iterator[None]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_CACHE"))}
    ours = {"HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(folder / "no-token")}
    with mock.patch.dict(os.environ, kept | ours, clear=True):
        yield


# --- what there is ---------------------------------------------------------------------------------------------------


def _models(folder: Path, gpus: Path) -> dict[str, Any]:
    def on_gpu(name: str, mib: int, *switches: str, **keys: Any) -> dict[str, Any]:
        memory = ("--gpu-file", str(gpus), "--gpu-mib", str(mib))
        return fake(name, *memory, *switches, **{"memory_mib": mib, "abilities": ["chat", "completions"]} | keys)

    def sleeper(name: str, mib: int, **keys: Any) -> dict[str, Any]:
        switches = ("--say", SAYINGS[0], "--token-s", "0.02")
        made = served("vllm", folder / f"server-{name}", *switches, memory_mib=mib, **keys)
        _weights(Path(made["path"]), mib * 2**18)
        return made

    def hosted(name: str, mib: int, **keys: Any) -> dict[str, Any]:
        env = {"CUDA_FAKE_GPUS": str(gpus)}
        return Folder(folder, name, mib=mib, arena_mib=mib - 400, tokens=12).model(memory_mib=mib, env=env, **keys)

    chat, saying = folder / "models" / "tiny-chat", ("--say", SAYINGS[1], "--token-s", "0.01")
    return {
        "qwen3-14b": on_gpu("qwen3-14b", 11_200, "--tokens", "100000", "--token-s", "0.2", devices=[FIRST]),
        "qwen3-coder-30b": on_gpu("coder", 19_500, devices=[FIRST], description="For code."),
        "gemma-3-4b": hosted("gemma", 5_000, devices=[SECOND], aliases=["small"], abilities=["chat"]),
        "phi-4-mini": sleeper("phi", 2_600, devices=[SECOND]),
        "mistral-7b": on_gpu("mistral", 6_400, "--load-s", FOR_EVER_S, devices=[FIRST], load_timeout_s=3_600),
        "nomic-embed": on_gpu("nomic", 600, pinned=True, abilities=["embeddings"], devices=[FIRST]),
        "flux-schnell": on_gpu("flux", 12_000, abilities=["images"], devices=[FIRST]),
        "whisper-large": on_gpu("whisper", 3_100, abilities=["transcription"], devices=[FIRST]),
        "kokoro": on_gpu("kokoro", 700, abilities=["speech"], devices=[FIRST]),
        "llama-3-8b": on_gpu("llama", 6_000, "--crash-at", "load", devices=[SECOND]),
        "tiny-chat": {
            **served("vllm", folder / "server-tiny", *saying, memory_mib=4_000, devices=[SECOND]),
            "path": str(_weights(chat)),
            "versions": {"repo_id": REPO, "keep": 3},
        },
    }


def _weights(folder: Path, numbers: int = 2**20) -> Path:
    """A folder that the stand-in for vLLM takes for a model of so many numbers. The file takes no room on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    head, size = _head(numbers), 2 * numbers
    (folder / "config.json").write_bytes(CONFIG)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return folder


def _head(numbers: int) -> bytes:
    header = json.dumps({"w": {"dtype": "F16", "shape": [numbers], "data_offsets": [0, 2 * numbers]}}).encode()
    return len(header).to_bytes(8, "little") + header


def _repository(numbers: int) -> dict[str, bytes]:
    return {"config.json": CONFIG, "model.safetensors": _head(numbers) + bytes(2 * numbers)}


def _hostile_models() -> dict[str, Any]:
    """Models whose ids, names and descriptions are attacks. Their answers are their ids."""
    return {
        text: fake(text, "--talkative", memory_mib=10, devices=[SECOND]) | {"name": text, "description": other}
        for text, other in zip(HOSTILE_IDS, reversed(HOSTILE_IDS), strict=True)
    }


def _sections(folder: Path, gpus: Path) -> dict[str, Any]:
    return {
        "memory": {"probe": "file", "file": str(gpus), "look_every_s": 0.5, "gpu_margin_mib": 256},
        "library": {"roots": [str(folder / "models")], "downloads_max": 1},
        "tenants": {
            "research": {"requests_per_minute": 600, "tokens_per_minute": 200_000},
            "website": {"requests_per_minute": 1_200, "concurrent_max": 32},
        },
    }


# --- what happens ----------------------------------------------------------------------------------------------------


def _play(played: Scene, *, hostile: bool) -> None:
    """Bring everything under way, step by step: each waits until the one before can be seen."""
    steps = [_fail, _sleep_and_wake, _versions, _downloads, _requests, _load, _leases, _queue]
    for step in [*steps, *([_attacks] if hostile else [])]:
        step(played)


def _fail(played: Scene) -> None:
    with contextlib.suppress(OSError):
        played.order("llama-3-8b", "load")


def _sleep_and_wake(played: Scene) -> None:
    played.order("gemma-3-4b", "load")
    played.order("gemma-3-4b", "sleep")
    played.order("nomic-embed", "load")
    played.order("phi-4-mini", "load")


def _versions(played: Scene) -> None:
    second = _weights(played.folder / "models" / "tiny-chat-v2", 2**19)
    done = played.post("/update-model?wait=true", {"model_repo_id": second.name})
    assert done["status"] == "completed", done


def _downloads(played: Scene) -> None:
    """One that is done, and one that is under way and stays so."""
    hub = played.hub
    hub.repos["org/finished"] = _repository(2**10)
    first = played.post("/v1/models/download", {"model": "org/finished"})["job_id"]
    until_now(lambda: _download(played, first)["status"] == "completed", "the first download is done")
    hub.repos["Qwen/Qwen3-4B"] = _repository(2**21)
    hub.faults.drip_s = 0.5
    second = played.post("/v1/models/download", {"model": "Qwen/Qwen3-4B"})["job_id"]
    until_now(lambda: _download(played, second)["bytes"] > 0, "the second download has begun")


def _download(played: Scene, job: str) -> Any:
    return played.get(f"/v1/models/download/{job}")


def _leases(played: Scene) -> None:
    """One that is held, and one that waits for an answer to end."""
    render = {"mib": 3_000, "name": "blender", "devices": [FIRST], "ttl_s": 3_600, "wait_s": 60, "pid": os.getpid()}
    held = played.post("/api/v1/leases", render)
    assert held["state"] == "held", held
    tune = {"mib": 12_000, "name": "finetune", "devices": [FIRST], "wait_s": 600, "priority": "low"}
    played.begin("/api/v1/leases", tune)
    until_now(lambda: len(_programs(played)) == 2, "a lease waits")


def _programs(played: Scene) -> list[Any]:
    return [one for one in played.get("/api/v1/leases")["leases"] if one["kind"] == "program"]


def _requests(played: Scene) -> None:
    """Some that are done, by several callers, and one that streams."""
    for tenant in ("research", "website", "research"):
        played.post(CHAT, {"model": "phi-4-mini", "messages": _said("Hi")}, **{"X-Tenant-ID": tenant})
    played.post("/v1/embeddings", {"model": "nomic-embed", "input": ["one", "two"]}, **{"X-Tenant-ID": "website"})
    endless = {"model": "qwen3-14b", "messages": _said("Write a book."), "stream": True}
    played.begin(CHAT, endless, **{"X-Tenant-ID": "research"})
    until_now(lambda: played.model("qwen3-14b")["in_flight"] == 1, "an answer streams")


def _load(played: Scene) -> None:
    played.begin("/api/v1/models/mistral-7b/load", {})
    until_now(lambda: played.model("mistral-7b")["moving"], "a model loads")


def _queue(played: Scene) -> None:
    for number, tenant in enumerate(("website", "research", "website", "nightly")):
        asked = {"model": "qwen3-coder-30b", "messages": _said(f"Task {number}"), "x_priority": number % 3}
        played.begin(CHAT, asked, **{"X-Tenant-ID": tenant})
        until_now(lambda wanted=number: played.get("/api/v1/status")["queue"]["depth"] > wanted, "a request waits")


def _attacks(played: Scene) -> None:
    """Words that callers choose: tenants, programs, and prompts, which this engine prints and so are in its log."""
    played.chat(TALKER)
    for text in PAYLOADS:
        plain = text.replace("\n", " ").encode("ascii", "ignore").decode()
        headers = {"X-Tenant-ID": plain[:100], "User-Agent": plain}
        asked = {"model": TALKER, "messages": _said(text), "tokens": 1}
        played.begin(CHAT, asked, **headers)
    played.post("/api/v1/leases", {"mib": 1, "name": PAYLOADS[3], "ttl_s": 3_600, "pid": os.getpid()})
    until_now(lambda: _asked(played, TALKER) > len(PAYLOADS), "all attacks were answered")


def _asked(played: Scene, model: str) -> int:
    requests = played.get(f"/api/v1/requests?limit=200&model={quote(model)}")["requests"]
    return sum(one["state"] == "done" for one in requests)


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
