"""Benchmarks are run seldom, so these keep them importable, listed, and alike in their first and last lines."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks.rig.result import Run
from benchmarks.rig.traffic import nginx

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2] / "benchmarks"
# These import torch, which is never installed beside the gateway; tests/workers/torch_host tries them.
WITH_TORCH = {"benchmarks.rig.gpu_worker", "benchmarks.hosted.probe_decode", "benchmarks.hosted.spread"}
MODULES = {
    ".".join(("benchmarks", *path.relative_to(ROOT).with_suffix("").parts)): path
    for path in sorted(ROOT.rglob("*.py"))
    if path.name != "__init__.py"
}
BENCHMARKS = {name for name, path in MODULES.items() if 'Run("' in path.read_text()}


@pytest.mark.parametrize("name", sorted(set(MODULES) - WITH_TORCH))
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", sorted(BENCHMARKS - WITH_TORCH))
def test_every_benchmark_tells_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(name).main()
    assert "--save" in capsys.readouterr().out


def test_saved_run_is_kept_with_its_heading_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    for _ in range(2):
        run = Run("some_cost", argparse.Namespace(save=True, commit="abc"), "a card", results=tmp_path)
        sys.stdout.write("round 1\n")
        run.report({"cost_us": 3}, {"cost_us_max": 4}, True)
    first, second = sorted(tmp_path.glob("*some-cost*.txt"))
    command, machine, commit, *_, body, last = first.read_text().splitlines()
    assert command.startswith("$ python") and "a card" in machine and commit == "commit abc" and body == "round 1"
    closing = json.loads(last)
    assert {"bench": "some_cost", "goals": {"cost_us_max": 4}, "met": True}.items() <= closing.items()
    assert closing["figures"] == {"machine": machine, "commit": "abc", "cost_us": 3}
    index = (tmp_path / "README.md").read_text()
    assert first.name in index and second.name in index and index.count("| abc |") == 2
    assert capsys.readouterr().out.count('"bench"') == 2


def test_a_run_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    Run("some_cost", argparse.Namespace(save=True, commit="abc"), results=tmp_path)
    sys.stdout.write("round 1\n")
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_nginx_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(SystemExit, match="nginx is not installed"), nginx(1, 2):
        pass
