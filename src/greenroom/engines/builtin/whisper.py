"""faster-whisper: Whisper models of CTranslate2, each in a process of its own that serves OpenAI's audio routes.

Owns how that process is started and what a model's folder tells: languages, memory. Imports nothing of CTranslate2: the
program runs under the model's own Python (`workers/whisper`).
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

from greenroom.base.plain_file import open_plain, read_plain
from greenroom.config.hub import repository_of, snapshot
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
from greenroom.engines.estimates.estimate import FILE_SIZE, Estimate, EstimatePart, known, mib
from greenroom.engines.identity import FILES_MAX, file_identity, packages_identity, packages_missing
from greenroom.engines.usage import Usage
from greenroom.errors import LoadFailed, UnusableModel
from greenroom.process.spawn import Command

PROGRAM: Final = "whisper.main"
PACKAGES: Final = ("faster_whisper", "h11")
_OWN_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

# --- constants that measurements correct ----------------------------------------------------------------------------
PROGRAM_MIB: Final = 160
# A window of sound and its features, and the body of a request, for each request at once.
SOUND_MIB: Final = 320
# What CUDA, cuBLAS and cuDNN take of a GPU, which stays while the model sleeps; and the work of one request.
CUDA_MIB: Final = 640
WORK_MIB: Final = 512
# --------------------------------------------------------------------------------------------------------------------


class WhisperEngine(ProcessEngine):
    name = "whisper"
    listens = Listens.SOCKET
    upstream_paths = ("/health", "/v1/audio/*")
    progress_path = "/progress"

    def facts(self, model: Model) -> EngineFacts:
        translates = {Ability.TRANSLATION} if is_multilingual(snapshot(model.path or "")) else set()
        abilities = frozenset({Ability.TRANSCRIPTION, *translates})
        return EngineFacts(abilities, can_sleep=True, keeps_prefixes=False, sleeps_off_gpu_only=True)

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        weights = _weights_mib(model, on_gpu=gpus > 0)
        if weights is None:
            return None
        at_once = self.concurrency(model)
        host = (EstimatePart("program", 0, PROGRAM_MIB), EstimatePart("sound", 0, SOUND_MIB * at_once))
        if not gpus:
            return Estimate((EstimatePart("weights", 0, weights), *host), FILE_SIZE)
        work = (EstimatePart("work", WORK_MIB * at_once, 0), EstimatePart("context", CUDA_MIB, 0))
        return Estimate(known((EstimatePart("weights", weights, 0), *work, *host)), FILE_SIZE)

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate | None:
        weights = _weights_mib(model, on_gpu=True)
        if weights is None:
            return None
        return Estimate(
            (EstimatePart("weights", 0, weights), EstimatePart("program", CUDA_MIB, PROGRAM_MIB)), FILE_SIZE
        )

    def identity(self, model: Model) -> tuple[str, str]:
        return file_identity([snapshot(model.path or "")]), packages_identity(
            model.python, ("ctranslate2", "faster_whisper")
        )

    def concurrency(self, model: Model) -> int:
        return model.concurrency or 1

    def files(self, model: Model) -> list[Path]:
        try:
            return sorted(one for one in snapshot(model.path or "").iterdir() if one.is_file())[:FILES_MAX]
        except (OSError, ValueError):
            return []

    def unusable(self, model: Model) -> str | None:
        return None if (why := _no_model(model)) is None else why.rstrip(".")

    def missing(self, model: Model) -> str | None:
        return packages_missing(model, PACKAGES, "whisper")

    def launch(self, model_id: str, model: Model, place: LaunchPlace) -> Launch:
        python = model.python or sys.executable
        if shutil.which(python, path=model.env.get("PATH")) is None:
            raise LoadFailed(f"there is no Python {python}. Correct `python` in the configuration.")
        argv = [python, LAUNCH, PROGRAM, "--socket", str(place.socket), "--model", str(_folder(model_id, model))]
        argv += ["--device", "cpu" if model.device == "cpu" or place.gpus == () else "auto"]
        argv += ["--compute-type", model.compute_type, "--beam-size", str(model.beam_size)]
        argv += ["--concurrency", str(self.concurrency(model)), "--threads", str(model.threads or 0)]
        command = Command(tuple(argv), _OWN_ENVIRONMENT | environment(model, place), model.cwd)
        return Launch(command, check_path="/health")

    def usage(self, tail: bytes, *, stream: bool) -> Usage | None:
        """Sound is counted in seconds, which a header of the answer tells, not in tokens."""
        return None

    async def sleep(self, model: Model, call: CallEngine) -> None:
        await asked(call, "POST", "/control/sleep")

    async def wake(self, model: Model, call: CallEngine) -> None:
        await asked(call, "POST", "/control/wake")


def _folder(model_id: str, model: Model) -> Path:
    """The folder to load. Raises UnusableModel, which says what to do, if there is no model in it."""
    if (why := _no_model(model)) is not None:
        raise UnusableModel(f"{model_id}: {why}")
    return snapshot(model.path or "")


def _no_model(model: Model) -> str | None:
    path = model.path or ""
    if os.path.isfile(snapshot(path) / "model.bin"):
        return None
    if (repository := repository_of(path)) is not None:
        return (
            f"{repository} is not in the Hugging Face cache ({os.path.dirname(path)}). Type: hf download {repository}, "
            "or give a folder in `path`."
        )
    if os.path.isdir(path):
        return (
            f"there is no model.bin in {path}. whisper serves models of CTranslate2; convert others with "
            "ct2-transformers-converter."
        )
    return f"there is no folder {path}. Correct `path` in the configuration."


# --- what the files tell --------------------------------------------------------------------------------------------

# The vocabularies there are have about a megabyte.
VOCABULARY_BYTES_MAX: Final = 16 * 1024 * 1024


def is_multilingual(folder: Path) -> bool:
    """As CTranslate2 tells: by an empty token, which models for English alone do not have. True if unknown."""
    for name in ("vocabulary.json", "vocabulary.txt"):
        try:
            changed_ns = os.stat(folder / name).st_mtime_ns
        except (OSError, ValueError):
            continue
        return _has_empty_token(folder / name, changed_ns)
    return True


@functools.lru_cache(maxsize=256)
def _has_empty_token(file: Path, changed_ns: int) -> bool:
    try:
        text = read_plain(file, VOCABULARY_BYTES_MAX).decode()
        tokens = json.loads(text) if file.suffix == ".json" else text.removesuffix("\n").split("\n")
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(tokens, list) and "" in tokens


# CTranslate2's numbers of types, and bytes of one weight.
_STORED: Final = {0: "float32", 1: "int8", 2: "int16", 4: "float16", 5: "bfloat16"}
STORED_BYTES: Final = {"float32": 4, "int16": 2, "float16": 2, "bfloat16": 2, "int8": 1}
# Variables before the first matrix, which tells the type of the weights.
VARIABLES_MAX: Final = 64


def _weights_mib(model: Model, *, on_gpu: bool) -> int | None:
    """The size of model.bin, scaled to the type that is computed with; None if there is no such file."""
    file = snapshot(model.path or "") / "model.bin"
    try:
        size, stored = os.path.getsize(file), stored_type(file)
    except (OSError, ValueError):
        return None
    computed = stored if model.compute_type in ("default", "auto") else model.compute_type.partition("_")[0]
    if not on_gpu and computed in ("float16", "bfloat16"):
        # Processors compute with neither.
        computed = "float32"
    return mib(size * STORED_BYTES[computed] / STORED_BYTES[stored])


def stored_type(file: Path) -> str:
    """The type of the first matrix in a model.bin; float32 if the file does not tell. Raises OSError or ValueError."""
    with io.BufferedReader(open_plain(file)) as opened:
        try:
            (version,) = struct.unpack("<I", opened.read(4))
            _skip_name(opened)
            _, count = struct.unpack("<II", opened.read(8))
            if version < 4:
                return "float32"
            for _ in range(min(count, VARIABLES_MAX)):
                _skip_name(opened)
                (rank,) = opened.read(1)
                opened.seek(4 * rank, os.SEEK_CUR)
                kind, size = struct.unpack("<BI", opened.read(5))
                if rank > 1:
                    return _STORED.get(kind, "float32")
                opened.seek(size, os.SEEK_CUR)
        except (struct.error, ValueError):
            pass
    return "float32"


def _skip_name(opened: BinaryIO) -> None:
    (length,) = struct.unpack("<H", opened.read(2))
    opened.seek(length, os.SEEK_CUR)
