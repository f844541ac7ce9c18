"""Engines whose models are hosted by our torch workers: they sleep in host memory and wake at the speed of the bus.

Owns how a worker is started, which worker a model belongs to, and the options that all of them take. Serves folders.
Imports nothing of torch: a worker has a Python of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import Final

from greenroom.config.schema import Model
from greenroom.core.model import Claim, DeviceId
from greenroom.engines.base import LAUNCH, HostedEngine, HostKey, worker_environment
from greenroom.errors import LoadFailed, UnusableModel
from greenroom.process.spawn import Command

PROGRAM: Final = "torch_host.main"
# Its presence says that a folder holds a pipeline of diffusers.
PIPELINE_INDEX: Final = "model_index.json"
# Serve the files of the folder and fetch nothing. Ask NVML whether there is a GPU: CUDA would fix the visible GPUs, and
# a spare learns its GPUs only with its first model. Write log lines at once.
_OWN_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}


class TorchEngine(HostedEngine):
    """Models of one kind, which have workers of their own: `name` is also that of the worker's program."""

    def host_key(self, slot: str, model: Model, gpus: tuple[DeviceId, ...] | None) -> HostKey:
        # A version that loads in the process that answers would take half of its speed meanwhile.
        is_alone = model.isolate or model.versions is not None
        return HostKey(
            program=self.name,
            python=model.python or sys.executable,
            gpus=() if model.device == "cpu" else gpus,
            alone=slot if is_alone else "",
            env=tuple(sorted(model.env.items())),
            cwd=model.cwd,
        )

    def launch_worker(self, key: HostKey, socket: str) -> Command:
        if shutil.which(key.python) is None:
            raise LoadFailed(f"there is no Python {key.python}. Correct `python` in the configuration.")
        return Command(
            (key.python, LAUNCH, PROGRAM, "--program", key.program, "--control", socket),
            worker_environment(key, _OWN_ENVIRONMENT),
            key.cwd,
        )

    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None, claim: Claim) -> Mapping[str, object]:
        if not os.path.isdir(model.path or ""):
            if os.path.isfile(model.path or ""):
                raise UnusableModel(
                    f"{model.path} is a file, and {self.name} serves folders. Correct `path` or `engine`."
                )
            raise UnusableModel(f"there is no folder {model.path}. Correct `path` in the configuration.")
        return {
            "dtype": model.dtype,
            "device": "cpu" if model.device == "cpu" or gpus == () else "auto",
            "trust_remote_code": model.trust_remote_code,
            "allow_pickle": model.allow_pickle,
            "threads": model.threads,
        }
