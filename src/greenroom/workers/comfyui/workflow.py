"""A request for pictures becomes workflows for ComfyUI: the operator's workflow, with the caller's values put in.

Owns which fields there are, their ranges, and where in the workflow each belongs. A field that the workflow has no
input for is refused, because ignoring it would mislead the caller. Never talks to ComfyUI.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..serving import fields
from ..serving.errors import ApiError, unsupported

Workflow = dict[str, Any]
# A node and the name of its input.
Target = tuple[str, str]

TEXT_CHARS_MAX = 32_000
PICTURES_MAX = 10
SIDE_MIN, SIDE_MAX, SIDE_STEP = 16, 4096, 8
STEPS_MAX = 1_000
GUIDANCE_MAX = 100.0
SEED_MAX = 2**63 - 1
RANDOM_SEEDS = 2**32
_SIZE = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
# Two names of one field: in requests and among the operator's `inputs`.
_SAME = {"num_inference_steps": "steps"}
# Fields that other engines know, too. They are never ignored.
_KNOWN = ("prompt", "negative_prompt", "seed", "width", "height", "steps", "guidance_scale")


@dataclass(frozen=True, slots=True)
class WorkflowPlan:
    """The operator's workflow in ComfyUI's API format, and where each named value belongs."""

    workflow: Workflow
    inputs: Mapping[str, Sequence[Target]]

    @classmethod
    def of(cls, workflow: Workflow, inputs: Mapping[str, Sequence[str]]) -> WorkflowPlan:
        """`inputs` are written as NODE.INPUT."""
        targets = {
            _SAME.get(name, name): [(node, field) for node, _, field in (one.partition(".") for one in places)]
            for name, places in inputs.items()
        }
        return cls(workflow, targets)

    @property
    def samplers(self) -> frozenset[str]:
        """The nodes whose steps are the work."""
        return frozenset(node for node, about in self.workflow.items() if "latent_image" in about.get("inputs", {}))

    def runs(self, body: Mapping[str, Any]) -> list[Workflow]:
        """The workflows that make the pictures a request asks for. Raises ApiError."""
        values = self._values(body)
        count = fields.integer(body, "n", 1, PICTURES_MAX) or 1
        if "n" in self.inputs:
            return [self._filled({**values, "n": count})]
        if count > 1 and "seed" not in self.inputs:
            raise unsupported("This workflow makes one picture: it has no input for n, nor for seed.", "n")
        seed = values.get("seed", 0)
        return [self._filled({**values, "seed": (seed + number) % SEED_MAX}) for number in range(count)]

    def _values(self, body: Mapping[str, Any]) -> dict[str, Any]:
        said = {_SAME.get(name, name): value for name, value in body.items() if value is not None}
        said |= _sides(said)
        if not said.get("prompt"):
            raise ApiError("prompt is missing: it says what to make.", param="prompt")
        for name in _KNOWN:
            if name in said and name not in self.inputs:
                raise unsupported(f"This workflow has no input for {name}.", name)
        values = {name: _checked(name, said) for name in self.inputs if name in said and name != "n"}
        if "seed" in self.inputs and "seed" not in values:
            # ComfyUI answers a workflow that it has just run from its cache.
            values["seed"] = secrets.randbelow(RANDOM_SEEDS)
        return values

    def _filled(self, values: Mapping[str, Any]) -> Workflow:
        filled = copy.deepcopy(self.workflow)
        for name, value in values.items():
            for node, field in self.inputs.get(name, ()):
                filled[node]["inputs"][field] = value
        return filled


def _sides(said: Mapping[str, Any]) -> dict[str, int]:
    size = said.get("size")
    if size is None or size == "auto":
        return {}
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ApiError("size must be WIDTHxHEIGHT, such as 1024x1024, or auto.", param="size")
    return {"width": _side(int(match[1]), "size"), "height": _side(int(match[2]), "size")}


def _side(pixels: int, param: str) -> int:
    if not SIDE_MIN <= pixels <= SIDE_MAX or pixels % SIDE_STEP:
        raise ApiError(f"{param}: sides have {SIDE_MIN} to {SIDE_MAX} pixels, in steps of {SIDE_STEP}.", param=param)
    return pixels


def _checked(name: str, said: Mapping[str, Any]) -> Any:
    """The value of one field. Raises ApiError, which names it."""
    if name in ("prompt", "negative_prompt"):
        return _text(name, said[name])
    if name in ("width", "height"):
        return _side(fields.integer(said, name, 0, SIDE_MAX) or 0, name)
    if name == "seed":
        return fields.integer(said, name, 0, SEED_MAX)
    if name == "steps":
        return fields.integer(said, name, 1, STEPS_MAX)
    if name == "guidance_scale":
        return fields.number(said, name, 0.0, 0.0, GUIDANCE_MAX)
    # An input of the operator's own; ComfyUI checks its type.
    value = said[name]
    if isinstance(value, dict | list):
        fields.refuse(name, "a text, a number, or true or false", value)
    return _text(name, value) if isinstance(value, str) else value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        fields.refuse(name, "a string", value)
    if len(value) > TEXT_CHARS_MAX:
        raise ApiError(f"{name} has {len(value):,} characters; {TEXT_CHARS_MAX:,} are allowed.", param=name)
    return value
