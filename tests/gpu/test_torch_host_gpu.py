"""The torch worker's memory on a real GPU: addresses that stay, memory that is really back, weights that are the same.

Needs torch with CUDA, transformers and nvidia-ml-py in the Python that runs it; prints what it measures:
`PYTHONPATH=src:. python -m pytest -c /dev/null -s tests/gpu/test_torch_host_gpu.py`
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.workers.torch_host.failures import OutOfMemory
from greenroom.workers.torch_host.weights import building
from greenroom.workers.torch_host.weights.arena import HostArena, lay_out
from greenroom.workers.torch_host.weights.building import BuildOptions
from greenroom.workers.torch_host.weights.device_memory import CudaArena, driver
from greenroom.workers.torch_host.weights.device_weights import DeviceWeights, Registration
from greenroom.workers.torch_host.weights.fold import CHUNK_BYTES, ChunkTable
from greenroom.workers.torch_host.weights.folding import Folding
from greenroom.workers.torch_host.weights.upload import CopyRate, unfold_plainly, unfolder
from tests.workers.torch_host.samples import tiny
from tests.workers.torch_host.worker_rig import WorkerRig

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
GIB = 2**30
# What a library may keep for itself once it has been used.
SLACK_BYTES = 128 * 2**20
# 1.3 B parameters, 2.6 GB: large enough that copies take long, small enough to be made in seconds.
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
TURNS = 5


def used_bytes() -> int:
    """Bytes in use on the whole GPU, by its driver."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def say(text: str) -> None:
    print(f"\n{text}")  # noqa: T201


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def dirty(size: int) -> None:
    """Fill the GPU's free memory with nonsense: missing copies must not look right by chance."""
    nonsense = torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU)
    del nonsense
    settle()


@pytest.fixture(scope="module", params=["as they are", "folded"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceWeights]:
    torch.zeros(1, device=GPU)
    folder = tiny.make_model(tmp_path_factory.mktemp("model"), "llama")
    options = BuildOptions(folder, attention="sdpa", dtype="bfloat16")
    config = building.read_config(options)
    config.update(SIZES)
    # Derived from the tiny sizes when the file was read.
    config.head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    module = building.build(options, config, torch.bfloat16)
    assert module is not None
    layout = lay_out(building.state_of(module))
    memory = os.memfd_create("arena")
    host = HostArena.create(memory, layout, "test", None)
    fill(host.tensor)
    folding = Folding(memory, layout.bytes if request.param == "folded" else 0, [(0, layout.bytes)])
    folding.filled(0, layout.bytes)
    host.seal(ChunkTable(layout.bytes, folding.finish(threading.Event())))
    assert any(chunk.fold for chunk in host.chunks) == (request.param == "folded")
    made = DeviceWeights(module, host, GPU, 256 * 2**20, CopyRate())
    made.on_filled()
    yield made
    made.close()
    os.close(memory)


def fill(flat: Any) -> None:
    """Random weights, made on the GPU because it is faster at it."""
    random = torch.Generator(device=GPU).manual_seed(1)
    for start in range(0, flat.numel(), 512 * 2**20):
        part = flat[start : start + 512 * 2**20]
        numbers = torch.empty(part.numel() // 2, dtype=torch.bfloat16, device=GPU).normal_(0, 0.02, generator=random)
        part.copy_(numbers.view(torch.uint8))
    del numbers
    settle()


def answer(weights: DeviceWeights) -> Any:
    tokens = torch.arange(64, device=GPU)[None]
    with torch.no_grad():
        return weights.module(tokens, use_cache=False).logits[0, -1].float().cpu()


def test_an_arena_keeps_its_address_and_gives_its_memory_back() -> None:
    torch.zeros(1, device=GPU)
    settle()
    before = used_bytes()
    arena = CudaArena(driver(0), 0, GIB)
    address = arena.tensor.data_ptr()
    assert used_bytes() - before < SLACK_BYTES
    for turn in range(TURNS):
        arena.map()
        assert used_bytes() - before >= GIB
        assert arena.tensor.data_ptr() == address
        arena.tensor.fill_(turn)
        assert int(arena.tensor[-1]) == turn
        torch.cuda.synchronize()
        arena.unmap()
        assert used_bytes() - before < SLACK_BYTES
    arena.close()


def test_an_arena_larger_than_the_gpu_is_refused_with_the_numbers_and_leaves_nothing() -> None:
    settle()
    before = used_bytes()
    total = driver(0).memory()[1]
    arena = CudaArena(driver(0), 0, total + GIB)
    with pytest.raises(OutOfMemory, match=f"of {total:,} bytes free and {arena.size:,} are needed"):
        arena.map()
    assert not arena.is_mapped
    assert used_bytes() - before < SLACK_BYTES
    arena.close()


def test_a_captured_graph_survives_unmapping() -> None:
    arena = CudaArena(driver(0), 0, 4 * 2**20)
    arena.map()
    weights = arena.tensor.view(torch.float32)[: 512 * 512].view(512, 512)
    given, out = torch.ones(512, device=GPU), torch.empty(512, device=GPU)
    weights.fill_(2.0)
    torch.mv(weights, given, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mv(weights, given, out=out)
    for turn in range(TURNS):
        torch.cuda.synchronize()
        arena.unmap()
        arena.map()
        weights.fill_(float(turn))
        graph.replay()
        assert out.unique().tolist() == [512.0 * turn]
    torch.cuda.synchronize()
    arena.unmap()
    del graph
    arena.close()


def test_host_memory_is_registered_in_chunks_and_let_go() -> None:
    memory = torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)
    pointer = -(-memory.data_ptr() // 4096) * 4096
    for _ in range(2):
        # The second time only works where the first was undone.
        registration = Registration(driver(0), [(pointer, CHUNK_BYTES), (pointer + CHUNK_BYTES, 123 * 4096 + 7)])
        registration.wait()
        assert registration.problem is None
        registration.undo()


HEARD: list[torch.Tensor] = []


def test_logits_are_bit_equal_over_sleeps_and_memory_is_back(weights: DeviceWeights) -> None:
    size = weights._host.layout.bytes
    weights.wake()
    expected = answer(weights)
    HEARD.append(expected)
    # Folded or not.
    assert torch.equal(expected, HEARD[0])
    weights.sleep()
    settle()
    # After the first time: by then libraries have loaded.
    asleep = used_bytes()
    assert expected.isfinite().all()
    for turn in range(TURNS):
        dirty(size + GIB)
        began = time.monotonic()
        woken = weights.wake()
        mapped_s = time.monotonic() - began
        # Computing begins while weights are still on their way.
        found = answer(weights)
        first_s = time.monotonic() - began
        weights.wait_for_weights()
        assert torch.equal(found, expected)
        assert torch.equal(answer(weights), expected)
        assert used_bytes() - asleep >= woken.device_bytes
        slept_s = weights.sleep()
        left = used_bytes() - asleep
        rate = woken.bytes / weights.last_wake_s / 1e9
        say(
            f"turn {turn}: {woken.bytes / 1e9:.2f} of {size / 1e9:.2f} GB, copied at {rate:.1f} GB/s,"
            f" wake call {mapped_s * 1e3:.1f} ms, first logits after {first_s * 1e3:.0f} ms,"
            f" sleep {slept_s * 1e3:.1f} ms, left {left / 1e6:.0f} MB,"
            f" next expected {weights._copy_rate.expected_s(woken.bytes) * 1e3:.0f} ms"
        )
        assert left < SLACK_BYTES
        assert rate > 5


def test_hooks_are_gone_once_everything_is_here(weights: DeviceWeights) -> None:
    weights.wake()
    assert any(part._forward_pre_hooks for part in weights.module.modules())
    weights.wait_for_weights()
    assert not any(part._forward_pre_hooks for part in weights.module.modules())
    weights.sleep()


def test_a_sleep_right_after_a_wake_is_safe(weights: DeviceWeights) -> None:
    weights.wake()
    weights.sleep()
    weights.wake()
    first = answer(weights)
    weights.sleep()
    weights.wake()
    assert torch.equal(answer(weights), first)
    weights.sleep()


def test_a_wake_that_finds_no_memory_is_refused_and_changes_nothing(weights: DeviceWeights) -> None:
    settle()
    free = driver(0).memory()[0]
    taken = torch.empty(free - GIB, dtype=torch.uint8, device=GPU)
    with pytest.raises(OutOfMemory, match="bytes free"):
        weights.wake()
    assert not weights.is_awake
    assert weights.device_bytes == 0
    del taken
    settle()
    weights.wake()
    assert answer(weights).isfinite().all()
    weights.sleep()


def test_the_kernel_unfolds_what_torch_unfolds() -> None:
    assert unfolder(GPU) is not unfold_plainly


def test_a_device_side_assert_is_known_as_the_end() -> None:
    code = (
        "import torch; from greenroom.workers.torch_host.failures import is_fatal\n"
        "try:\n"
        "    torch.zeros(4, device='cuda')[torch.tensor([10], device='cuda')]; torch.cuda.synchronize()\n"
        "except Exception as error: print('fatal', is_fatal(error))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "fatal True" in out.stdout, out.stderr[-2000:]


@pytest.fixture
def worker() -> Iterator[WorkerRig]:
    folder = Path(tempfile.mkdtemp(prefix="gr-"))
    made = WorkerRig(folder)
    yield made
    say(made.log()[-4000:])
    made.end()
    shutil.rmtree(folder)


def test_a_worker_serves_two_models_that_take_turns(worker: WorkerRig, tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}
    memories, said = {}, {}
    for seed, slot in enumerate(("a", "b")):
        folder = tiny.make_model(tmp_path / slot, "llama", seed=seed, dtype=torch.bfloat16, **sizes)
        memories[slot] = os.memfd_create(slot)
        heard = worker.open(slot, folder, memories[slot], device="cuda", threads=None)
        assert heard["ok"], (heard, worker.log())
    for turn in range(TURNS):
        for slot in ("a", "b"):
            began = time.monotonic()
            woken = worker.do("wake", slot=slot)
            text = worker.complete(slot, tokens=24)
            took_s = time.monotonic() - began
            assert said.setdefault(slot, text) == text
            awake = used_bytes()
            slept = worker.do("sleep", slot=slot)
            back = awake - used_bytes()
            say(
                f"{slot}{turn}: {woken['bytes'] / 1e6:.0f} MB, 24 tokens after {took_s * 1e3:.0f} ms,"
                f" sleep {slept['seconds'] * 1e3:.1f} ms, {back / 1e6:.0f} MB back"
            )
            assert back >= woken["device_bytes"]
    looked = worker.do("look")
    assert all(slot["device_bytes"] == 0 and slot["problem"] is None for slot in looked["slots"].values())
    assert worker.hang_up() == 0
    for memory in memories.values():
        os.close(memory)
