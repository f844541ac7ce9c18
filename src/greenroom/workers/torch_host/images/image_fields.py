"""What a request for pictures says: fields of OpenAI's images API, and those that pipelines have beside them. Owns
names, ranges and meanings of the fields, and the sizes that a pipeline can make. Uses nothing of HTTP."""

from __future__ import annotations

import inspect
import io
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image, UnidentifiedImageError

from ...serving.errors import ApiError, unsupported
from ...serving.fields import Body, boolean, integer, number, refuse
from ...serving.forms import Form

PROMPT_CHARS_MAX: Final = 32_000
PICTURES_MAX: Final = 10
STEPS_MAX: Final = 1_000
SEED_MAX: Final = 2**63 - 1
SIDE_MIN: Final = 16
# Pixels of a picture to be made: twice those of the largest that OpenAI's own models make.
PIXELS_MAX: Final = 2 * 1024 * 4096
# Pixels of a picture that is sent. Compressed, a few kilobytes can claim far more.
SENT_PIXELS_MAX: Final = 64 * 1024 * 1024
SENT_FORMATS: Final = ("PNG", "JPEG", "WEBP")
# How many of the usual steps a quality takes.
QUALITIES: Final[Mapping[str, float]] = {
    "auto": 1.0,
    "standard": 1.0,
    "medium": 1.0,
    "low": 0.5,
    "high": 1.5,
    "hd": 1.5,
}
FORMATS: Final = ("png", "jpeg", "webp")
STRENGTH: Final = 0.8
# Fields of a form that are numbers or truth values in JSON.
_NUMBERS: Final = frozenset(
    ["n", "seed", "num_inference_steps", "output_compression", "strength", "guidance_scale", "true_cfg_scale"]
)


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """What the engine is given."""

    kind: str
    """`text`, `image` or `inpaint`: which pipeline makes them."""
    arguments: Mapping[str, Any]
    seeds: list[int]
    format: str = "png"
    compression: int | None = None
    """The quality of formats that lose something."""

    def file_of(self, picture: Image.Image) -> bytes:
        target = io.BytesIO()
        quality = 95 if self.compression is None else max(1, self.compression)
        picture.save(target, format=self.format.upper(), **({} if self.format == "png" else {"quality": quality}))
        return target.getvalue()


def read_generation(pipelines: Mapping[str, Any], body: Body) -> ImageRequest:
    """A request for new pictures. Raises ApiError."""
    pipeline = pipelines["text"]
    if "image" in _required(pipeline):
        raise unsupported("This pipeline changes pictures and makes none from text alone: use /v1/images/edits.")
    return _request(pipeline, "text", body, _size(pipeline, body), {})


def read_edit(pipelines: Mapping[str, Any], form: Form) -> ImageRequest:
    """A request to change a picture. Raises ApiError."""
    body = _typed(form)
    sent = form.file("image", needed=True)
    assert sent is not None
    picture = _picture(sent, "image")
    mask = _mask(form, picture)
    kind = "inpaint" if mask is not None else "image"
    pipeline = pipelines.get(kind)
    if pipeline is None and "image" in _parameters(pipelines["text"]) and mask is None:
        kind, pipeline = "text", pipelines["text"]
    if pipeline is None:
        raise unsupported(
            "This pipeline cannot change a part of a picture: send no mask and no transparent picture."
            if mask is not None
            else "This pipeline cannot change pictures."
        )
    size = _size(pipeline, body) or _nearest(pipeline, picture.size)
    arguments: dict[str, Any] = {"image": picture.convert("RGB").resize(size)}
    if mask is not None:
        arguments["mask_image"] = mask.resize(size)
    return _request(pipeline, kind, body, size, arguments)


def _request(
    pipeline: Any, kind: str, body: Body, size: tuple[int, int] | None, arguments: dict[str, Any]
) -> ImageRequest:
    known = _parameters(pipeline)
    _refuse_what_is_not_done(body)
    arguments["prompt"] = _prompt(body)
    if size is not None and {"width", "height"} <= known.keys():
        arguments["width"], arguments["height"] = size
    if "num_inference_steps" in known:
        arguments["num_inference_steps"] = _steps(known, body)
    elif body.get("num_inference_steps") is not None:
        _needs(known, "num_inference_steps")
    if "strength" in known:
        arguments["strength"] = _strength(body, arguments.get("num_inference_steps", 1))
    elif body.get("strength") is not None:
        _needs(known, "strength")
    for name, high in (("guidance_scale", 100.0), ("true_cfg_scale", 100.0)):
        if body.get(name) is not None:
            _needs(known, name)
            arguments[name] = number(body, name, 0.0, 0.0, high)
    _negative_prompt(known, body, arguments)
    count = integer(body, "n", 1, PICTURES_MAX) or 1
    seed = integer(body, "seed", 0, SEED_MAX)
    first = secrets.randbits(32) if seed is None else seed
    seeds = [(first + place) % (SEED_MAX + 1) for place in range(count)]
    picked = _one_of(body, "output_format", FORMATS, "png")
    compression = integer(body, "output_compression", 0, 100)
    return ImageRequest(kind, arguments, seeds, picked, compression)


def _refuse_what_is_not_done(body: Body) -> None:
    if boolean(body, "stream"):
        raise unsupported("Pictures are not streamed: leave stream out, or ask as a job to see progress.", "stream")
    if _one_of(body, "response_format", ("b64_json", "url"), "b64_json") == "url":
        raise unsupported("URLs are made by the gateway; this engine answers with b64_json.", "response_format")


def _prompt(body: Body) -> str:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        refuse("prompt", "a string", prompt)
    if not prompt.strip():
        raise ApiError("prompt must not be empty.", param="prompt")
    if len(prompt) > PROMPT_CHARS_MAX:
        raise ApiError(f"prompt has {len(prompt):,} characters; at most {PROMPT_CHARS_MAX:,} fit.", param="prompt")
    return str(prompt)


def _negative_prompt(known: Mapping[str, Any], body: Body, arguments: dict[str, Any]) -> None:
    said = body.get("negative_prompt")
    if said is None or said == "":
        return
    if not isinstance(said, str) or len(said) > PROMPT_CHARS_MAX:
        refuse("negative_prompt", f"a string of at most {PROMPT_CHARS_MAX:,} characters", said)
    _needs(known, "negative_prompt")
    if "true_cfg_scale" in known and not arguments.get("true_cfg_scale", 0.0) > 1.0:
        raise ApiError("Here negative_prompt needs true_cfg_scale above 1, say 4.", param="true_cfg_scale")
    arguments["negative_prompt"] = said


def _steps(known: Mapping[str, Any], body: Body) -> int:
    steps = integer(body, "num_inference_steps", 1, STEPS_MAX)
    share = QUALITIES[_one_of(body, "quality", tuple(QUALITIES), "auto")]
    usual = known["num_inference_steps"].default
    return steps or max(1, round(usual * share))


def _strength(body: Body, steps: int) -> float:
    """The share of the steps that is done, at least one: some pipelines fail at a share without a whole step."""
    one = 1.0 / steps
    if steps * one < 1.0:
        one = math.nextafter(one, 1.0)
    return max(number(body, "strength", STRENGTH, 0.01, 1.0), one)


def _size(pipeline: Any, body: Body) -> tuple[int, int] | None:
    """Width and height that were asked for; None: the pipeline's own."""
    said = body.get("size")
    if said is None or said == "auto":
        return None
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", said) if isinstance(said, str) else None
    if found is None:
        raise ApiError("size must be auto, or WIDTHxHEIGHT such as 1024x1024.", param="size")
    width, height = int(found[1]), int(found[2])
    step = _step(pipeline)
    if min(width, height) < SIDE_MIN or width * height > PIXELS_MAX:
        raise ApiError(
            f"size may be from {SIDE_MIN}x{SIDE_MIN} to {PIXELS_MAX:,} pixels; {width}x{height} is not.", param="size"
        )
    if width % step or height % step:
        raise ApiError(f"Width and height of size must be multiples of {step} for this pipeline.", param="size")
    return width, height


def _nearest(pipeline: Any, size: tuple[int, int]) -> tuple[int, int]:
    """The size of a picture that was sent, as the pipeline can make it."""
    step, (width, height) = _step(pipeline), size
    least = -(-SIDE_MIN // step) * step
    shrink = min(1.0, (PIXELS_MAX / (width * height)) ** 0.5)
    sides = [max(least, int(side * shrink) // step * step) for side in (width, height)]
    # A picture that is hardly higher than a line grows in height: then it must not be as long.
    most = PIXELS_MAX // min(sides) // step * step
    return min(sides[0], most), min(sides[1], most)


def _step(pipeline: Any) -> int:
    """Sides are multiples of this: pixels per latent, and latents per patch where they are packed in pairs."""
    scale = getattr(pipeline, "vae_scale_factor", 8)
    transformer = getattr(pipeline, "transformer", None)
    patch = getattr(getattr(transformer, "config", None), "patch_size", 1) if transformer is not None else 1
    packs = 2 if transformer is not None and hasattr(pipeline, "_pack_latents") else 1
    return int(scale) * max(packs, patch if isinstance(patch, int) else 1)


def _picture(raw: memoryview, name: str) -> Image.Image:
    try:
        picture = Image.open(io.BytesIO(raw), formats=SENT_FORMATS)
        width, height = picture.size
        if width * height > SENT_PIXELS_MAX:
            raise Image.DecompressionBombError
        picture.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ApiError(f"{name} is too large: at most {SENT_PIXELS_MAX:,} pixels are read.", param=name) from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError):
        raise ApiError(f"{name} is no picture in PNG, JPEG or WebP, or it is damaged.", param=name) from None
    return picture


def _mask(form: Form, picture: Image.Image) -> Image.Image | None:
    """White where the picture is to be changed: where the mask, or else the picture itself, is transparent."""
    sent = form.file("mask")
    source = picture if sent is None else _picture(sent, "mask")
    has_alpha = source.mode in ("RGBA", "LA") or "transparency" in source.info
    if sent is not None:
        if not has_alpha:
            raise ApiError("mask has no alpha channel: what is to be changed must be transparent.", param="mask")
        if source.size != picture.size:
            raise ApiError("mask must have the size of image.", param="mask")
    if not has_alpha:
        return None
    alpha = source.convert("RGBA").getchannel("A")
    if alpha.getextrema()[0] == 255:
        return None
    return alpha.point(lambda value: 255 if value == 0 else 0)


def _typed(form: Form) -> dict[str, Any]:
    """The fields of a form as they would be in JSON."""
    found: dict[str, Any] = {}
    for name, said in form.fields.items():
        if name not in _NUMBERS:
            found[name] = {"true": True, "false": False}.get(said, said) if name == "stream" else said
            continue
        try:
            found[name] = int(said) if re.fullmatch(r"-?[0-9]{1,20}", said) else float(said)
        except ValueError:
            raise ApiError(f"{name} must be a number.", param=name) from None
    return found


def _one_of(body: Body, name: str, choices: tuple[str, ...], default: str) -> str:
    said = body.get(name)
    if said is None:
        return default
    if said not in choices:
        raise ApiError(f"{name} must be one of {', '.join(choices)}.", param=name)
    return str(said)


def _parameters(pipeline: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipeline.__call__).parameters


def _required(pipeline: Any) -> set[str]:
    return {name for name, one in _parameters(pipeline).items() if one.default is inspect.Parameter.empty}


def _needs(known: Mapping[str, Any], name: str) -> None:
    if name not in known:
        raise unsupported(f"This pipeline has no {name}: leave it out.", name)
