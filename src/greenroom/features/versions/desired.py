"""The desired state: one small file that says which weights all replicas of a model shall serve.

Owns the format of the file, and that a reader sees a whole state or none: it is written beside and then renamed. The
trainer writes it and gateways follow it, so this needs only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from typing import Any, Final

from greenroom.base.plain_file import read_plain, sync_folder

FORMAT: Final = 1
BYTES_MAX: Final = 64 * 1024
# Larger whole numbers lose digits in JSON, and no trainer reads them.
NUMBER_MAX: Final = 2**53 - 1


@dataclass(frozen=True, slots=True)
class DesiredState:
    """`number` grows with each state: older and equal ones change nothing. It is also the least number of the version.
    `model` is None where only one model is under version control, or one is the default. With `rollback`, weights that
    a replica keeps of this repository and commit (`revision`) are served again instead of fetched."""

    number: int
    repo_id: str
    revision: str | None = None
    model: str | None = None
    allow_gap: bool = False
    rollback: bool = False


def read_state(path: str) -> DesiredState | None:
    """The state in the file; None if there is no file. Blocks. Raises OSError, or ValueError if it is half written."""
    try:
        content = read_plain(path, BYTES_MAX)
    except FileNotFoundError:
        return None
    try:
        said = json.loads(content)
        # Half a character can be written as JSON, and nowhere else.
        json.dumps(said, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no whole JSON ({error})") from None
    return _state(said)


def write_state(path: str, state: DesiredState) -> None:
    """Replace the file durably and atomically. Blocks. Raises OSError, or ValueError for a state that no reader would
    take, and then nothing has changed."""
    folder, name = os.path.split(os.path.abspath(path))
    said = {
        "format": FORMAT,
        "model_version": state.number,
        "model_repo_id": state.repo_id,
        "revision": state.revision,
        "model": state.model,
        "allow_gap": state.allow_gap,
        "rollback": state.rollback,
    }
    content = json.dumps(said, ensure_ascii=False).encode()
    if len(content) >= BYTES_MAX:
        raise ValueError(f"a state has less than {BYTES_MAX:,} bytes")
    _state(said)
    fresh_fd, fresh_path = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
    try:
        with open(fresh_fd, "wb") as file:
            file.write(content + b"\n")
            # It holds no secret, and replicas may run as other users.
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        _replace(fresh_path, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh_path)
        raise
    # From here on it counts. Some shared volumes cannot make a name durable.
    with contextlib.suppress(OSError):
        sync_folder(folder)


def _replace(fresh_path: str, path: str) -> None:
    """Rename it. Raises OSError, and then nothing has changed."""
    try:
        os.replace(fresh_path, path)
    except FileNotFoundError:
        # A shared volume whose answer was lost asks again, and finds it renamed already.
        if os.path.lexists(fresh_path) or not os.path.lexists(path):
            raise


def _state(said: Any) -> DesiredState:
    """Raises ValueError for anything that is not a state of this format."""
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ValueError(f"it is no state of format {FORMAT}")
    number, repo_id = said.get("model_version"), said.get("model_repo_id")
    if type(number) is not int or not 1 <= number <= NUMBER_MAX:
        raise ValueError("model_version must be a whole number of at least 1")
    if not isinstance(repo_id, str) or not repo_id:
        raise ValueError("model_repo_id must be a repository or a path")
    revision, model = said.get("revision"), said.get("model")
    if not all(one is None or (isinstance(one, str) and one) for one in (revision, model)):
        raise ValueError("revision and model must be texts or null")
    allow_gap, rollback = said.get("allow_gap", False), said.get("rollback", False)
    if not (isinstance(allow_gap, bool) and isinstance(rollback, bool)):
        raise ValueError("allow_gap and rollback must be true or false")
    return DesiredState(number, repo_id, revision, model, allow_gap, rollback)
