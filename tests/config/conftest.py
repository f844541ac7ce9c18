"""A file in a folder of its own, and the two things tests ask of it: what it loads to, or what is wrong with it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from greenroom.config.loader import load
from greenroom.config.schema import Config
from greenroom.errors import ConfigError

Loads = Callable[..., Config]
Complaints = Callable[..., list[str]]


@pytest.fixture
def loads(tmp_path: Path) -> Loads:
    def loads(text: str, environ: Mapping[str, str] | None = None) -> Config:
        file = tmp_path / "my.yaml"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return load(file, environ or {}).config

    return loads


@pytest.fixture
def complaints(loads: Loads, tmp_path: Path) -> Complaints:
    def complaints(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
        """The lines of the refusal, each without the folder: `my.yaml:3: …`."""
        with pytest.raises(ConfigError) as refused:
            loads(text, environ)
        return refused.value.message.replace(f"{tmp_path}/", "").splitlines()

    return complaints
