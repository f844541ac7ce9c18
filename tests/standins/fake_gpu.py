"""GPUs without hardware: a file that describes them, and processes that take their memory. Standard library only.

The other side of `memory.probe: file`. Taking memory is exclusive, and fails when there is not enough of it, so that
two programs that start at once meet what they would meet on a real GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from typing import Any

_DEAD_STATES = ("Z", "X", "x")


def describe(path: pathlib.Path, *gpus: dict[str, Any], **more: Any) -> pathlib.Path:
    """Write the file; again to change it."""
    _write(path, {"gpus": list(gpus), **more})
    return path


def gpu(uuid: str, memory_mib: int, foreign_mib: int = 0, **more: Any) -> dict[str, Any]:
    return {"uuid": uuid, "name": "fake", "memory_mib": memory_mib, "foreign_mib": foreign_mib, **more}


def take(path: str | pathlib.Path, mib: int, pid: int | None = None) -> bool:
    """Use so much from now on, shared evenly by the GPUs this process may see. False, and nothing, if it is too much.

    Another process can be named; its memory counts for as long as that one lives.
    """
    file = pathlib.Path(path)
    folder = file.with_name(file.name + ".d")
    folder.mkdir(exist_ok=True)
    lock_fd = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        capacity = {gpu["uuid"]: gpu["memory_mib"] - gpu["foreign_mib"] for gpu in json.loads(file.read_text())["gpus"]}
        own = str(pid or os.getpid())
        seen = _visible(list(capacity))
        wanted = {uuid: mib // len(seen) for uuid in seen}
        if any(wanted[uuid] + _used_by_others(folder, own, uuid) > capacity[uuid] for uuid in seen):
            return False
        _write(folder / own, wanted)
        return True
    finally:
        os.close(lock_fd)


def leave(path: str | pathlib.Path) -> None:
    """Give back what this process took, before it ends."""
    file = pathlib.Path(path)
    (file.with_name(file.name + ".d") / str(os.getpid())).unlink(missing_ok=True)


def _visible(uuids: list[str]) -> list[str]:
    """The first GPU where nothing is said, as programs do that know of one only."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return uuids[:1] if said is None else [uuid for uuid in said.split(",") if uuid in uuids]


def _used_by_others(folder: pathlib.Path, own: str, uuid: str) -> int:
    others = [name for name in os.listdir(folder) if name.isdigit() and name != own and _lives(name)]
    return sum(json.loads((folder / name).read_text()).get(uuid, 0) for name in others)


def _lives(pid: str) -> bool:
    try:
        stat = pathlib.Path("/proc", pid, "stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in _DEAD_STATES


def _write(path: pathlib.Path, value: object) -> None:
    """Whole or not at all: it is read at any moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(value))
    os.replace(draft, path)
