"""`greenroom replicas`: what it refuses before anything is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.cli.main import main
from tests.standins import fake_gpu


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"state_dir: {tmp_path}/state\nmodels: {{}}\n")
    return file


@pytest.mark.parametrize("count", ["0", "two", "65", "-1"])
def test_what_is_no_number_is_told(config: Path, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replicas", count, "--config", str(config)])
    assert "usage: greenroom replicas" in capsys.readouterr().err


def test_ports_must_be_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replicas", "2", "--first-port", "65535", "--config", str(config)]) == 1
    assert "no 2 ports from 65535" in capsys.readouterr().err


def test_files_that_all_would_write_are_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(config.read_text() + "server: {record_events: events.jsonl}\n")
    assert main(["replicas", "2", "--config", str(config)]) == 1
    assert "server.record_events: replicas cannot write one file together" in capsys.readouterr().err


def test_gpus_are_shared_by_a_store_or_not_at_all(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-aaaa", 10_000))
    config.write_text(config.read_text() + f"memory: {{probe: file, file: {gpus}}}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["replicas", "2", "--config", str(config)]) == 1
    assert "leases.store" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "state-replicas")
