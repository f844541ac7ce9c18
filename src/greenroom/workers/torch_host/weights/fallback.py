"""Models that only Transformers itself can load: quantised ones, GGUF, pickles, and files that fit no plan.

Owns the loading into ordinary memory and the copy of every tensor into an arena, each storage once. It takes twice the
memory and longer than a plan; nothing of the first copy stays. Never runs a pickle that was not allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from ..engine import embedding
from ..failures import BadModel, shortened
from .arena import HostArena, view_of
from .building import Wish, asked, maker_of, state_of

PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
NAMED_MAX: Final = 4


def gguf_in(folder: Path) -> str | None:
    """The GGUF file that is this model, where there is exactly one and nothing else."""
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    found = sorted(path.name for path in folder.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def refuse_pickle(wish: Wish) -> None:
    """Raises BadModel where the weights are pickles, which can run code, and that was not allowed."""
    if wish.allow_pickle:
        return
    found = [name for name in PICKLES if (wish.folder / name).exists()]
    found += sorted(path.name for path in wish.folder.glob("*.bin") if path.name.startswith("pytorch_model-"))[:1]
    if found:
        raise BadModel(
            f"{wish.folder} has its weights in {found[0]}, a pickle. Convert it to safetensors, or set"
            " allow_pickle: true for this model if you trust it."
        )
    raise BadModel(f"{wish.folder} has no weights: no model.safetensors and no index of such files. Is it complete?")


def load(wish: Wish, config: Any, dtype: torch.dtype) -> Any:
    """The model in ordinary memory, as Transformers makes it. Raises BadModel, also where weights would be made up."""
    maker, told = maker_of(wish, config)
    how = wish.loading | told | ({} if wish.allow_pickle or wish.gguf_file else {"use_safetensors": True})
    module, report = asked(
        wish.folder, lambda: maker.from_pretrained(wish.folder, dtype=dtype, output_loading_info=True, **how)
    )
    missing = sorted(report.get("missing_keys") or ())
    if missing:
        named = ", ".join(missing[:NAMED_MAX])
        raise BadModel(
            f"{wish.folder} lacks {len(missing):,} weights of {type(module).__name__}, among them {named}. Is this the"
            " right kind of model, and is it complete?"
        )
    if wish.sentence is not None:
        embedding.attach(module, wish.sentence, dtype, "cpu")
        embedding.fill(module, wish.sentence)
    _refuse_odd(module)
    return module.eval().requires_grad_(False)


def pour(
    module: torch.nn.Module, arena: HostArena, go_on: Callable[[], None], on_filled: Callable[[int, int], None]
) -> int:
    """Copy every tensor to its place, and say how many bytes that were. `go_on` is asked before each; it may raise."""
    done: set[int] = set()
    copied = 0
    for name, tensor in state_of(module):
        place = arena.layout.places[name]
        if place.size and place.offset not in done:
            go_on()
            view_of(arena.tensor, place).copy_(tensor.detach())
            on_filled(place.offset, place.size)
            done.add(place.offset)
            copied += place.size
    return copied


def _refuse_odd(module: torch.nn.Module) -> None:
    for name, tensor in state_of(module):
        if tensor.device.type == "meta" or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(tensor).__name__ if tensor.device.type != "meta" else "left without a value"
            raise BadModel(
                shortened(f"{name} is {kind}, which cannot be kept in an arena. Use the model unquantised or as GGUF.")
            )
