from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.commands import gpus
from tests.cli.command import Cli, in_terminal
from tests.cli.fake_gateway import FakeGateway, answer
from tests.standins import fake_gpu


def gpu(**facts: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "id": "GPU-a",
        "index": 0,
        "name": "NVIDIA H200",
        "total_mib": 143_000,
        "used_mib": 21_000,
        "foreign_mib": 500,
        "free_mib": 121_000,
        "utilisation": 37,
        "temperature_c": 61,
        "holders": [
            {"slot": "s1", "model": "llm", "lease": None, "claim_mib": 20_000, "seen_mib": 20_100},
            {"slot": "s2", "model": None, "lease": "train", "claim_mib": 400, "seen_mib": None},
        ],
        "strangers": [{"pid": 13, "name": "gimp", "used_mib": 500}],
    }
    return plain | facts


def seen(*shown: dict[str, Any], **probe: Any) -> dict[str, Any]:
    said = {"kind": "nvml", "looked_s_ago": 0.2, "failure": None, "pids_visible": True} | probe
    host = {"total_mib": 64_000, "available_mib": 32_000, "shm_total_mib": 1, "shm_free_mib": 1}
    return {"probe": said, "gpus": list(shown), "host": host}


def test_a_pipe_gets_one_stable_line_for_each_gpu(gateway: FakeGateway, cli: Cli) -> None:
    bare = gpu(index=1, name="T4", utilisation=None, temperature_c=None, holders=[], strangers=[])
    gateway.on("GET", "/api/v1/gpus", answer(seen(gpu(), bare)))
    out, err = cli("gpus")
    assert err == ""
    assert out.splitlines() == [
        "GPU   USED_MIB  TOTAL_MIB  FREE_MIB  BUSY  TEMP  NAME         WHO",
        "gpu0  21000     143000     121000    37%   61C   NVIDIA_H200  llm 20100; lease train 400; gimp (pid 13) 500",
        "gpu1  21000     143000     121000    -     -     T4           -",
    ]


def test_a_terminal_gets_a_drawn_table_and_a_summary(gateway: FakeGateway) -> None:
    """In a real terminal, where a stranger's name cannot send it commands."""
    strangers = [{"pid": 13, "name": "evil\x1b[2J[bold]", "used_mib": 500}]
    gateway.on("GET", "/api/v1/gpus", answer(seen(gpu(holders=[], strangers=strangers))))
    shown = in_terminal(["gpus", "--url", gateway.url])
    assert "NVIDIA_H200" in shown and "32,000 of 64,000 MiB available" in shown
    assert "\x1b[2J" not in shown and "[bold]" in shown


@pytest.mark.parametrize("options", [[], ["--watch"]])
def test_figures_that_are_old_or_guessed_are_said_to_be_in_a_pipe_too(
    options: list[str], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def nap(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", nap)
    stale = seen(gpu(), failure="the driver is gone", looked_s_ago=42, pids_visible=False)
    gateway.on("GET", "/api/v1/gpus", answer(stale))
    out, err = cli("gpus", *options, status=130 if options else 0)
    assert "NVIDIA_H200" in out and err == "these figures are 42s old: the driver is gone\n"
    assert "processes cannot be seen" in "\n".join(gpus.summary(stale))


def test_a_machine_without_gpus_says_so_and_why(gateway: FakeGateway, tmp_path: Path, cli: Cli) -> None:
    gateway.on("GET", "/api/v1/gpus", answer(seen(kind="none")))
    assert cli("gpus") == ("", "no GPUs are used here (probe: none)\n")
    config = tmp_path / "greenroom.yaml"
    config.write_text("memory: {probe: none}\n")
    assert cli("gpus", "--local", "--config", config) == (
        "",
        "no GPUs are used here (probe: none): memory.probe is none\n",
    )


def test_without_a_gateway_the_machine_itself_is_looked_at(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 24_000, 500))
    assert fake_gpu.take(file, 1_000)
    config = tmp_path / "greenroom.yaml"
    config.write_text(f"memory: {{probe: file, file: {file}}}\n")
    shown = cli("gpus", "--local", "--config", config, "--json").json
    (one,) = shown["gpus"]
    assert (one["id"], one["used_mib"], one["free_mib"]) == ("GPU-a", 1_500, 22_500)
    assert [stranger["used_mib"] for stranger in one["strangers"]] == [1_000]
    assert gpus.rows(shown)[0][:4] == ("gpu0", "1500", "24000", "22500")


def test_a_probe_that_does_not_work_is_said_in_one_line(tmp_path: Path, cli: Cli) -> None:
    config = tmp_path / "greenroom.yaml"
    config.write_text("memory: {probe: file, file: none.json}\n")
    assert "none.json does not describe GPUs" in cli("gpus", "--local", "--config", config, status=1).err


def test_without_a_gateway_it_is_told_how_to_look_all_the_same(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_URL", "http://127.0.0.1:1")
    assert "--local" in cli("gpus", status=3).err
