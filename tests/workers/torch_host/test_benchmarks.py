"""The benchmarks that import torch can be imported; tests/test_benchmarks.py has the others."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("name", ["benchmarks.rig.gpu_worker", "benchmarks.hosted.probe_decode"])
def test_benchmark_of_the_worker_can_be_imported(name: str) -> None:
    assert callable(importlib.import_module(name).main)
