"""Engines that ran out of memory are told from engines that failed otherwise."""

from __future__ import annotations

import pytest

from greenroom.runtime.moves.load_errors import memory_complaint

COMPLAINTS = [
    # llama.cpp
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: cudaMalloc failed: out of memory",
    "alloc_tensor_range: failed to allocate CUDA0 buffer of size 4294967296",
    "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
    "llama_kv_cache_init: failed to allocate buffer for kv cache",
    "ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 1310720000",
    "graph_reserve: failed to allocate compute buffers",
    "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
    "ggml_metal: error: insufficient memory (00000008)",
    # PyTorch and what is built on it
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB",
    "torch.cuda.OutOfMemoryError: HIP out of memory.",
    "RuntimeError: CUDA error: out of memory",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
    "RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes.",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    # vLLM
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    "ValueError: Free memory on device (3.2/79.1 GiB) on startup is less than desired GPU memory utilization (0.9)",
    "ValueError: (4.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.2 GiB).",
    # others
    "terminate called after throwing an instance of 'std::bad_alloc'",
    "MemoryError",
    "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)",
    "OSError: [Errno 12] Cannot allocate memory",
    "vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
    "fatal: cuMemAlloc returned CUDA_ERROR_OUT_OF_MEMORY",
]

OTHER_FAILURES = [
    "error: failed to open /models/m.gguf: No such file or directory",
    "llama_model_load: error loading model: unknown model architecture: 'x'",
    "torch.cuda.is_available() returned False",
    "loading model into memory",
    "available memory: 23,000 MiB",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "OSError: [Errno 98] Address already in use",
    "load_tensors: CUDA0 model buffer size = 4096.00 MiB",
    "",
]


@pytest.mark.parametrize("line", COMPLAINTS)
def test_complaint_is_found_among_other_lines(line: str) -> None:
    assert memory_complaint(["starting", f"  {line}\r", "bye"]) == line


@pytest.mark.parametrize("line", OTHER_FAILURES)
def test_other_failures_are_not_taken_for_one(line: str) -> None:
    assert memory_complaint([line]) is None


def test_case_does_not_matter() -> None:
    assert memory_complaint(["CUDA OUT OF MEMORY"]) == "CUDA OUT OF MEMORY"


def test_first_complaint_is_the_one_told() -> None:
    assert memory_complaint([COMPLAINTS[0], COMPLAINTS[1]]) == COMPLAINTS[0]
