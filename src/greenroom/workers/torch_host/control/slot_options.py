"""The options with which the gateway opens a slot, checked. Owns their names and types. The gateway may have another
version: a missing option has its default, an unknown one is ignored, and the error for a wrong one names it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from ..failures import Failure

DEVICES: Final = ("auto", "cuda", "cpu")
# No pipeline is spread over more GPUs than this.
GPUS_MAX: Final = 16
BATCH_MAX: Final = 32
# Contexts that the cache holds by default, for several answers at once.
CACHE_CONTEXTS: Final = 4
_Kind = TypeVar("_Kind", str, int, bool)


@dataclass(frozen=True, slots=True)
class SlotOptions:
    slot: str
    model: str
    folder: Path
    socket: Path
    filled: bool = False
    dtype: str = "auto"
    device: str = "auto"
    context: int | None = None
    cache_tokens: int | None = None
    batch_max: int = BATCH_MAX
    embedding: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False
    arena_max_bytes: int | None = None
    host_free_bytes: int | None = None
    threads: int | None = None
    skip_check: bool = False
    checked: Path | None = None
    """The folder that records which files have passed their check."""
    chat_template: Path | None = None
    """A file with the chat template to use instead of the model's own."""
    device_map: Mapping[str, int] = field(default_factory=dict)
    """Which of the visible GPUs holds each component of a pipeline; those that are not named are on the first."""


@dataclass
class Opening:
    """One `open`, and whether its result is still wanted."""

    cancelled: threading.Event = field(default_factory=threading.Event)

    def report(self, share: float) -> None:
        """This share of the work is done."""


def read_slot_options(message: Mapping[str, Any]) -> SlotOptions:
    """The options of an `open` message. Raises Failure, which names the wrong field."""
    options = message.get("options") or {}
    if not isinstance(options, Mapping):
        raise Failure("options must be an object.")
    device = _one(options, "device", str, "auto")
    if device not in DEVICES:
        raise Failure(f"device {device!r} is not known; choose one of {', '.join(DEVICES)}.")
    return SlotOptions(
        slot=_needed(message, "slot"),
        model=_needed(message, "model"),
        folder=Path(_needed(message, "path")),
        socket=Path(_needed(message, "socket")),
        filled=_one(message, "filled", bool, False),
        dtype=_one(options, "dtype", str, "auto"),
        device=device,
        context=_count(options, "context"),
        cache_tokens=_count(options, "cache_tokens"),
        batch_max=_count(options, "batch_max") or BATCH_MAX,
        embedding=_one(options, "embedding", bool, False),
        trust_remote_code=_one(options, "trust_remote_code", bool, False),
        allow_pickle=_one(options, "allow_pickle", bool, False),
        arena_max_bytes=_count(options, "arena_max_bytes"),
        host_free_bytes=_count(options, "host_free_bytes"),
        threads=_count(options, "threads"),
        skip_check=_one(options, "skip_check", bool, False),
        checked=Path(checked) if (checked := _one(options, "checked", str, "")) else None,
        chat_template=Path(template) if (template := _one(options, "chat_template", str, "")) else None,
        device_map=_device_map(options),
    )


def _needed(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not value:
        raise Failure(f"{name} is missing.")
    return value


def _one(message: Mapping[str, Any], name: str, kind: type[_Kind], default: _Kind) -> _Kind:
    value = message.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise Failure(f"{name} must be of kind {kind.__name__}, not {type(value).__name__}.")
    return value


def _device_map(options: Mapping[str, Any]) -> dict[str, int]:
    said = options.get("device_map") or {}
    if not isinstance(said, dict) or not all(type(gpu) is int and 0 <= gpu < GPUS_MAX for gpu in said.values()):
        raise Failure(f"device_map must name the GPU of each component, a number below {GPUS_MAX}.")
    return said


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if type(value) is not int or value <= 0:
        raise Failure(f"{name} must be a number above zero.")
    return value
