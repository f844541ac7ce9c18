"""Whole files of llama-swap as people write them: each imports with all of its models, and what is lost is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importing.test_llama_swap import imported, served

# One GPU, models that take turns, and a small one that stays.
TURNS = """
healthCheckTimeout: 300
logLevel: info
startPort: 10001
macros:
  "server-latest": /opt/llama.cpp/llama-server --host 127.0.0.1 --port ${PORT} -ngl 999 -fa on
  "models": /srv/models
models:
  "qwen-32b":
    name: Qwen
    cmd: |
      ${server-latest}
      # the draft makes it quicker
      --model ${models}/qwen-32b.gguf --model-draft ${models}/qwen-0.5b.gguf \\
      --ctx-size 32768
    aliases: [coder, "gpt-4o-mini"]
    ttl: 600
    env: ["CUDA_VISIBLE_DEVICES=0"]
    filters: {stripParams: "temperature, top_p", setParams: {chat_template_kwargs: {enable_thinking: false}}}
  "embed": {cmd: "${server-latest} --embedding -m ${models}/embed.gguf", unlisted: true, ttl: 0}
groups:
  forever: {persistent: true, swap: false, exclusive: false, members: [embed]}
hooks: {on_startup: {preload: [embed]}}
"""
# Containers, with fixed ports and a command that stops them.
CONTAINERS = """
models:
  vllm:
    proxy: "http://127.0.0.1:9503"
    checkEndpoint: /health
    useModelName: Org/Model-AWQ
    cmd: >
      docker run --init --rm --name vllm-a --gpus all -v /srv/models:/models -p 9503:8000
      vllm/vllm-openai:latest --model /models/Org/Model-AWQ --gpu-memory-utilization 0.9
    cmdStop: docker stop vllm-a
    concurrencyLimit: 32
  whisper:
    cmd: podman run --rm -p ${PORT}:8080 whisper
    checkEndpoint: none
    capabilities: {in: [audio], out: [text]}
"""
# Sets that fit together, and another machine.
SETS = """
globalTTL: 900
apiKeys: ["${env.SWAP_KEY}"]
models:
  big: {cmd: "srv --port ${PORT} --big"}
  org/small: {cmd: "srv --port ${PORT}"}
  eye: {cmd: "srv --port ${PORT} --eye", macros: {n: 2}, metadata: {gpus: "${n}"}}
routing:
  router:
    use: matrix
    settings:
      matrix:
        vars: {s: org/small}
        evict_costs: {big: 30}
        sets: {day: s & eye, night: big | +day}
  scheduler: {use: fifo, settings: {fifo: {priority: {eye: 10, big: -5}}}}
peers:
  tower: {proxy: "https://tower.example:8443", apiKey: "${env.TOWER_KEY}", models: [llama-405b]}
"""
# Names for purposes, switches for the evening, a program with pages of its own, and another machine with filters.
PURPOSES = """
sendLoadingState: true
includeAliasesInList: true
unloadTimeout: 5
macros: {ctx: 4096, "run": "llama-server --port ${PORT} -c ${ctx}"}
models:
  "llama-70b":
    macros: {ctx: 16384}
    cmd: ${run} -m /srv/llama-70b.gguf
    cmdStop: kill -INT ${PID}
    unloadTimeout: 30
    filters:
      setParamsByID:
        "${MODEL_ID}:exact": {temperature: 0}
    metadata: {context: "${ctx}"}
  small: {cmd: "${run} -m /srv/small.gguf", timeouts: {responseHeader: 120}, compat: {ignoreWebsockets: true}}
  comfyui_auto: {cmd: "python main.py --listen 127.0.0.1 --port ${PORT}", checkEndpoint: /system_stats}
selectors:
  fast: {strategy: warm, targets: [small, llama-70b, tower/big], description: whatever is there}
  spread: {strategy: spillover, targets: [small, llama-70b]}
profiles:
  evening: {description: Games, pins: {llama-70b: null}}
hooks: {on_startup: {preload: [small, nobody]}}
peers:
  tower:
    proxy: http://192.168.1.5:8080
    models: [big]
    filters: {stripParams: "temperature, top_p", setParams: {max_tokens: 100}}
    timeouts: {connect: 5, responseHeader: 300, idleConn: 60}
"""


@pytest.mark.parametrize(
    ("text", "ids", "named"),
    [
        (TURNS, {"qwen-32b", "embed"}, []),
        (
            CONTAINERS,
            {"vllm", "whisper"},
            ["models.vllm.concurrencyLimit", "models.vllm.proxy", "models.whisper.capabilities"],
        ),
        (
            SETS,
            {"big", "org/small", "eye", "tower/llama-405b"},
            ["apiKeys", "routing.scheduler.settings.fifo.priority", "routing.scheduler.use"],
        ),
        (
            PURPOSES,
            {"llama-70b", "small", "comfyui_auto", "tower/big"},
            [
                "hooks.on_startup.preload",
                "includeAliasesInList",
                "models.comfyui_auto",
                "models.small.compat.ignoreWebsockets",
                "models.small.timeouts.responseHeader",
                "peers.tower.timeouts.idleConn",
                "profiles.evening.description",
                "profiles.evening.pins.llama-70b",
                "selectors.fast",
                "selectors.spread",
                "sendLoadingState",
            ],
        ),
    ],
    ids=["turns", "containers", "sets", "purposes"],
)
def test_a_whole_file_is_served_with_the_same_ids(text: str, ids: set[str], named: list[str], tmp_path: Path) -> None:
    made = imported(tmp_path, text)
    config = served(tmp_path, made, {"SWAP_KEY": "k", "TOWER_KEY": "t"})
    assert set(config.models) == ids
    assert sorted(note.line.partition(": ")[0] for note in made.notes) == named
