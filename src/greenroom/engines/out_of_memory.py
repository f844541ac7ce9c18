"""Whether an engine that did not come up ran out of memory, read from its last lines.

Owns one table of what engines print. Looked at only after a load has failed, and only at what that load printed: a word
of warning in the log of an engine that came up means nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

# One line each, with who prints it. Compared without regard to case.
SIGNATURES: Final = (
    # CUDA, ROCm and whatever is built on them: `CUDA error: out of memory`, `cudaMalloc failed: out of memory`,
    # `torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …`, `HIP out of memory`.
    r"out of memory",
    r"OutOfMemoryError",
    # The same as numbers and constants: the CUDA runtime, its driver interface, Vulkan, Metal, OpenCL.
    r"cudaErrorMemoryAllocation",
    r"CUDA_ERROR_OUT_OF_MEMORY",
    r"CUBLAS_STATUS_ALLOC_FAILED",
    r"hipErrorOutOfMemory",
    r"ErrorOutOf(Device|Host)Memory",
    r"VK_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",
    r"kIOGPUCommandBufferCallbackErrorOutOfMemory",
    r"CL_MEM_OBJECT_ALLOCATION_FAILURE",
    # llama.cpp and ggml: weights, KV cache and compute buffers.
    r"(failed|unable) to allocate .*buffer",
    r"cudaMalloc failed",
    r"insufficient memory",
    # vLLM, which measures what is free before it begins.
    r"no available memory for the cache blocks",
    r"free memory on device .*less than desired GPU memory utilization",
    r"larger than the (available|maximum number of tokens that can be stored in) KV cache",
    # PyTorch, NumPy and C++ on the host.
    r"not enough memory",
    r"can't allocate memory",
    r"cannot allocate memory",
    r"unable to allocate .*memory",
    r"unable to allocate .*iB for an array",
    r"std::bad_alloc",
    r"\bMemoryError\b",
)
_ANY: Final = re.compile("|".join(f"(?:{signature})" for signature in SIGNATURES), re.IGNORECASE)


def memory_complaint(lines: Iterable[str]) -> str | None:
    """The first line that says that memory ran out; None when none does."""
    return next((line.strip() for line in lines if _ANY.search(line)), None)
