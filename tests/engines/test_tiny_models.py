"""The tiny models themselves: made once and whole, even by several processes at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from greenroom.engines.estimates.gguf_header import read_header
from tests import models
from tests.samples import tiny_llm

from .llamacpp_worker import worker


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_model_is_made_once(cache: Path) -> None:
    first = models.tiny("alpha")
    made = first.stat().st_mtime_ns
    assert cache in first.parents
    assert models.tiny("alpha") == first
    assert first.stat().st_mtime_ns == made


def test_models_that_differ_have_files_of_their_own(cache: Path) -> None:
    made = {models.tiny("alpha"), models.tiny("bravo"), models.tiny("alpha", loop=True), models.tiny("alpha", layers=1)}
    assert len(made) == 4
    assert read_header(models.tiny("bravo")).name == "bravo"


def test_many_makers_at_once_leave_one_whole_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makers = 4
    together = threading.Barrier(makers)
    make = tiny_llm.make_gguf

    def slow(path: Path, name: str, **shape: Any) -> None:
        together.wait(30)
        make(path, name, **shape)
        together.wait(30)

    monkeypatch.setattr(tiny_llm, "make_gguf", slow)
    threads = [threading.Thread(target=models.tiny, args=("alpha",)) for _ in range(makers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    path = models.tiny("alpha")
    assert read_header(path).name == "alpha"
    assert [left.name for left in path.parent.iterdir()] == [path.name]


def test_a_larger_model_keeps_to_its_script() -> None:
    with worker(models.tiny("large", hidden=512, layers=4)) as engine:
        _, answer = engine.ask("/v1/completions", {"prompt": "hi", "temperature": 1})
        assert answer["choices"][0]["text"] == " large says hello"


def test_noise_says_something_unscripted() -> None:
    with worker(models.tiny("static", noise=True)) as engine:
        body = {"prompt": "hi", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        _, answer = engine.ask("/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 8
        assert not answer["choices"][0]["text"].startswith(" static says")
