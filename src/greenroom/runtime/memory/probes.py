"""Selects the probe: the configured one, or the one that works here, limited to CUDA_VISIBLE_DEVICES.

Owns the meaning of that variable. Indices are taken in PCI bus order, as NVML counts. CUDA counts so only with
CUDA_DEVICE_ORDER=PCI_BUS_ID or if all GPUs are alike; `order_warning` says when the two may differ. NVML has a file of
its own; so have simulated GPUs and none at all (`readings.py`). GPUs that a file describes are here (`FileProbe`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from greenroom.base.detached import run_detached
from greenroom.config.schema import Config
from greenroom.errors import ConfigError, ProbeFailed
from greenroom.process import proc
from greenroom.runtime.memory.nvml import NvmlProbe
from greenroom.runtime.memory.readings import (
    THIS_MACHINE,
    GpuReading,
    HostProbe,
    NoProbe,
    Probe,
    Reading,
    SimulatedProbe,
    named,
)
from greenroom.telemetry.logs import get_logger

# More than any machine has, and more than a real file needs.
GPUS_MAX = 64
FILE_BYTES_MAX = 1024 * 1024
PROCESSES_MAX = 10_000

Mib = Annotated[int, Field(ge=0, le=2**40)]


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
class _ProcessUse:
    pid: int
    is_alive: bool
    mib: dict[str, int]


class FileProbe(Probe):
    """GPUs described by a file: for tests, and for accelerators that only a script of the operator can read.

    FILE holds `{"gpus": [{"uuid": "GPU-a", "name": "…", "memory_mib": 24000, "foreign_mib": 0}],
    "pids_visible": true}`. In the folder `FILE.d` there is one file for each process that uses memory, named by its pid
    and holding MiB by GPU: `{"GPU-a": 1234}`. It counts while that process lives, even if the file is not removed, and
    with `"linger_s": 2` in FILE for so long after the process was found dead, as drivers may need to free memory.
    `foreign_mib` is use by processes that cannot be seen. Write to another name and rename: files are read at any
    moment.
    """

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

    def _described(self) -> _File:
        try:
            described = _File.model_validate_json(_content(self._path))
        except (OSError, ValidationError) as error:
            raise ProbeFailed(f"{self._path} does not describe GPUs: {_reason(error)}.") from error
        if len({gpu.uuid for gpu in described.gpus}) != len(described.gpus):
            raise ProbeFailed(f"{self._path} describes two GPUs with one uuid.")
        return described

    def _processes(self, linger_s: float) -> list[_ProcessUse]:
        alive = {pid: (seen := proc.stat(pid)) is not None and not seen.is_dead for pid in self._pids()}
        now = self._clock()
        dead = (pid for pid, lives in alive.items() if not lives)
        self._dead_since = {pid: self._dead_since.get(pid, now) for pid in dead} if linger_s else {}
        lingering = {pid for pid, since in self._dead_since.items() if now - since < linger_s}
        return [_ProcessUse(pid, lives, self._mib(pid)) for pid, lives in alive.items() if lives or pid in lingering]

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


def _reading(index: int, gpu: _Gpu, processes: list[_ProcessUse], pids_visible: bool) -> GpuReading:
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


def make_probe(config: Config, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> Probe:
    """`nvml` are other bindings than the installed ones. Raises ProbeFailed if the configuration insists on a probe
    that does not work here."""
    memory = config.memory
    if config.gpus:
        return SimulatedProbe(config.gpus)
    if memory.probe == "none":
        return NoProbe("memory.probe is none")
    if memory.file is not None:
        return _visible(FileProbe(Path(memory.file)), environ)
    try:
        return _visible(NvmlProbe(nvml), environ)
    except ProbeFailed as error:
        if memory.probe == "nvml":
            raise
        return NoProbe(error.message)


def open_probe(config: Config, environ: Mapping[str, str] = os.environ, nvml: Any = None) -> tuple[Probe, Reading]:
    """A probe and its first look. Blocks. Raises ProbeFailed as `make_probe` does, or if that look fails."""
    probe = make_probe(config, environ, nvml)
    try:
        return probe, probe.look()
    except ProbeFailed as error:
        probe.close()
        if config.memory.probe != "auto":
            raise
        nothing = NoProbe(error.message)
        return nothing, nothing.look()


def _visible(probe: Probe, environ: Mapping[str, str]) -> Probe:
    said = environ.get(VISIBLE_NAME)
    return probe if said is None else VisibleProbe(probe, said)


_log = get_logger("memory")


async def first_look(config: Config) -> tuple[Probe, Reading]:
    """The configured probe and its first reading. Raises ConfigError if it does not work here."""
    try:
        probe, seen = await run_detached(lambda: open_probe(config), "first look at memory")
    except ProbeFailed as error:
        raise ConfigError(f"memory.probe: {config.memory.probe} does not work here. {error.message}") from error
    if isinstance(probe, NoProbe):
        _log.info("no GPUs are used", why=probe.why)
    if warning := order_warning(seen.gpus, os.environ):
        _log.warning(warning)
    return probe, seen


VISIBLE_NAME = "CUDA_VISIBLE_DEVICES"
ORDER_NAME = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"
# A MIG instance. It is not planned with and is no error; engines find it themselves.
_MIG = "MIG-"


class VisibleProbe:
    """Another probe, limited to the GPUs that the variable names."""

    def __init__(self, probe: Probe, said: str) -> None:
        self._probe = probe
        self._said = said
        # Resolved at the first look: when a GPU vanishes, the indices of the others change, but not what CUDA meant.
        self._uuids: frozenset[str] | None = None

    @property
    def kind(self) -> str:
        return self._probe.kind

    def look(self) -> Reading:
        reading = self._probe.look()
        if self._uuids is None:
            self._uuids = frozenset(gpu.uuid for gpu in visible(reading.gpus, self._said))
        return replace(reading, gpus=tuple(gpu for gpu in reading.gpus if gpu.uuid in self._uuids))

    def glance(self, uuid: str) -> GpuReading | None:
        return self._probe.glance(uuid) if uuid in (self._uuids or ()) else None

    def close(self) -> None:
        self._probe.close()


def visible(gpus: Sequence[GpuReading], said: str) -> list[GpuReading]:
    """The GPUs that the variable names. An invalid entry (-1, an unknown index or UUID) ends the list, as in CUDA."""
    found: list[GpuReading] = []
    for word in (word.strip() for word in said.split(",")):
        if word.startswith(_MIG):
            continue
        meant = named(gpus, word)
        if meant is None:
            break
        if meant not in found:
            found.append(meant)
    return found


def order_warning(gpus: Sequence[GpuReading], environ: Mapping[str, str]) -> str | None:
    """A warning if indices in the variable may mean other GPUs to CUDA than to us; else None."""
    numbers = any(word.strip().isdigit() for word in environ.get(VISIBLE_NAME, "").split(","))
    differ = len({(gpu.name, gpu.total_mib) for gpu in gpus}) > 1
    if not numbers or not differ or environ.get(ORDER_NAME) == PCI_ORDER:
        return None
    return (
        f"{VISIBLE_NAME} has numbers and the GPUs differ: they are read in the order of the PCI bus, while CUDA puts "
        f"the fastest first. Set {ORDER_NAME}={PCI_ORDER}, or write UUIDs."
    )
