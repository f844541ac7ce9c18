"""GPUs described by a file: for tests, and for accelerators that only a script of the operator can read.

Owns the format. FILE holds `{"gpus": [{"uuid": "GPU-a", "name": "…", "memory_mib": 24000, "foreign_mib": 0}],
"pids_visible": true}`. In the folder `FILE.d` there is one file for each process that uses memory, named by its pid and
holding MiB by GPU: `{"GPU-a": 1234}`. It counts while that process lives, even if the file is not removed, and with
`"linger_s": 2` in FILE for so long after the process was found dead, as drivers may need to free memory.
`foreign_mib` is use by processes that cannot be seen. Write to another name and rename: files are read at any moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.probes.base import GpuReading, Reading
from greenroom.runtime.memory.probes.host import THIS_MACHINE, HostProbe

# More than any machine has, and more than a real file needs.
GPUS_MAX = 64
FILE_BYTES_MAX = 1024 * 1024
PROCESSES_MAX = 10_000

Mib = Annotated[int, Field(ge=0, le=2**40)]
_DEAD_STATES = frozenset({"Z", "X", "x"})


class _Gpu(BaseModel):
    model_config = ConfigDict(extra="forbid")

    uuid: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]
    name: Annotated[str, Field(max_length=128)] = "GPU"
    memory_mib: Mib
    foreign_mib: Mib = 0
    utilisation: Annotated[int, Field(ge=0, le=100)] | None = None
    temperature_c: Annotated[int, Field(ge=-273, le=1_000)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    gpus: Annotated[list[_Gpu], Field(max_length=GPUS_MAX)]
    pids_visible: bool = True
    linger_s: Annotated[float, Field(ge=0, le=3_600)] = 0.0


_USE = TypeAdapter(dict[str, Mib])


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    is_alive: bool
    mib: dict[str, int]


class FileProbe:
    kind = "file"

    def __init__(self, path: Path, host: HostProbe = THIS_MACHINE, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._folder = path.with_name(path.name + ".d")
        self._host = host
        self._clock = clock
        # When dead processes that still count were found dead.
        self._dead_since: dict[int, float] = {}

    def look(self) -> Reading:
        described = self._described()
        processes = self._processes(described.linger_s)
        gpus = (_reading(index, gpu, processes, described.pids_visible) for index, gpu in enumerate(described.gpus))
        return Reading(tuple(gpus), self._host.look())

    def glance(self, uuid: str) -> GpuReading | None:
        return self.look().gpu(uuid)

    def close(self) -> None:
        """Nothing is held."""

    def _described(self) -> _File:
        try:
            described = _File.model_validate_json(_content(self._path))
        except (OSError, ValidationError) as error:
            raise ProbeFailed(f"{self._path} does not describe GPUs: {_reason(error)}.") from error
        if len({gpu.uuid for gpu in described.gpus}) != len(described.gpus):
            raise ProbeFailed(f"{self._path} describes two GPUs with one uuid.")
        return described

    def _processes(self, linger_s: float) -> list[_Process]:
        alive = {pid: self._lives(pid) for pid in self._pids()}
        now = self._clock()
        dead = (pid for pid, lives in alive.items() if not lives)
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead} if linger_s else {}
        lingering = {pid for pid, since in self._dead_since.items() if now - since < linger_s}
        return [_Process(pid, lives, self._mib(pid)) for pid, lives in alive.items() if lives or pid in lingering]

    def _pids(self) -> list[int]:
        try:
            names = sorted(os.listdir(self._folder))[:PROCESSES_MAX]
        except OSError:
            return []
        return [int(name) for name in names if name.isascii() and name.isdigit()]

    def _mib(self, pid: int) -> dict[str, int]:
        path = self._folder / str(pid)
        try:
            return _USE.validate_json(_content(path))
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            raise ProbeFailed(f"{path} does not say what a process uses: {_reason(error)}.") from error

    def _lives(self, pid: int) -> bool:
        try:
            stat = (self._host.proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        # The name in parentheses may itself hold spaces and parentheses.
        return stat.rpartition(")")[2].split()[0] not in _DEAD_STATES


def _reading(index: int, gpu: _Gpu, processes: list[_Process], pids_visible: bool) -> GpuReading:
    uses = [(process, process.mib[gpu.uuid]) for process in processes if gpu.uuid in process.mib]
    return GpuReading(
        uuid=gpu.uuid,
        index=index,
        name=gpu.name,
        total_mib=gpu.memory_mib,
        used_mib=gpu.foreign_mib + sum(mib for _, mib in uses),
        processes={process.pid: mib for process, mib in uses if process.is_alive} if pids_visible else None,
        utilisation=gpu.utilisation,
        temperature_c=gpu.temperature_c,
    )


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(FILE_BYTES_MAX)


def _reason(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])
