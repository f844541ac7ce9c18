"""`greenroom estimate`: the parts, the figure that counts, and how far the estimate was from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.model import DeviceId, ModelId
from greenroom.engines.registry import engine_for
from greenroom.runtime.memory.book import MemoryNeedsStore
from greenroom.runtime.memory.needs import Needs, Subject, warn
from tests.cli.command import Cli
from tests.engines.estimates.test_estimate_hf import folder
from tests.models import tiny


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration lies about."""
    monkeypatch.chdir(tmp_path)


def big() -> str:
    return str(tiny("big", noise=True, hidden=1024, layers=16))


def configured(folder: Path, *models: str) -> Path:
    gpus = {"gpus": [{"uuid": "GPU-a", "name": "Fake GPU", "memory_mib": 24_000, "foreign_mib": 0}]}
    (folder / "gpus.json").write_text(json.dumps({**gpus, "pids_visible": True}))
    lines = [f"state_dir: {folder}/state", f"memory: {{probe: file, file: {folder}/gpus.json}}", "models:", *models]
    path = folder / "greenroom.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def as_json(cli: Cli, *words: str) -> Any:
    return cli("estimate", *words, "--json").json


def test_a_file_is_told_part_by_part(cli: Cli) -> None:
    lines = cli("estimate", big(), "--gpus", "1").lines
    assert lines[0].split() == ["GPU_MIB", "HOST_MIB", "PART"]
    rows = {words[2]: words[:2] for line in lines[1:] if len(words := line.split(maxsplit=2)) == 3}
    assert rows["weights"] == ["289", "1"] and rows["KV cache"] == ["128", "0"] and "context" in rows
    assert any(line.startswith("planned with: ") and line.endswith("(gguf)") for line in lines)


def test_context_and_gpus_can_be_asked_about(cli: Cli) -> None:
    def parts(*words: str) -> dict[str, tuple[int, int]]:
        found = as_json(cli, big(), *words)["estimate"]["parts"]
        return {part["part"]: (part["gpu_mib"], part["host_mib"]) for part in found}

    assert parts("--gpus", "1", "--ctx", "8192")["KV cache"] == (256, 0)
    assert parts("--gpus", "0")["KV cache"] == (0, 128)
    assert parts("--gpus", "2")["context"][0] == 2 * parts("--gpus", "1")["context"][0]


def test_a_model_placed_on_the_host_takes_no_gpu_memory(tmp_path: Path, cli: Cli) -> None:
    path = configured(
        tmp_path, f"  chat: {{path: {big()}, devices: [host]}}", f"  other: {{path: {big()}, device: cpu}}"
    )
    placed, on_cpu = (as_json(cli, name, "--config", str(path)) for name in ("chat", "other"))
    assert placed["need"]["gpu_mib"] == placed["estimate"]["gpu_mib"] == 0
    assert placed["need"] == on_cpu["need"] and placed["need"]["host_mib"] > 289


def test_a_folder_is_told_too(tmp_path: Path, cli: Cli) -> None:
    found = as_json(cli, str(folder(tmp_path / "m")), "--gpus", "1", "--ctx", "4096")
    assert found["estimate"]["source"] == "safetensors" == found["need"]["source"]
    assert {part["part"]: part["gpu_mib"] for part in found["estimate"]["parts"]}["KV cache"] == 16
    assert found["measured"] is None and found["estimate_error"] is None


async def test_a_model_is_compared_with_what_was_measured(tmp_path: Path, cli: Cli) -> None:
    path = configured(tmp_path, f"  chat: {{path: {big()}, aliases: [talk]}}", '  other: {cmd: "serve ${PORT}"}')
    before = as_json(cli, "talk", "--config", str(path))
    assert before["model"] == "chat" and before["need"]["source"] == "gguf" and before["need"]["gpu_mib"] > 289
    await remember(path, tmp_path / "state", 800)
    after = as_json(cli, "chat", "--config", str(path))
    assert after["need"] == {"gpu_mib": 800, "host_mib": before["need"]["host_mib"], "source": "measured"}
    assert after["measured"]["gpu_mib"] == 800
    assert after["estimate_error"] == pytest.approx(before["need"]["gpu_mib"] / 800 - 1)
    told = cli("estimate", "chat", "--config", path).out
    assert "measured: 800 MiB of GPU" in told and "what was measured" in told
    # With another context it is another figure.
    assert as_json(cli, "chat", "--config", str(path), "--ctx", "64")["measured"] is None


async def remember(config: Path, state: Path, gpu_mib: int) -> None:
    from greenroom.config.loader import load

    state.mkdir()
    model = load(config).config.models["chat"]
    needs = Needs(MemoryNeedsStore(state, warn), {DeviceId("GPU-a"): "Fake GPU"})
    needs.measured(Subject(ModelId("chat"), model, engine_for(model)), {DeviceId("GPU-a"): gpu_mib})
    await needs.close()


def test_what_the_operator_said_is_the_figure_that_counts(tmp_path: Path, cli: Cli) -> None:
    path = configured(tmp_path, f"  chat: {{path: {big()}, memory_mib: 55}}")
    found = as_json(cli, "chat", "--config", str(path))
    assert found["need"] == {"gpu_mib": 55, "host_mib": 0, "source": "declared"}
    assert found["estimate"]["source"] == "gguf"


def test_what_says_nothing_fails_with_what_to_do(tmp_path: Path, cli: Cli) -> None:
    path = configured(tmp_path, '  chat: {cmd: "serve ${PORT}"}')
    assert "give memory_mib" in cli("estimate", "chat", "--config", path, status=1).err
    assert "no model stranger" in cli("estimate", "stranger", "--config", path, status=1).err
    assert cli("estimate", tmp_path / "gone.gguf", status=1).err.startswith("greenroom: ")
