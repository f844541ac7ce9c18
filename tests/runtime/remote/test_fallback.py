"""The switch for fallbacks to remote models: seeded, kept, and off where what was kept cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.errors import ConfigError, ConfigNotKept
from greenroom.runtime.remote.fallback import FILE_NAME, VARIABLE, CloudFallback

pytestmark = pytest.mark.asyncio


def opened(folder: Path, said: str | None = None) -> CloudFallback:
    fallback = CloudFallback(folder, {} if said is None else {VARIABLE: said})
    fallback.open()
    return fallback


@pytest.mark.parametrize(
    ("said", "is_allowed"), [(None, True), ("", True), ("true", True), ("False", False), ("0", False), (" off ", False)]
)
async def test_the_environment_says_it_first(tmp_path: Path, said: str | None, is_allowed: bool) -> None:
    assert opened(tmp_path, said).is_allowed is is_allowed


async def test_a_word_that_says_neither_prevents_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="true or false"):
        opened(tmp_path, "flase")


async def test_what_was_set_outlasts_a_restart_and_the_environment(tmp_path: Path) -> None:
    await opened(tmp_path).set(False)
    assert opened(tmp_path, "true").is_allowed is False
    await opened(tmp_path).set(True)
    assert opened(tmp_path, "false").is_allowed is True


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"allowCloudFallback": "yes"}', '{"allowCloudFallback": 1}', "[" * 9999]
)
async def test_a_broken_file_forbids(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    fallback = opened(tmp_path, "true")
    assert fallback.is_allowed is False
    await fallback.set(True)
    assert opened(tmp_path).is_allowed is True


async def test_what_cannot_be_kept_does_not_change(tmp_path: Path) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    fallback = CloudFallback(tmp_path, {}, write=full)
    with pytest.raises(ConfigNotKept, match="No space left"):
        await fallback.set(False)
    assert fallback.is_allowed is True
