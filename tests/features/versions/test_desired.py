"""The file of the desired state: whole or not at all, whatever lies there."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from greenroom.features.versions.desired import BYTES_MAX, DesiredState, read_state, write_state
from tests.full_disk import full_disk

GOOD = {"format": 1, "model_version": 3, "model_repo_id": "org/a"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert read_state(str(path)) is None
    for state in (DesiredState(1, "org/a"), DesiredState(2, "org/b", "main", "m", allow_gap=True, rollback=True)):
        write_state(str(path), state)
        assert read_state(str(path)) == state
    assert os.listdir(tmp_path) == ["state.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_full_disk_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    write_state(path, DesiredState(1, "org/a"))
    with full_disk(5), pytest.raises(OSError):
        write_state(path, DesiredState(2, "org/b"))
    assert read_state(path) == DesiredState(1, "org/a") and os.listdir(tmp_path) == ["state.json"]


def test_a_rename_that_is_done_and_said_to_have_failed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where the answer to a rename is lost and the second try finds nothing to rename."""
    path, rename = str(tmp_path / "state.json"), os.replace

    def rename_twice(old: str, new: str) -> None:
        rename(old, new)
        rename(old, new)

    monkeypatch.setattr(os, "replace", rename_twice)
    write_state(path, DesiredState(1, "org/a"))
    assert read_state(path) == DesiredState(1, "org/a") and os.listdir(tmp_path) == ["state.json"]


def test_a_volume_that_cannot_rename_leaves_the_state_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "state.json")
    write_state(path, DesiredState(1, "org/a"))

    def refuse(old: str, new: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        write_state(path, DesiredState(2, "org/b"))
    assert read_state(path) == DesiredState(1, "org/a") and os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize("bytes_kept", [0, 1, 20, -2])
def test_half_a_state_is_none(tmp_path: Path, bytes_kept: int) -> None:
    path = tmp_path / "state.json"
    write_state(str(path), DesiredState(1, "org/a"))
    path.write_bytes(path.read_bytes()[:bytes_kept])
    with pytest.raises(ValueError):
        read_state(str(path))


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": 2},
        {"model_version": 0},
        {"model_version": "3"},
        {"model_version": True},
        {"model_version": 2**60},
        {"model_repo_id": ""},
        {"model_repo_id": 5},
        {"model_repo_id": "\ud800"},
        {"revision": ""},
        {"model": ["m"]},
        {"rollback": 1},
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(GOOD))
    assert read_state(str(path)) == DesiredState(3, "org/a")
    path.write_text(json.dumps({**GOOD, **wrong}))
    with pytest.raises(ValueError):
        read_state(str(path))


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("[" * BYTES_MAX)
    with pytest.raises(ValueError):
        read_state(str(path))


def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.json")
    with pytest.raises(ValueError):
        read_state(str(tmp_path / "state.json"))


def test_a_file_that_is_too_large_or_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in (" " * (BYTES_MAX + 1), "[]", "\udcff"):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ValueError):
            read_state(str(path))
