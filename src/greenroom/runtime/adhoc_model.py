"""What a request may say about a model that no configuration names, and the configuration that this makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from greenroom.config.schema import Model, Vllm
from greenroom.config.sections.engine_keys import WITH_PATH
from greenroom.core.model import DeviceId
from greenroom.errors import BadRequest
from greenroom.library.records import ENGINE_OF_KIND, LibraryRecord

# The share of a GPU for engines that take what they are given, where nothing says how much.
SHARE_OF_GPU: Final = 0.7
_SIZES_CACHE: Final = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a request says about an ad-hoc model. All but `ttl_s` make it another model."""

    backend: str | None = None
    device: str | None = None
    n_gpu_layers: int | None = None
    gpu_memory_utilization: float | None = None
    # Only loads that are ordered say these.
    quantization: str | None = None
    ctx_size: int | None = None
    budget_mib: int | None = None
    ttl_s: float | None = None


NO_OPTIONS: Final = ModelOptions()
BACKENDS: Final = f"{', '.join(WITH_PATH[:-1])} or {WITH_PATH[-1]}"


def check_backend(name: str) -> str:
    """Raises BadRequest for one that runs no models from disk."""
    # Names under which other servers know them.
    name = {"llama.cpp": "llamacpp", "faster-whisper": "whisper"}.get(name, name)
    if name not in WITH_PATH:
        raise BadRequest(f"Invalid backend: must be {BACKENDS}.", param="backend")
    return name


def model_of(
    record: LibraryRecord,
    options: ModelOptions,
    dtype: str | None,
    *,
    usable_mib: Mapping[DeviceId, int],
    exclusive: bool,
    vllm: Vllm,
) -> Model:
    """Its configuration. Raises BadRequest, which names the field."""
    engine = options.backend or ENGINE_OF_KIND[record.kind]
    said: dict[str, Any] = {"engine": engine, "path": record.path, "exclusive": exclusive}
    if engine == "llamacpp" and record.projector is not None:
        said["mmproj"] = record.projector
    if options.device == "cpu":
        said["device"] = "cpu"
    elif options.device is not None and not usable_mib:
        raise BadRequest("device is cuda, but this machine has no GPU. Send cpu, or leave it out.", param="device")
    if options.n_gpu_layers is not None:
        said["n_gpu_layers"] = options.n_gpu_layers
    if engine == "vllm":
        said |= {"prefix_caching": vllm.prefix_caching}
        said |= {} if vllm.ctx_size is None else {"ctx_size": vllm.ctx_size}
    said |= {} if options.ctx_size is None else {"ctx_size": options.ctx_size}
    said |= {} if dtype is None else {"dtype": dtype}
    if options.ttl_s is not None:
        said["ttl_s"] = options.ttl_s
    if said.get("device") != "cpu":
        said |= _memory(engine, options, usable_mib, vllm)
    try:
        return Model.model_validate(said)
    except ValidationError as error:
        raise BadRequest(_why(error, engine), param=_param(error)) from None


def _memory(engine: str, options: ModelOptions, usable_mib: Mapping[DeviceId, int], vllm: Vllm) -> dict[str, int]:
    """A share of the largest GPU: what engines take that fill what they are given; a limit for others."""
    key = "memory_mib" if engine in _SIZES_CACHE else "gpu_memory_budget_mib"
    if options.budget_mib is not None:
        return {key: options.budget_mib}
    share = options.gpu_memory_utilization
    largest = max(usable_mib.values(), default=0)
    if not largest:
        return {}
    if share is None and engine in _SIZES_CACHE:
        share = vllm.gpu_memory_utilization or SHARE_OF_GPU
    return {} if share is None else {key: max(1, int(share * largest))}


def _why(error: ValidationError, engine: str) -> str:
    first = error.errors(include_url=False)[0]
    problems = first.get("ctx", {}).get("problems") or ()
    said = "; ".join(str(problem.message) for problem in problems) or first["msg"]
    return f"{engine} does not take what was asked for: {said}."


def _param(error: ValidationError) -> str | None:
    first = error.errors(include_url=False)[0]
    problems = first.get("ctx", {}).get("problems") or ()
    where = problems[0].where if problems else first["loc"]
    return str(where[0]) if where else None
