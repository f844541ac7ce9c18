"""`/api/v1/simulate`: play the requests that came through the scheduler again, with other GPUs or another policy.

`greenroom simulate` does it, in a process of its own that gets only what it needs to know of models and requests. One
runs at a time, with low priority and a bound on its time; it ends with the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import Field

from greenroom.access.keys import Permission
from greenroom.api.declared import NEVER, Routes, get, post
from greenroom.api.views import FromList, Order, View
from greenroom.base.detached import run_detached
from greenroom.config.limits import POLICIES
from greenroom.core.model import Device, DeviceId, DeviceKind
from greenroom.errors import BadRequest, Overload
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.record.recording import ACTIVITY_COLUMNS, activity_row
from greenroom.runtime.shell import Shell
from greenroom.telemetry.activity import Activity, Record

PATH: Final = "/api/v1/simulate"
CASES_MAX: Final = 12
VALUES_MAX: Final = 6
SECONDS_MAX: Final = 60
# Of a recording, its last rows up to this size: about thirty thousand requests.
TRACE_BYTES_MAX: Final = 2 * 1024 * 1024
# A drawn workload lasts as long as an hour's.
DRAWN_S: Final = 3600
_SAID_MAX: Final = 2_000
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "LANG", "TMPDIR")
# Ends with the gateway, yields to everything else, and is ended by the kernel if it computes for too long.
_LAUNCH: Final = (
    "import os, resource, signal, sys\n"
    "from greenroom.process import keeper\n"
    "keeper.set_for_this_process(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)\n"
    "if os.getppid() != int(sys.argv.pop(1)): sys.exit('the gateway has ended')\n"
    "os.nice(10)\n"
    f"resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS_MAX}, {SECONDS_MAX}))\n"
    "from greenroom.cli.main import main\n"
    "sys.exit(main(sys.argv[1:]))\n"
)


_Value = TypeVar("_Value")
_Values = Annotated[tuple[_Value, ...], Field(max_length=VALUES_MAX), FromList]


class SimulationOrder(Order):
    """What to compare: every combination of these, at most 12. The first value of each is what the others are compared
    with; what is not given is as it is now."""

    gpus: _Values[Annotated[int, Field(ge=1, le=64)]] = ()
    """How many GPUs."""
    gpu_mib: _Values[Annotated[int, Field(ge=1, le=10_000_000)]] = ()
    """The memory of each."""
    green_room_mib: _Values[Annotated[int, Field(ge=0, le=100_000_000)]] = ()
    """Host memory where models may sleep."""
    concurrency: _Values[Annotated[int, Field(ge=1, le=100_000)]] = ()
    """Requests that a model answers at once."""
    policy: _Values[Annotated[str, Field(max_length=64)]] = ()
    rate: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    """Draw so many requests a second for an hour, instead of those that were recorded."""


class SimulationInput(View):
    """What can be played."""

    requests: int
    """Recorded requests that a simulation would play."""
    seconds: float
    """From the first of them to the last."""
    source: Literal["recording", "memory"]
    """recording: the last rows of `server.record_activity`; memory: the last requests that the gateway remembers."""
    gpus: int
    gpu_mib: int | None
    """Of the smallest; null without GPUs."""
    policy: str
    policies: list[str]


class Simulated(View):
    """As `greenroom simulate --json` has it."""

    assumed: list[str]
    bottom_line: list[str]
    cases: list[dict[str, Any]]
    """Policy, hardware, counts, waits and delays of each; the first is what the others are compared with."""


class Simulating(Routes):
    def __init__(self, shell: Shell, activity: Activity) -> None:
        self._shell = shell
        self._activity = activity
        self._is_running = False

    @get(PATH, needs=Permission.READ)
    async def show_input(self) -> SimulationInput:
        """The requests that a simulation would play, and what it can be told to change."""
        rows, gpus = await self._rows(), self._gpus()
        times = [float(row[0]) for row in rows]
        return SimulationInput(
            requests=len(rows),
            seconds=round(max(times) - min(times), 1) if times else 0.0,
            source="recording" if self._recording is not None else "memory",
            gpus=len(gpus),
            gpu_mib=min((gpu.capacity_mib for gpu in gpus), default=None),
            policy=self._shell.config.scheduler.policy,
            policies=list(POLICIES),
        )

    @post(PATH, needs=Permission.READ, signed=NEVER)
    async def simulate(self, order: SimulationOrder) -> Simulated:
        """Play the recorded requests with other hardware or another policy, and say what that would change."""
        if self._is_running:
            raise Overload("A simulation is running already.", retry_after_s=5.0)
        self._is_running = True
        try:
            return await self._simulate(order)
        finally:
            self._is_running = False

    async def _simulate(self, order: SimulationOrder) -> Simulated:
        options = [*_options(order), "--seed", "0", "--jobs", "1", "--json"]
        rows = [] if order.rate is not None else await self._rows()
        if order.rate is None and not rows:
            raise BadRequest("No request was recorded yet. Ask a model, or give a rate to draw requests.", param="rate")
        try:
            return await self._played(options, rows, order)
        except OSError as error:
            raise Overload(f"The simulation cannot be started: {error}", retry_after_s=60.0) from error

    async def _played(self, options: list[str], rows: list[list[str]], order: SimulationOrder) -> Simulated:
        with tempfile.TemporaryDirectory(prefix="greenroom-simulate-") as folder:
            config, asleep, trace = (Path(folder, name) for name in ("greenroom.json", "asleep.json", "trace.csv"))
            written, needs = json.dumps(self._configuration()), json.dumps(self._needs_asleep())
            texts = {config: written, asleep: needs} | ({} if order.rate is not None else {trace: _csv(rows)})
            await run_detached(lambda: _write_all(texts), "write a simulation")
            options += ["--asleep", str(asleep)]
            if order.rate is None:
                options += ["--trace", str(trace), "--skip-unknown"]
            else:
                options += ["--rate", f"{order.rate:g}", "--seconds", str(DRAWN_S)]
            said = json.loads(await _run(["simulate", "--config", str(config), *options], folder))
            named = [sentence.replace(str(trace), "the recorded requests") for sentence in said["assumed"]]
            return Simulated(assumed=named, bottom_line=said["bottom_line"], cases=said["cases"])

    # --- what it is told --------------------------------------------------------------------------------------------

    @property
    def _recording(self) -> Path | None:
        said = self._shell.config.server.record_activity
        return Path(said) if said and Path(said).is_file() else None

    async def _rows(self) -> list[list[str]]:
        """Recorded requests, in no order."""
        path = self._recording
        if path is None:
            return [activity_row(record) for record in self._activity.recent(10_000) if _is_answered(record)]
        return await run_detached(lambda: _last_rows(path), "read recorded requests")

    def _gpus(self) -> list[Device]:
        devices = self._shell.loop.scheduler.view.ledger.devices.values()
        return [device for device in devices if device.kind is DeviceKind.GPU]

    def _host(self) -> dict[str, int]:
        devices = self._shell.loop.scheduler.view.ledger.devices.values()
        hosts = (device for device in devices if device.kind is DeviceKind.HOST)
        return next(({"memory_mib": host.capacity_mib, "margin_mib": host.margin_mib} for host in hosts), {})

    def _configuration(self) -> dict[str, Any]:
        """The models as the scheduler has them: no command, path or key of the real configuration is in it."""
        gpus, server = self._gpus(), self._shell.config.server
        green_room_mib = self._shell.loop.scheduler.view.limits.green_room_mib
        names = {gpu.id: f"gpu{number}" for number, gpu in enumerate(gpus)}
        return {
            "gpus": [{"memory_mib": gpu.capacity_mib, "margin_mib": gpu.margin_mib} for gpu in gpus],
            "host": self._host(),
            "memory": {} if green_room_mib is None else {"green_room_mib": green_room_mib},
            "models": dict(self._models(names)),
            "scheduler": self._shell.config.scheduler.model_dump(mode="json", exclude_unset=True),
            "server": {"wait_max_s": server.wait_max_s, "stream_wait_max_s": server.stream_wait_max_s},
        }

    def _needs_asleep(self) -> dict[str, tuple[int, int]]:
        """MiB of GPU and of host, for models that can sleep."""
        asleep = {name: entry.spec.need_asleep for name, entry in self._entries()}
        return {name: (need.gpu_mib, need.host_mib) for name, need in asleep.items() if need is not None}

    def _entries(self) -> Iterator[tuple[str, Entry]]:
        """The configured models that run here."""
        for name in self._shell.config.models:
            entry = self._shell.catalog.find(name)
            if entry is not None and not entry.spec.is_remote:
                yield name, entry

    def _models(self, gpus: dict[DeviceId, str]) -> Iterator[tuple[str, dict[str, Any]]]:
        known = self._shell.loop.scheduler.view.models
        for name, entry in self._entries():
            spec, record = entry.spec, known.get(entry.id)
            need = spec.need if record is None else record.need
            devices = {"devices": [gpus[device] for device in spec.devices if device in gpus]}
            on_gpu = {"memory_mib": need.gpu_mib, "host_memory_mib": need.host_mib, **devices}
            on_host = {"memory_mib": need.host_mib, "device": "cpu"}
            told: dict[str, Any] = {
                "cmd": ["true", "${PORT}"],
                "aliases": list(entry.config.aliases),
                "priority": spec.priority,
                "ttl_s": spec.ttl_s,
                "pinned": spec.pinned,
                "preload": spec.preload,
            }
            told |= on_gpu if need.gpu_mib else on_host if need.host_mib else devices
            told |= {} if spec.concurrency is None else {"concurrency": spec.concurrency}
            yield name, told


def _options(order: SimulationOrder) -> list[str]:
    """The cases, as the command takes them. Raises BadRequest."""
    policies = tuple(POLICIES)
    if unknown := [name for name in order.policy if name not in policies]:
        raise BadRequest(f"There is no policy {unknown[0]!r}: {' or '.join(policies)}.", param="policy")
    told: dict[str, Sequence[object]] = {
        "--gpus": order.gpus,
        "--gpu-mib": order.gpu_mib,
        "--green-room-mib": order.green_room_mib,
        "--concurrency": order.concurrency,
        "--policy": order.policy,
    }
    count = math.prod(len(set(values)) or 1 for values in told.values())
    if count > CASES_MAX:
        raise BadRequest(f"{count} cases are more than {CASES_MAX}: name fewer values.")
    return [word for name, values in told.items() if values for word in (name, ",".join(map(str, values)))]


async def _run(arguments: Sequence[str], folder: str) -> bytes:
    """What the command prints. Raises BadRequest with its message, or Overload if it takes too long."""
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _LAUNCH, str(os.getpid()), *arguments),
        cwd=folder,
        env=environment | {"HOME": folder},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        # Its own limit is on computing; a busy machine gives it little of that.
        async with asyncio.timeout(4 * SECONDS_MAX):
            printed, said = await process.communicate()
    except TimeoutError:
        raise Overload("The simulation took too long and was ended.", retry_after_s=60.0) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode == 0:
        return printed
    if process.returncode is not None and process.returncode < 0:
        raise BadRequest(f"The simulation took more than {SECONDS_MAX} s and was ended. Compare fewer cases.")
    words = said.decode("utf-8", "replace").replace(folder, "").strip()[-_SAID_MAX:]
    raise BadRequest(f"It cannot be simulated: {words}")


def _is_answered(record: Record) -> bool:
    return record.state == "done" and record.status is not None and 200 <= record.status < 300


def _csv(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([ACTIVITY_COLUMNS, *rows])
    return text.getvalue()


def _write_all(texts: Mapping[Path, str]) -> None:
    for path, text in texts.items():
        path.write_text(text, "utf-8")


def _last_rows(path: Path) -> list[list[str]]:
    """The last rows of a recording that are whole. Blocks."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TRACE_BYTES_MAX))
        # The first line is the head, or half a row.
        lines = file.read(TRACE_BYTES_MAX).decode("utf-8", "replace").splitlines()[1:]
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: str) -> list[str] | None:
    """The row that a line is; None if it is none, or torn. Each is read alone, so that one hides no other."""
    try:
        (row,) = csv.reader([line])
        is_whole = len(row) == len(ACTIVITY_COLUMNS) and math.isfinite(float(row[0]))
    except (csv.Error, ValueError):
        return None
    return row if is_whole else None
