"""The benchmarks that import torch keep up with the worker; tests/benchmarks/test_benchmarks.py has the others."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

pytestmark = pytest.mark.slow

TINY = "--layers 1 --hidden 32 --intermediate 64 --heads 2 --kv-heads 1 --vocabulary 100 --prompt 8 --steps 4"


@pytest.mark.parametrize("name", ["rig.gpu_worker", "hosted.spread"])
def test_what_needs_a_gpu_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_decode_probe_finishes_every_section(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = importlib.import_module("benchmarks.hosted.probe_decode")
    monkeypatch.setattr(sys, "argv", ["probe_decode", *TINY.split(), "--batches", "1", "2", "--device", "cpu"])
    with torch.no_grad():
        probe.main()
    output = capsys.readouterr().out
    assert "Traceback" not in output
    assert json.loads(output.splitlines()[-1])["met"]
