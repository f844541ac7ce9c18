"""Changes of a key file at once, on a full disk, and killed in the middle: nothing is lost and nothing is half done."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from greenroom.access.key_file import FileKey, add_key, read_keys, revoke_key
from greenroom.access.keys import new_key
from greenroom.errors import ConfigError
from tests.full_disk import full_disk
from tests.waiting import PATIENCE_S

NOW = datetime(2026, 11, 17, tzinfo=UTC)


def key(name: str) -> FileKey:
    return FileKey(name=name, sha256=new_key()[1], created=NOW)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    add_key(path, key("first"))
    return path


def names(file: Path) -> list[str]:
    return [one.name for one in read_keys(file)]


def test_the_file_is_made_for_its_owner_alone(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {one.name for one in file.parent.iterdir()} == {"keys.json", "keys.json.lock"}
    assert names(file) == ["first"]


def test_a_revoked_key_stays_and_its_name_is_no_others(file: Path) -> None:
    assert revoke_key(file, "first", NOW).revoked == NOW
    later = NOW.replace(year=2027)
    assert revoke_key(file, "first", later).revoked == NOW
    with pytest.raises(ConfigError, match="a key first already"):
        add_key(file, key("first"))
    with pytest.raises(ConfigError, match="has no key other"):
        revoke_key(file, "other", NOW)
    assert names(file) == ["first"]


@pytest.mark.slow
@pytest.mark.parametrize("race", ["at_once", "killed"])
def test_commands_at_once_lose_nothing_though_killed_at_any_moment(file: Path, race: str) -> None:
    """In a process without threads, which may fork."""
    command = [sys.executable, "-m", "tests.access.key_races", race, str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert {one.name for one in file.parent.iterdir()} == {"keys.json", "keys.json.lock"}


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_full_disk_leaves_the_old_file(file: Path, share: float) -> None:
    for number in range(5):
        add_key(file, key(f"k{number}"))
    before = file.read_bytes()
    with full_disk(int(len(before) * share)), pytest.raises(ConfigError, match="cannot be written"):
        add_key(file, key("more"))
    with full_disk(int(len(before) * share)), pytest.raises(ConfigError, match="cannot be written"):
        revoke_key(file, "k3", NOW)
    assert file.read_bytes() == before
    assert not Path(f"{file}.new").exists()
    revoke_key(file, "k3", NOW)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end_leaves_the_old_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        if call == "replace":
            patched.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match="No space left"):
            add_key(file, key("more"))
    assert file.read_bytes() == before
    assert not Path(f"{file}.new").exists()


def test_a_file_with_a_padded_name_is_to_be_mended_first(file: Path) -> None:
    wrong = file.read_bytes().replace(b'"first"', b'"first "')
    file.write_bytes(wrong)
    with pytest.raises(
        ConfigError, match=r"line 2: keys\[0\]\.name: may not begin .* mend it by hand, then repeat this"
    ):
        revoke_key(file, "first", NOW)
    assert file.read_bytes() == wrong


def test_what_is_broken_or_open_to_others_is_not_overwritten(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match="cut short"):
        add_key(file, key("more"))
    assert file.read_bytes() == whole[:-9]
    file.write_bytes(whole)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        revoke_key(file, "first", NOW)
    assert file.read_bytes() == whole


def test_links_and_modes_stay(file: Path, tmp_path: Path) -> None:
    file.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    add_key(link, key("more"))
    assert link.is_symlink() and names(file) == ["first", "more"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_file_made_beforehand_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.touch(0o600)
    add_key(path, key("a"))
    assert names(path) == ["a"]


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        add_key(tmp_path / "none" / "keys.json", key("a"))
