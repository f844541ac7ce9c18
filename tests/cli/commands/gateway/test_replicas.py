"""`greenroom replicas`: what it refuses before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.command import Cli
from tests.standins import fake_gpu


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\nmodels: {{}}\n")
    return file


def test_ports_must_be_there(config: Path, cli: Cli) -> None:
    assert "no 2 ports from 65535" in cli("replicas", "2", "--first-port", "65535", "--config", config, status=1).err


def test_files_that_all_would_write_are_refused(config: Path, cli: Cli) -> None:
    config.write_text(config.read_text() + "server: {record_events: events.jsonl}\n")
    assert (
        "server.record_events: replicas cannot write one file together"
        in cli("replicas", "2", "--config", config, status=1).err
    )


def test_gpus_are_shared_by_a_store_or_not_at_all(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    gpus = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-aaaa", 10_000))
    config.write_text(config.read_text() + f"memory: {{probe: file, file: {gpus}}}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "leases.store" in cli("replicas", "2", "--config", config, status=1).err
    assert not os.path.exists(tmp_path / "state-replicas")
