"""ComfyUI: the operator's own installation, behind OpenAI's image API. A workflow file says what a request makes.

Owns how it is started, and the check of a workflow: its nodes, its named inputs, the checkpoints it loads. The worker
program `workers/comfyui`, under the gateway's own Python, starts ComfyUI and translates. Asleep, ComfyUI has dropped
its models, and its next workflow reads them again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from greenroom.base.plain_file import read_plain, why
from greenroom.config.kinds import can_be_run, words
from greenroom.config.schema import Ability, Model
from greenroom.engines.base import (
    LAUNCH,
    CallEngine,
    EngineFacts,
    Launch,
    LaunchPlace,
    Listens,
    ProcessEngine,
    asked,
    environment,
)
from greenroom.engines.estimates.estimate import FILE_SIZE, Estimate, EstimatePart, file_bytes, placed
from greenroom.engines.estimates.hf_folder import CONTEXT_MIB
from greenroom.engines.identity import file_identity, packages_missing, program_identity
from greenroom.errors import LoadFailed, UnusableModel
from greenroom.process.spawn import Command

PROGRAM: Final = "comfyui.main"
WORKFLOW_BYTES_MAX: Final = 16 * 1024 * 1024
# Of the installation, where nothing else is said.
CHECKPOINTS: Final = Path("models", "checkpoints")
_PYTHONS: Final = ("venv/bin/python", ".venv/bin/python")
# The input of nodes that load a checkpoint.
_CHECKPOINT_INPUT: Final = "ckpt_name"
_OWN_ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1"}

# --- constants that measurements correct ----------------------------------------------------------------------------
# The activations of a picture of a megapixel, with the VAE.
WORK_MIB: Final = 3_072
PROGRAM_MIB: Final = 1_536
# --------------------------------------------------------------------------------------------------------------------

Workflow = dict[str, Any]


class ComfyUiEngine(ProcessEngine):
    name = "comfyui"
    listens = Listens.SOCKET
    progress_path = "/progress"
    upstream_paths = ("/health", "/progress", "/v1/images/*")

    def facts(self, model: Model) -> EngineFacts:
        return EngineFacts(
            frozenset({Ability.IMAGES}),
            can_sleep=not model.is_host_only,
            keeps_prefixes=False,
            keeps_results=True,
            loads_later=True,
        )

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        weights = sum(map(file_bytes, self._checkpoints(model)))
        if not weights:
            return None
        beside = EstimatePart("context", CONTEXT_MIB if gpus else 0, PROGRAM_MIB)
        work = EstimatePart("compute buffers", WORK_MIB if gpus else 0, 0 if gpus else WORK_MIB)
        return Estimate((placed("weights", weights, gpus > 0), work, beside), FILE_SIZE)

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate:
        return Estimate((EstimatePart("context", CONTEXT_MIB, PROGRAM_MIB),), FILE_SIZE)

    def concurrency(self, model: Model) -> int:
        """ComfyUI runs one workflow after the other: the rest waits with us."""
        return model.concurrency or 1

    def files(self, model: Model) -> list[Path]:
        return [*([] if model.workflow is None else [Path(model.workflow)]), *self._checkpoints(model)]

    def identity(self, model: Model) -> tuple[str, str]:
        return file_identity(self.files(model)), program_identity(_command(model))

    def unusable(self, model: Model) -> str | None:
        try:
            workflow = read_workflow(Path(model.workflow or ""))
            check_inputs(workflow, targets(model))
            self._check_checkpoints(model, workflow)
        except ValueError as wrong:
            return str(wrong)
        return None

    def missing(self, model: Model) -> str | None:
        if (why := packages_missing(Model(engine="command", cmd="x ${PORT}"), ("h11",), "comfyui")) is not None:
            return why
        if model.path is not None and not os.path.isfile(os.path.join(model.path, "main.py")):
            return f"there is no ComfyUI in {model.path}; install it there or correct `path`"
        program = _command(model)[0]
        is_there = can_be_run(program, model.cwd, model.env.get("PATH"))
        return None if is_there else f"there is no program {program}; install it or correct `cmd`"

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        if (why := self.missing(model)) is not None:
            raise LoadFailed(f"{model_id}: {why}.")
        if (why := self.unusable(model)) is not None:
            raise UnusableModel(f"{model_id}: {why}.")
        settings = {"command": _command(model), "workflow": model.workflow, "inputs": targets(model)}
        argv = (sys.executable, LAUNCH, PROGRAM, "--socket", str(place.socket), "--settings", json.dumps(settings))
        return Launch(Command(argv, _OWN_ENVIRONMENT | environment(model, place), model.cwd or model.path), "/health")

    # --- sleep --------------------------------------------------------------------------------------------------------

    async def sleep(self, model: Model, call: CallEngine) -> None:
        await asked(call, "POST", "/sleep")

    async def wake(self, model: Model, call: CallEngine) -> None:
        """Its next workflow loads what it needs; so all there is to see is that it answers."""
        await asked(call, "GET", "/health")

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _checkpoints(self, model: Model) -> list[Path]:
        """Those that are there. Never raises."""
        folder = _checkpoints_folder(model)
        try:
            named = checkpoint_names(read_workflow(Path(model.workflow or "")))
        except ValueError:
            return []
        return [] if folder is None else [folder / name for name in named if _is_file_in(folder, name)]

    def _check_checkpoints(self, model: Model, workflow: Workflow) -> None:
        folder = _checkpoints_folder(model)
        for name in checkpoint_names(workflow) if folder is not None else ():
            if not _is_file_in(folder, name):
                raise ValueError(
                    f"there is no checkpoint {name} in {folder}, which its workflow loads; put or fetch it there"
                )


def _command(model: Model) -> list[str]:
    """The words that start ComfyUI; the program fills in ${PORT} and ${OUTPUT}."""
    if model.cmd is not None:
        return list(words(model.cmd))
    folder = Path(model.path or "")
    own = (str(folder / python) for python in _PYTHONS if os.access(folder / python, os.X_OK))
    argv = [model.python or next(own, sys.executable), str(folder / "main.py"), "--listen", "127.0.0.1"]
    argv += ["--port", "${PORT}", "--output-directory", "${OUTPUT}", "--disable-auto-launch"]
    return [*argv, *(["--cpu"] if model.is_host_only else []), *model.args]


def _checkpoints_folder(model: Model) -> Path | None:
    """None if it is not known: then ComfyUI itself refuses what it does not find."""
    if model.checkpoints is not None:
        return Path(model.checkpoints)
    return None if model.path is None else Path(model.path) / CHECKPOINTS


def _is_file_in(folder: Path | None, name: str) -> bool:
    """Names may have folders, and never lead out of theirs."""
    inside = not os.path.isabs(name) and ".." not in Path(name).parts
    return folder is not None and inside and os.path.isfile(folder / name)


# --- the workflow ---------------------------------------------------------------------------------------------------


def targets(model: Model) -> dict[str, list[str]]:
    """Where each named value belongs, as NODE.INPUT."""
    return {name: [place] if isinstance(place, str) else list(place) for name, place in model.inputs.items()}


def read_workflow(file: Path) -> Workflow:
    """Raises ValueError, which says what is wrong, unless it is a workflow in ComfyUI's API format."""
    try:
        raw = read_plain(file, WORKFLOW_BYTES_MAX)
    except (OSError, ValueError) as error:
        raise ValueError(f"the workflow {file} cannot be read: {why(error)}") from error
    try:
        workflow = json.loads(raw)
    except (ValueError, RecursionError):
        workflow = None
    if not isinstance(workflow, dict) or not workflow or not all(map(_is_node, workflow.values())):
        raise ValueError(f"{file} is no workflow in ComfyUI's API format: export it there with Export (API)")
    return workflow


def _is_node(node: object) -> bool:
    return isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)


def check_inputs(workflow: Workflow, named: Mapping[str, list[str]]) -> None:
    """Raises ValueError for an input that is not there, or that another node gives."""
    for name, places in named.items():
        for place in places:
            node, _, field = place.partition(".")
            given = workflow.get(node, {}).get("inputs", {})
            if field not in given:
                has = f"node {node} has {', '.join(given)}" if node in workflow else f"there is no node {node}"
                raise ValueError(f"inputs.{name}: {place} is not in the workflow; {has}")
            if isinstance(given[field], list):
                raise ValueError(f"inputs.{name}: {place} comes from another node; name an input of that one")


def checkpoint_names(workflow: Workflow) -> list[str]:
    """Of the nodes that load one."""
    return sorted(set(_names(workflow)))


def _names(workflow: Workflow) -> Iterator[str]:
    for node in workflow.values():
        if isinstance(name := node["inputs"].get(_CHECKPOINT_INPUT), str):
            yield name
