"""Diffusers: pipelines that make pictures, as folders with model_index.json.

Owns their abilities, the files they are made of, and what is known of their memory before the first load. Looks at the
index and at headers. `TorchEngine` says how their workers start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from greenroom.config.schema import Ability, Model
from greenroom.core.model import Claim, DeviceId
from greenroom.core.packing import pack
from greenroom.engines.base import EngineFacts, Split
from greenroom.engines.builtin.transformers import TorchEngine
from greenroom.engines.estimates.estimate import Estimate
from greenroom.engines.estimates.hosted import (
    component_mib,
    estimate_pipeline,
    estimate_pipeline_asleep,
    index_of,
    pipeline_fault,
    pipeline_files,
    spread_mib,
)
from greenroom.engines.identity import FILES_MAX, file_identity, packages_identity, packages_missing

# Without one of these no pipeline can be loaded.
PACKAGES: Final = ("torch", "transformers", "diffusers", "pillow", "h11")
# Pictures are made one after another: two at once take longer and more memory than one after the other.
CONCURRENCY: Final = 1
# Families whose pipelines can change pictures, by how the names of their classes begin.
_EDITING: Final = (
    *("StableDiffusion", "Flux", "Kandinsky", "IF", "LatentConsistency", "QwenImage", "ZImage"),
    *("Chroma", "HunyuanDiTPAG"),
)
# Classes that change pictures and make none from text alone.
_ONLY_EDITING: Final = ("Img2Img", "Inpaint", "Edit", "Upscale", "Pix2Pix")


class DiffusersEngine(TorchEngine):
    name = "diffusers"
    # Where its worker tells how far a request is.
    progress_path = "/progress"

    def facts(self, model: Model) -> EngineFacts:
        abilities = _abilities(index_of(Path(model.path or "")))
        if model.device_map == "one" or model.is_host_only:
            return EngineFacts(abilities, can_sleep=True, keeps_prefixes=False)
        parts = component_mib(Path(model.path or ""), model.dtype)
        split = Split.PARTS if len(parts) > 1 else None
        return EngineFacts(
            abilities,
            can_sleep=True,
            keeps_prefixes=False,
            can_split=split,
            parts=parts,
            beside_mib=spread_mib(parts),
        )

    def options(self, model: Model, gpus: tuple[DeviceId, ...] | None, claim: Claim) -> Mapping[str, object]:
        said = super().options(model, gpus, claim)
        if gpus is None or len(gpus) < 2:
            return said
        parts = component_mib(Path(model.path or ""), model.dtype)
        return {**said, "device_map": device_map(parts, [claim.get(gpu, 0) for gpu in gpus])}

    def estimate(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_pipeline(Path(model.path or ""), model.dtype, gpus)

    def estimate_asleep(self, model: Model, gpus: int) -> Estimate | None:
        return estimate_pipeline_asleep(Path(model.path or ""), model.dtype)

    def identity(self, model: Model) -> tuple[str, str]:
        packages = packages_identity(model.python, ("torch", "transformers", "diffusers"))
        return file_identity(self.files(model)), packages

    def concurrency(self, model: Model) -> int:
        return model.concurrency or CONCURRENCY

    def files(self, model: Model) -> list[Path]:
        return pipeline_files(Path(model.path or ""), model.dtype)[:FILES_MAX]

    def unusable(self, model: Model) -> str | None:
        return pipeline_fault(Path(model.path or ""), model.dtype, takes_pickles=model.allow_pickle)

    def missing(self, model: Model) -> str | None:
        return packages_missing(model, PACKAGES, "diffusers")


def device_map(parts: Mapping[str, int], shares: Sequence[int]) -> dict[str, int]:
    """Which GPU holds each component, by its place among these shares (MiB), such that none holds more than its share.
    Where shares are smaller than planned, components are balanced."""
    sizes = list(parts.values())
    # Each share is what its components need and the same rest.
    rest_mib = max(0, (sum(shares) - sum(sizes)) // len(shares))
    rooms = [[share - rest_mib for share in shares], shares, [sum(sizes)] * len(shares)]
    places = next(found for room in rooms if (found := pack(sizes, room)) is not None)
    return dict(zip(parts, places, strict=True))


def _abilities(index: Mapping[str, object]) -> frozenset[Ability]:
    """By the class of the pipeline; both where it does not tell, and a request then says what is wrong."""
    name = str(index.get("_class_name", ""))
    if any(word in name for word in _ONLY_EDITING):
        return frozenset({Ability.IMAGE_EDITS})
    if not name or name.startswith(_EDITING):
        return frozenset({Ability.IMAGES, Ability.IMAGE_EDITS})
    return frozenset({Ability.IMAGES})
