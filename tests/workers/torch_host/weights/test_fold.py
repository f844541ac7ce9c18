"""Folded weights: the same bits when they are unfolded, whatever they are; and nothing half folded is ever taken."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from greenroom.workers.torch_host.weights import fold as fold_module
from greenroom.workers.torch_host.weights import loading
from greenroom.workers.torch_host.weights.arena import HostArena, lay_out, view_of
from greenroom.workers.torch_host.weights.building import BuildOptions
from greenroom.workers.torch_host.weights.fold import (
    CHUNK_BYTES,
    FOLDED_BYTES_MAX,
    LANDING_CHUNKS,
    NO_NUMPY,
    STEP,
    ChunkTable,
    Fold,
    fold,
)
from greenroom.workers.torch_host.weights.folding import PROCESSES_MAX, Folding, FoldingFailed, FoldSettings
from greenroom.workers.torch_host.weights.loading import TextModel
from greenroom.workers.torch_host.weights.reading import LoadContext
from greenroom.workers.torch_host.weights.upload import Unfolder, landing_index, unfold_plainly, unfolder
from tests.waiting import until_now
from tests.workers.torch_host.samples import tiny

pytestmark = pytest.mark.slow

NUMBERS = 4 * STEP
NEVER = threading.Event()


# On a busy machine folding takes longer, and tests must know which chunks are folded.
PATIENT = FoldSettings(patience_min_s=60.0, kill_s=60.0)


@pytest.fixture(autouse=True)
def able() -> Iterator[None]:
    """No test is the reason that the next folds nothing."""
    yield
    Folding.is_able = True


def folding(descriptor: int, size: int, ranges: list[tuple[int, int]], **settings: Any) -> Folding:
    return Folding(descriptor, size, ranges, replace(PATIENT, **settings))


def weights(count: int = NUMBERS, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return drawn.to(torch.bfloat16).view(torch.int16)


def folded(numbers: torch.Tensor) -> tuple[torch.Tensor, Fold] | None:
    out = np.empty(FOLDED_BYTES_MAX, dtype=np.uint8)
    found = fold(numbers.numpy().view(np.uint16), out)
    return None if found is None else (torch.from_numpy(out[: found.size(numbers.numel())].copy()), found)


def unfolded(numbers: torch.Tensor) -> torch.Tensor:
    made = folded(numbers)
    assert made is not None
    target = torch.full_like(numbers, 21)
    unfold_plainly(made[0], target, made[1])
    return target


@pytest.mark.parametrize("seed", range(3))
def test_weights_take_three_quarters_and_come_back_bit_for_bit(seed: int) -> None:
    numbers = weights(seed=seed)
    made = folded(numbers)
    assert made is not None
    assert made[0].numel() < 0.76 * 2 * numbers.numel()
    assert torch.equal(unfolded(numbers), numbers)


def test_every_number_there_is_comes_back_where_others_are_many() -> None:
    numbers = weights(2**24 // STEP * STEP)
    # Infinities, NaNs with their payload, zeros of both signs, the smallest there are: all of the 16 bits.
    numbers[1 :: numbers.numel() // 2**16][: 2**16] = torch.arange(2**16).sub(2**15).to(torch.int16)
    assert torch.equal(unfolded(numbers), numbers)


def test_zeros_have_a_code_of_their_own() -> None:
    numbers = weights()
    numbers[: NUMBERS // 2] = 0
    numbers[NUMBERS // 2 : NUMBERS // 2 + 100] = -(2**15)
    made = folded(numbers)
    assert made is not None
    assert made[1].odd < NUMBERS // 500
    assert torch.equal(unfolded(numbers), numbers)


@pytest.mark.parametrize("of", ["float16", "float32", "noise", "sparse noise"])
def test_what_would_not_become_smaller_is_left_as_it_is(of: str) -> None:
    numbers = {
        "float16": weights().view(torch.bfloat16).to(torch.float16).view(torch.int16),
        "float32": torch.randn(NUMBERS // 2).view(torch.int16),
        "noise": torch.randint(-(2**15), 2**15, (NUMBERS,)).to(torch.int16),
        "sparse noise": _with_noise(weights(2**24)),
    }[of]
    assert folded(numbers) is None


def _with_noise(numbers: torch.Tensor) -> torch.Tensor:
    """Where no look at some of them finds it."""
    noisy = numbers.clone()
    for step in range(1, 12):
        noisy[step :: fold_module.SAMPLED] = 0x7F01
    return noisy


def test_all_zeros_are_folded() -> None:
    numbers = torch.zeros(NUMBERS, dtype=torch.int16)
    assert torch.equal(unfolded(numbers), numbers)


def test_without_a_gpu_torch_unfolds() -> None:
    assert unfolder(torch.device("cpu")) is unfold_plainly


@pytest.mark.parametrize("whole", range(LANDING_CHUNKS, 12))
def test_nothing_lands_where_something_still_waits_to_be_unfolded(whole: int) -> None:
    """A chunk is brought when the one LANDING_CHUNKS before it has been unfolded, and not before."""
    places = [landing_index(index, whole) if index < whole - LANDING_CHUNKS else index for index in range(whole)]
    for index, place in enumerate(places):
        before = [other for other in range(index) if places[other] == place]
        assert all(other <= index - LANDING_CHUNKS for other in before)
        assert place >= whole - LANDING_CHUNKS


# --- a whole load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["us", "transformers"])
def test_a_model_is_folded_as_it_is_read(
    by: str, tmp_path: Path, descriptor: int, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 16_384, "num_hidden_layers": 3}
    folder = tiny.make_model(tmp_path / "wide", "llama", dtype=torch.bfloat16, **sizes)
    options = BuildOptions(folder, attention="sdpa")
    if by == "transformers":
        tiny.store_oddly(folder)
    with caplog.at_level("INFO"):
        loaded = loading.load(TextModel(options), descriptor, False, LoadContext(folds=True, folding=PATIENT))
    assert ("weights are loaded by Transformers" in caplog.text) == (by == "transformers")
    arena, size = loaded.arena, loaded.arena.layout.bytes
    chunks = arena.chunks
    assert [chunk.fold is not None for chunk in chunks] == [
        index < size // CHUNK_BYTES - 2 for index in range(len(chunks))
    ]
    assert any(chunk.fold for chunk in chunks)
    # As an upload does it: folded chunks land where later ones belong.
    whole = torch.empty(size, dtype=torch.uint8)
    restored = Unfolder(whole, size)
    for chunk in chunks:
        restored.landing(chunk).copy_(arena.tensor[chunk.start : chunk.start + chunk.size])
        restored.unfold(chunk)
    for name, tensor in load_file(folder / "model.safetensors").items():
        place = arena.layout.places.get(name)
        assert place is not None or (by, name) == ("transformers", "lm_head.weight"), "it is tied to another"
        assert place is None or torch.equal(view_of(whole, place), tensor), name


def test_what_could_not_be_folded_is_read_again(tmp_path: Path, descriptor: int) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 1024, "intermediate_size": 16_384, "num_hidden_layers": 3}
    folder = tiny.make_model(tmp_path / "wide", "llama", dtype=torch.bfloat16, **sizes)
    # Its first chunk is folded, and then it is killed.
    program = tmp_path / "falls.py"
    program.write_text(
        "import os, runpy, signal, sys\n"
        f"fold = runpy.run_path({str(fold_module.__file__)!r})\n"
        "sys.path.append(sys.argv[2])\n"
        "import mmap, numpy\n"
        "index = fold['ORDER'].unpack(os.read(0, 4))[0]\n"
        "whole = mmap.mmap(int(sys.argv[3]), int(sys.argv[4]))\n"
        "assert fold['fold_in'](whole, index, numpy.empty(fold['FOLDED_BYTES_MAX'], dtype=numpy.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    built: list[HostArena] = []

    class Load(LoadContext):
        def on_built(self, module: torch.nn.Module, arena: HostArena) -> None:
            built.append(arena)

    context = Load(folds=True, folding=replace(PATIENT, program=program))
    loaded = loading.load(TextModel(BuildOptions(folder, attention="sdpa")), descriptor, False, context)
    assert built == [loaded.arena]
    assert not any(chunk.fold for chunk in loaded.arena.chunks)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(view_of(loaded.arena.tensor, loaded.arena.layout.places[name]), tensor), name


# --- the process ----------------------------------------------------------------------------------------------------


def arena_of(descriptor: int, chunks: float) -> HostArena:
    numbers = int(chunks * CHUNK_BYTES) // 2
    layout = lay_out([("weight", torch.empty(numbers, dtype=torch.bfloat16, device="meta"))])
    return HostArena.create(descriptor, layout, "these", None)


def test_chunks_are_folded_where_they_lie_and_the_rest_is_given_back(descriptor: int) -> None:
    arena = arena_of(descriptor, LANDING_CHUNKS + 2.5)
    size = arena.layout.bytes
    numbers = weights(size // 2)
    # The second has nothing to fold.
    numbers[CHUNK_BYTES // 2 : CHUNK_BYTES] = torch.randint(-(2**15), 2**15, (CHUNK_BYTES // 2,)).to(torch.int16)
    arena.tensor.copy_(numbers.view(torch.uint8))
    at_work = folding(descriptor, size, [(0, CHUNK_BYTES + 10), (CHUNK_BYTES + 10, size - CHUNK_BYTES - 10)])
    at_work.filled(CHUNK_BYTES + 10, size - CHUNK_BYTES - 10)
    at_work.filled(0, CHUNK_BYTES + 10)
    arena.seal(ChunkTable(size, at_work.finish(NEVER)))
    assert arena.held_bytes < size - 0.23 * CHUNK_BYTES
    adopted = HostArena.adopt(descriptor, "these", unfolds=True)
    assert adopted is not None
    chunks = adopted.chunks
    assert chunks == arena.chunks
    assert [chunk.fold is not None for chunk in chunks] == [True, False] + [False] * (LANDING_CHUNKS + 1)
    assert sum(chunk.size for chunk in chunks[1:]) == size - CHUNK_BYTES
    first = chunks[0].fold
    assert first is not None
    target = torch.empty(CHUNK_BYTES // 2, dtype=torch.int16)
    unfold_plainly(adopted.tensor[: chunks[0].size], target, first)
    assert torch.equal(target, numbers[: CHUNK_BYTES // 2])
    assert torch.equal(adopted.tensor[CHUNK_BYTES:], numbers.view(torch.uint8)[CHUNK_BYTES:])
    # A CPU computes with the arena itself.
    assert HostArena.adopt(descriptor, "these", unfolds=False) is None


def test_a_small_arena_starts_no_process(descriptor: int) -> None:
    at_work = folding(descriptor, LANDING_CHUNKS * CHUNK_BYTES, [(0, CHUNK_BYTES)])
    assert not at_work.processes
    at_work.filled(0, CHUNK_BYTES)
    assert at_work.finish(NEVER) == {}
    at_work.stop()


def test_without_numpy_nothing_is_folded(descriptor: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = ModuleSpec("numpy", None, origin=str(tmp_path / "numpy" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    arena = arena_of(descriptor, LANDING_CHUNKS + 1)
    at_work = folding(descriptor, arena.layout.bytes, [(0, CHUNK_BYTES)])
    (process,) = at_work.processes
    process.wait()
    at_work.filled(0, CHUNK_BYTES)
    assert at_work.finish(NEVER) == {}
    assert process.returncode == NO_NUMPY
    assert Folding.is_able


def test_a_process_that_was_killed_costs_the_arena_and_no_other(descriptor: int) -> None:
    arena = arena_of(descriptor, LANDING_CHUNKS + 1)
    at_work = folding(descriptor, arena.layout.bytes, [(0, CHUNK_BYTES)])
    (process,) = at_work.processes
    process.kill()
    process.wait()
    at_work.filled(0, CHUNK_BYTES)
    with pytest.raises(FoldingFailed, match="ended with -9"):
        at_work.finish(NEVER)
    # The next is not folded, and so does not fail.
    again = folding(descriptor, arena.layout.bytes, [(0, CHUNK_BYTES)])
    again.filled(0, CHUNK_BYTES)
    assert again.finish(NEVER) == {}


def test_a_load_does_not_wait_until_all_of_a_model_is_folded(descriptor: int) -> None:
    chunks = 12
    arena = arena_of(descriptor, LANDING_CHUNKS + chunks)
    # None of it is read any more by the time that it is finished.
    impatient = {"patience_min_s": 0.0, "patience_share": 0.0}
    at_work = folding(descriptor, arena.layout.bytes, [(0, arena.layout.bytes)], **impatient)
    (process,) = at_work.processes[:1]
    at_work.filled(0, arena.layout.bytes)
    found = at_work.finish(NEVER)
    assert len(found) < chunks
    assert process.returncode == 0
    arena.seal(ChunkTable(arena.layout.bytes, found))
    assert [chunk.fold for chunk in arena.chunks] == [found.get(index) for index in range(LANDING_CHUNKS + chunks)]


FAST_CREW = """
import os, struct
while order := os.read(0, 4):
    os.write(1, b"%d\\n" % struct.unpack("<I", order))
"""


Crew = Callable[..., Folding]


@pytest.fixture
def crew(tmp_path: Path, descriptor: int) -> Crew:
    """Many processes that run this program; by default one that reports every chunk at once and folds none."""

    def made(chunks: int, program: str = FAST_CREW, **settings: Any) -> Folding:
        file = tmp_path / "program.py"
        file.write_text(program)
        size = (chunks + LANDING_CHUNKS) * CHUNK_BYTES
        return folding(descriptor, size, [(0, chunks * CHUNK_BYTES)], program=file, processors=16, **settings)

    return made


def test_reports_of_many_processes_at_once_are_all_read(crew: Crew) -> None:
    """A chunk that was folded and is not known to be would be taken for weights."""
    chunks = 4_000
    for _ in range(5):
        at_work = crew(chunks)
        assert len(at_work.processes) == PROCESSES_MAX
        at_work.filled(0, chunks * CHUNK_BYTES)
        assert at_work.finish(NEVER) == {}


def test_a_missing_report_of_a_process_fails_the_folding(crew: Crew) -> None:
    at_work = crew(20, "import os\nwhile os.read(0, 4): pass\n")
    at_work.filled(0, 20 * CHUNK_BYTES)
    with pytest.raises(FoldingFailed, match="were told of"):
        at_work.finish(NEVER)


def test_stopping_does_not_wait_for_processes_that_take_no_orders(crew: Crew) -> None:
    chunks = 40_000
    at_work = crew(chunks, "import time\ntime.sleep(600)\n")
    at_work.filled(0, chunks * CHUNK_BYTES)
    processes = at_work.processes
    at_work.stop()
    assert all(process.returncode == -9 for process in processes)


def test_a_load_that_is_called_off_in_the_middle_of_a_chunk_leaves_folding_enabled(crew: Crew) -> None:
    at_work = crew(1, "import os, time\nos.read(0, 4)\ntime.sleep(600)\n")
    at_work.filled(0, CHUNK_BYTES)
    called_off = threading.Event()
    called_off.set()
    with pytest.raises(FoldingFailed, match="ended with -9"):
        at_work.finish(called_off)
    assert Folding.is_able


def test_a_process_that_never_ends_is_ended(crew: Crew, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    program = f"import os, time\nos.read(0, 4)\nopen({str(taken)!r}, 'w').close()\ntime.sleep(600)\n"
    at_work = crew(1, program, chunk_s=0.1, patience_min_s=0.0)
    at_work.filled(0, CHUNK_BYTES)
    until_now(taken.exists)
    with pytest.raises(FoldingFailed, match="ended with -9"):
        at_work.finish(NEVER)


def test_a_chunk_that_is_not_there_ends_the_process_with_an_error(descriptor: int) -> None:
    arena = arena_of(descriptor, LANDING_CHUNKS + 1)
    at_work = folding(descriptor, 2 * arena.layout.bytes, [(0, CHUNK_BYTES)])
    at_work.filled(0, CHUNK_BYTES)
    with pytest.raises(FoldingFailed, match="ended with 1"):
        at_work.finish(NEVER)


def test_it_ends_with_its_worker_in_the_middle_of_a_chunk(descriptor: int) -> None:
    """A later write would hit an arena that the next worker fills."""
    arena_of(descriptor, LANDING_CHUNKS + 20)
    program = (
        "import os, sys, time; from greenroom.workers.torch_host.weights.folding import Folding\n"
        "fd, size = map(int, sys.argv[1:])\n"
        "at_work = Folding(fd, size, [(0, size)]); at_work.filled(0, size)\n"
        "print(*(process.pid for process in at_work.processes), flush=True); time.sleep(60)\n"
    )
    size = os.fstat(descriptor).st_size
    argv = [sys.executable, "-c", program, str(descriptor), str(size)]
    worker = subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=(descriptor,))
    assert worker.stdout is not None
    children = [int(word) for word in worker.stdout.readline().split()]
    assert children
    # By then they have imported what they need, and have not folded everything.
    until_now(lambda: all(_computed_s(child) > 0.2 for child in children))
    worker.kill()
    worker.wait()
    worker.stdout.close()
    until_now(lambda: not any(map(_lives, children)), within_s=30)


def _computed_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _lives(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_stopped_it_leaves_nothing(descriptor: int) -> None:
    arena = arena_of(descriptor, LANDING_CHUNKS + 1)
    before = len(os.listdir("/proc/self/fd"))
    at_work = folding(descriptor, arena.layout.bytes, [(0, CHUNK_BYTES)])
    (process,) = at_work.processes
    at_work.stop()
    assert process.poll() is not None
    at_work.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_python_that_cannot_be_started_folds_nothing(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = arena_of(descriptor, LANDING_CHUNKS + 1)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    at_work = folding(descriptor, arena.layout.bytes, [(0, CHUNK_BYTES)])
    at_work.filled(0, CHUNK_BYTES)
    assert at_work.finish(NEVER) == {}
