"""The worker as its gateway sees it: a real process, real sockets, tiny models on the CPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.torch_host.samples import tiny
from tests.workers.torch_host.worker_rig import PROGRAM, WorkerRig

pytestmark = pytest.mark.slow

CYCLES = 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "one": tiny.make_model(folder / "one", "llama", seed=1),
        "two": tiny.make_model(folder / "two", "qwen3", seed=2, shards=2),
        "vectors": tiny.make_model(folder / "vectors", "bert", seed=3),
    }


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerRig]:
    with rig_folder() as folder:
        made = WorkerRig(folder)
        yield made
        made.end()


class rig_folder:  # noqa: N801
    """A folder with a short name: that of a Unix socket has about a hundred letters at most."""

    def __enter__(self) -> Path:
        self.folder = Path(tempfile.mkdtemp(prefix="gr-"))
        return self.folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def memory() -> Iterator[int]:
    made = os.memfd_create("greenroom-arena")
    yield made
    os.close(made)


@pytest.fixture
def opened(worker: WorkerRig, models: dict[str, Path], memory: int) -> Iterator[WorkerRig]:
    """The worker with the first model open in a slot `a`."""
    heard = worker.open("a", models["one"], memory)
    assert heard["ok"], heard
    yield worker
    worker.answer(worker.ask("close", slot="a"))


def mapped(worker: WorkerRig) -> int:
    lines = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
    return sum("greenroom-arena" in line for line in lines)


def descriptors(worker: WorkerRig) -> int:
    return len(os.listdir(f"/proc/{worker.process.pid}/fd"))


def test_it_says_what_it_is(worker: WorkerRig) -> None:
    heard = worker.do("hello")
    assert heard["pid"] == worker.process.pid
    assert heard["device"] == "cpu"
    assert re.match(r"2\.\d+", heard["torch"])
    assert re.match(r"5\.\d+", heard["transformers"])
    assert worker.path.stat().st_mode & 0o077 == 0


def test_a_model_is_opened_asleep_with_its_figures(worker: WorkerRig, models: dict[str, Path], memory: int) -> None:
    worker.progress.clear()
    heard = worker.open("a", models["one"], memory)
    weights = (models["one"] / "model.safetensors").stat().st_size
    assert heard["arena_bytes"] == os.fstat(memory).st_blocks * 512 >= weights * 0.9
    assert heard["read_bytes"] <= weights
    assert heard["kv_bytes"] > 0
    assert worker.progress[-1] == 1.0
    looked = worker.do("look")["slots"]["a"]
    assert (looked["tier"], looked["device_bytes"], looked["in_flight"]) == ("asleep", 0, 0)
    assert looked["host_bytes"] == heard["arena_bytes"]
    worker.do("close", slot="a")


def test_the_answer_is_the_same_after_a_sleep(opened: WorkerRig) -> None:
    woken = opened.do("wake", slot="a")
    # On a CPU the weights are computed with where they lie: nothing is copied.
    assert (woken["bytes"], woken["expected_s"]) == (0, 0.0)
    first = opened.complete("a")
    slept = opened.do("sleep", slot="a")
    assert slept["seconds"] >= 0
    assert opened.do("look")["slots"]["a"]["device_bytes"] == 0
    opened.do("wake", slot="a")
    assert opened.complete("a") == first
    assert opened.do("look")["slots"]["a"]["wakes"] == 2


def test_waking_and_sleeping_twice_change_nothing(opened: WorkerRig) -> None:
    opened.do("sleep", slot="a")
    opened.do("wake", slot="a")
    first = opened.complete("a")
    opened.do("wake", slot="a")
    assert opened.complete("a") == first
    opened.do("sleep", slot="a")
    opened.do("sleep", slot="a")
    assert opened.do("look")["slots"]["a"]["tier"] == "asleep"


def test_a_chat_is_answered_by_the_slots_own_name(opened: WorkerRig) -> None:
    opened.do("wake", slot="a")
    body = {"model": "a", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    status, found = opened.post("a", "/v1/chat/completions", body)
    assert (status, found["model"], found["usage"]["completion_tokens"] <= 4) == (200, "model-a", True)


def test_a_closed_slot_leaves_only_its_gateways_memory(worker: WorkerRig, models: dict[str, Path], memory: int) -> None:
    worker.open("a", models["one"], memory)
    worker.do("wake", slot="a")
    first = worker.complete("a")
    assert mapped(worker) == 1
    worker.do("close", slot="a")
    assert mapped(worker) == 0
    assert not worker.socket("a").exists()
    assert worker.answer(worker.ask("wake", slot="a"))["kind"] == "unknown_slot"
    # The gateway still holds it: it can be opened again without reading.
    assert worker.open("a", models["one"], memory, filled=True)["read_bytes"] == 0
    worker.do("wake", slot="a")
    assert worker.complete("a") == first
    worker.do("close", slot="a")


def test_opening_and_closing_for_long_leaks_nothing(worker: WorkerRig, models: dict[str, Path], memory: int) -> None:
    seen: list[tuple[int, int]] = []
    for _ in range(CYCLES):
        assert worker.open("a", models["one"], memory)["ok"]
        worker.do("wake", slot="a")
        worker.complete("a", tokens=2)
        worker.do("close", slot="a")
        seen.append((descriptors(worker), mapped(worker)))
    assert seen[-1] == seen[1]


def test_a_spoilt_model_is_refused_and_leaves_nothing(
    worker: WorkerRig, models: dict[str, Path], memory: int, tmp_path: Path
) -> None:
    spoilt = shutil.copytree(models["one"], tmp_path / "spoilt")
    os.truncate(spoilt / "model.safetensors", 200_000)
    # It answers once it has started as a whole; until then files are still being opened.
    worker.do("hello")
    before = descriptors(worker)
    heard = worker.open("a", spoilt, memory)
    assert (heard["ok"], heard["kind"]) == (False, "bad_model")
    assert "is cut off" in heard["message"]
    assert (os.fstat(memory).st_size, descriptors(worker), mapped(worker)) == (0, before, 0)
    assert not worker.socket("a").exists()


def test_a_model_without_a_tokenizer_is_refused_and_leaves_nothing(
    worker: WorkerRig, models: dict[str, Path], memory: int, tmp_path: Path
) -> None:
    spoilt = shutil.copytree(models["one"], tmp_path / "spoilt")
    for path in spoilt.glob("tokenizer*"):
        path.unlink()
    heard = worker.open("a", spoilt, memory)
    assert (heard["ok"], heard["kind"]) == (False, "bad_model")
    assert (os.fstat(memory).st_size, mapped(worker)) == (0, 0)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"arena_max_bytes": 1000}, "out_of_memory", "1,000 are allowed"),
        ({"host_free_bytes": 1000}, "out_of_memory", "1,000 are free"),
        ({"device": "cuda"}, "bad_model", "is to run on a GPU"),
        ({"device": "abacus"}, "failed", "'abacus' is not known"),
        ({"dtype": "int3"}, "bad_model", "dtype 'int3' is not known"),
        ({"context": 0}, "failed", "context must be a number above zero"),
        ({"embedding": "yes"}, "failed", "embedding must be of kind bool"),
    ],
)
def test_options_that_cannot_be_are_refused(
    worker: WorkerRig, models: dict[str, Path], memory: int, options: dict[str, Any], kind: str, says: str
) -> None:
    heard = worker.open("a", models["one"], memory, **options)
    assert (heard["ok"], heard["kind"]) == (False, kind)
    assert says in heard["message"]
    assert mapped(worker) == 0


def test_a_context_beyond_the_models_positions_is_cut(worker: WorkerRig, models: dict[str, Path], memory: int) -> None:
    worker.open("a", models["one"], memory, context=1_000_000, cache_tokens=2048)
    worker.do("wake", slot="a")
    # Every byte of it is a token of its own: too long by one.
    body = {"model": "a", "prompt": "\0" * tiny.CONTEXT, "max_tokens": 1}
    status, found = worker.post("a", "/v1/completions", body)
    assert status == 400, found
    assert worker.post("a", "/v1/completions", {**body, "prompt": "\0" * (tiny.CONTEXT - 1)})[0] == 200
    worker.do("close", slot="a")


def test_two_call_offs_at_once_leave_a_waking_model_asleep(opened: WorkerRig) -> None:
    asked = [opened.ask(op, slot="a") for op in ("wake", "sleep", "sleep", "wake", "sleep", "sleep")]
    assert all(opened.answer(number)["ok"] for number in asked)
    looked = opened.do("look")["slots"]["a"]
    assert (looked["tier"], looked["device_bytes"], looked["in_flight"]) == ("asleep", 0, 0)
    opened.do("wake", slot="a")
    assert opened.do("look")["slots"]["a"]["device_bytes"] > 0
    assert opened.complete("a")


def test_two_call_offs_at_once_leave_nothing_of_an_open(
    worker: WorkerRig, models: dict[str, Path], memory: int
) -> None:
    opening = worker.begin_open("a", models["one"], memory)
    closing = [worker.ask("close", slot="a") for _ in range(2)]
    assert worker.answer(opening)["ok"] in (True, False), "it may have been done before"
    heard = [worker.answer(number) for number in closing]
    assert heard[0]["ok"]
    assert heard[1]["ok"] or heard[1]["kind"] == "unknown_slot"
    assert mapped(worker) == 0
    assert worker.open("a", models["one"], memory)["ok"]
    worker.do("close", slot="a")


def test_a_second_caller_is_not_heard(worker: WorkerRig) -> None:
    worker.do("hello")
    with pytest.raises(OSError, match="refused"):
        import socket

        socket.socket(socket.AF_UNIX).connect(str(worker.path))


def test_it_ends_with_its_gateway() -> None:
    with rig_folder() as folder:
        alone = WorkerRig(folder)
        assert alone.hang_up() == 0
        assert not alone.path.exists()
        alone.end()


def test_a_python_without_torch_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise ImportError("No module named torch", name="torch")')
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "torch_host.main", "--control", str(tmp_path / "c")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 3
    assert "torch is missing in" in ended.stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("broken", ["not there", "without what is asked of it"])
def test_a_module_of_our_own_that_cannot_be_imported_is_a_traceback_and_no_advice(tmp_path: Path, broken: str) -> None:
    package, fakes = tmp_path / "workers" / "torch_host", tmp_path / "fakes"
    shutil.copytree(PROGRAM.parent, package.parent, ignore=shutil.ignore_patterns("__pycache__"))
    if broken == "not there":
        (package / "control" / "slots.py").unlink()
    else:
        (package / "control" / "slots.py").write_text("from ..engine.requests import nothing_of_this_name")
    # In the place of those that take long to import.
    for name in ("torch", "transformers", "transformers/models", "transformers/models/llama"):
        (fakes / name).mkdir(parents=True)
        (fakes / name / "__init__.py").touch()
    (fakes / "transformers" / "modeling_utils.py").touch()
    (fakes / "transformers" / "models" / "llama" / "modeling_llama.py").touch()
    ended = subprocess.run(
        [sys.executable, str(package.parent / PROGRAM.name), "torch_host.main", "--control", str(tmp_path / "c")],
        env={**os.environ, "PYTHONPATH": str(fakes)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    assert "Traceback" in ended.stderr and "torch_host." in ended.stderr
    assert "pip install" not in ended.stderr
    assert not (tmp_path / "c").exists()
