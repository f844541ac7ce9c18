from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from greenroom.config.schema import Ability, Model
from greenroom.core.model import DeviceId, ModelId
from greenroom.engines.base import LaunchPlace
from greenroom.engines.builtin.comfyui import ComfyUiEngine, checkpoint_names
from greenroom.errors import LoadFailed, UnusableModel
from greenroom.runtime.memory.book import MemoryNeedsStore
from greenroom.runtime.memory.needs import Needs, Subject, warn

ENGINE = ComfyUiEngine()
MIB = 1024 * 1024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints = tmp_path / "models" / "checkpoints" / "xl"
    checkpoints.mkdir(parents=True)
    (tmp_path / "main.py").touch()
    with (checkpoints / "base.safetensors").open("wb") as file:
        file.truncate(500 * MIB)
    workflow = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "xl/base.safetensors"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": ""}},
    }
    (tmp_path / "w.json").write_text(json.dumps(workflow))
    return tmp_path


def model(folder: Path, **keys: Any) -> Model:
    said = {"path": str(folder), "workflow": str(folder / "w.json"), "inputs": {"prompt": "2.text"}}
    return Model(engine="comfyui", **{**said, **keys})


def settings(folder: Path, **keys: Any) -> dict[str, Any]:
    launch = ENGINE.launch("m", model(folder, **keys), LaunchPlace({}, socket="/run/s.sock"))
    argv = list(launch.command.argv)
    found: dict[str, Any] = json.loads(argv[argv.index("--settings") + 1])
    return found


def test_what_it_is(folder: Path) -> None:
    facts = ENGINE.facts(model(folder))
    assert (facts.abilities, facts.can_sleep) == (frozenset({Ability.IMAGES}), True)
    assert not ENGINE.facts(model(folder, device="cpu")).can_sleep
    assert (ENGINE.concurrency(model(folder)), ENGINE.concurrency(model(folder, concurrency=3))) == (1, 3)
    assert {file.name for file in ENGINE.files(model(folder))} == {"w.json", "base.safetensors"}


def test_memory_follows_from_the_checkpoints(folder: Path) -> None:
    on_gpu, on_host = ENGINE.estimate(model(folder), 1), ENGINE.estimate(model(folder), 0)
    assert on_gpu is not None and on_host is not None
    assert 500 < on_gpu.need.gpu_mib < 6_000 and on_host.need.gpu_mib == 0
    assert ENGINE.estimate_asleep(model(folder), 1).need.gpu_mib < 1_000
    (folder / "w.json").write_text("?")
    assert ENGINE.estimate(model(folder), 1) is None


def test_installation_is_started_on_a_port_of_its_own(folder: Path) -> None:
    command = settings(folder, args=["--lowvram"])["command"]
    assert command[1] == str(folder / "main.py") and command[-1] == "--lowvram"
    assert command[command.index("--listen") + 1] == "127.0.0.1"
    assert "--cpu" in settings(folder, device="cpu")["command"]
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    assert settings(folder)["command"][0] == str(python)
    assert settings(folder, python="/usr/bin/python3")["command"][0] == "/usr/bin/python3"


@pytest.mark.parametrize("name", ["/etc/hostname", "../w.json", "xl/../../../main.py", "none.safetensors"])
def test_checkpoints_are_those_of_the_folder(folder: Path, name: str) -> None:
    workflow = json.loads((folder / "w.json").read_text())
    workflow["1"]["inputs"]["ckpt_name"] = name
    (folder / "w.json").write_text(json.dumps(workflow))
    with pytest.raises(UnusableModel) as told:
        settings(folder)
    assert name in told.value.message
    assert "w.json" in str(ENGINE.files(model(folder))) and len(ENGINE.files(model(folder))) == 1


def test_checkpoints_may_lie_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("checkpoints")
    with pytest.raises(UnusableModel):
        settings(folder, checkpoints=str(elsewhere))
    (elsewhere / "xl").mkdir()
    (elsewhere / "xl" / "base.safetensors").touch()
    assert settings(folder, checkpoints=str(elsewhere))


def test_missing_installation_is_told(folder: Path) -> None:
    (folder / "main.py").unlink()
    assert "there is no ComfyUI in" in str(ENGINE.missing(model(folder)))
    with pytest.raises(LoadFailed, match="no ComfyUI"):
        settings(folder)
    by_command = model(folder, path=None, cmd="/nowhere/comfy --port ${PORT}")
    assert "there is no program /nowhere/comfy" in str(ENGINE.missing(by_command))


def test_checkpoints_that_other_nodes_choose_are_not_names() -> None:
    assert checkpoint_names({"1": {"class_type": "X", "inputs": {"ckpt_name": ["2", 0]}}}) == []


async def test_what_it_takes_before_its_first_picture_is_not_its_need(folder: Path) -> None:
    gpu = DeviceId("GPU-a")
    needs = Needs(MemoryNeedsStore(None, warn), {gpu: "NVIDIA H200"})
    one = Subject(ModelId("m"), model(folder), ENGINE)
    estimated = needs.need_of(one)[0]
    # Its weights come with the first picture.
    needs.measured(one, {gpu: 300})
    assert needs.need_of(one)[0].gpu_mib == estimated.gpu_mib
    needs.measured(one, {gpu: 20_000})
    assert needs.need_of(one)[0].gpu_mib == 20_000
    await needs.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "name"])
def test_workflows_that_are_no_small_files_are_refused_at_once(folder: Path, kind: str) -> None:
    workflow = folder / "other.json"
    if kind == "pipe":
        os.mkfifo(workflow)
    elif kind == "device":
        workflow = Path("/dev/zero")
    elif kind == "folder":
        workflow.mkdir()
    elif kind == "huge":
        with workflow.open("wb") as file:
            file.truncate(1024 * MIB)
    else:
        workflow = folder / "a\0b.json"
    one = model(folder, workflow=str(workflow))
    assert ENGINE.estimate(one, 1) is None and ENGINE.facts(one) and ENGINE.identity(one)
    with pytest.raises(UnusableModel, match="workflow"):
        settings(folder, workflow=str(workflow))
