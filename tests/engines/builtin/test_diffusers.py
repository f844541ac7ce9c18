"""What the gateway knows of a pipeline before it is loaded: its abilities, its files, its memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.config.schema import Ability, Model
from greenroom.core.model import DeviceId
from greenroom.engines.base import LAUNCH, Split
from greenroom.engines.builtin.diffusers import DiffusersEngine, device_map
from greenroom.engines.builtin.transformers import TransformersEngine
from greenroom.engines.estimates.hf_folder import CONFIG_MAX_BYTES
from greenroom.engines.registry import engine_for, split_keys
from greenroom.errors import UnusableModel
from tests.samples.hf_folder import write_safetensors

ENGINE = DiffusersEngine()
BOTH = {Ability.IMAGES, Ability.IMAGE_EDITS}
MILLION = 2**20


def pipeline(folder: Path, class_name: str = "StableDiffusionXLPipeline", **files: dict[str, Any]) -> Model:
    """A pipeline with two components; `files` are the sizes of their files in millions of 4-byte numbers."""
    index = {"_class_name": class_name, "unet": ["diffusers", "U"], "vae": ["diffusers", "V"], "x": [None, None]}
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    for name in ("unet", "vae"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text("{}")
        for file, numbers in files.get(name, {"diffusion_pytorch_model.safetensors": 1}).items():
            write_safetensors(folder / name / file, {"w": zeros(numbers, "fp16" in file)})
    return Model(path=str(folder), engine="diffusers")


def zeros(millions: int, half: bool) -> Any:
    import numpy as np

    return np.zeros(millions * MILLION, np.float16 if half else np.float32)


@pytest.mark.parametrize(
    ("class_name", "abilities"),
    [
        ("StableDiffusionXLPipeline", BOTH),
        ("StableDiffusion3Pipeline", BOTH),
        ("FluxPipeline", BOTH),
        ("SanaPipeline", {Ability.IMAGES}),
        ("StableDiffusionXLInpaintPipeline", {Ability.IMAGE_EDITS}),
        ("QwenImageEditPipeline", {Ability.IMAGE_EDITS}),
    ],
)
def test_abilities_follow_from_the_class_of_the_pipeline(
    tmp_path: Path, class_name: str, abilities: set[Ability]
) -> None:
    facts = ENGINE.facts(pipeline(tmp_path, class_name))
    assert facts.abilities == abilities and facts.can_sleep and not facts.keeps_prefixes


def test_nothing_is_refused_before_it_is_known_what_it_is(tmp_path: Path) -> None:
    assert ENGINE.facts(Model(path=str(tmp_path / "none"), engine="diffusers")).abilities == BOTH
    (tmp_path / "model_index.json").write_text("[")
    model = Model(path=str(tmp_path), engine="diffusers")
    assert ENGINE.facts(model).abilities == BOTH
    assert ENGINE.estimate(model, 1) is ENGINE.estimate_asleep(model, 1) is None
    (tmp_path / "model_index.json").unlink()
    os.mkfifo(tmp_path / "model_index.json")
    assert ENGINE.facts(model).abilities == BOTH, "and a pipe does not block"


def test_names_in_an_index_that_are_no_names_are_left_out(tmp_path: Path) -> None:
    model = pipeline(tmp_path)
    usual = ENGINE.estimate(model, 1)
    index = json.loads((tmp_path / "model_index.json").read_text())
    strange = {name: ["diffusers", "U"] for name in ("a\0b", "x" * 5_000, "..", "a/b")}
    (tmp_path / "model_index.json").write_text(json.dumps(index | strange))
    assert usual is not None and ENGINE.estimate(model, 1) == usual
    assert {file.parent.name for file in ENGINE.files(model)} == {tmp_path.name, "unet", "vae"}
    assert all(ENGINE.identity(model))


def test_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    model = pipeline(tmp_path, "SanaPipeline")
    assert ENGINE.facts(model).abilities == {Ability.IMAGES}
    with (tmp_path / "model_index.json").open("a") as file:
        file.write(" " * CONFIG_MAX_BYTES)
    assert ENGINE.facts(model).abilities == BOTH, "it is unknown what it is"


def weights_mib(model: Model, **changes: Any) -> int:
    estimate = ENGINE.estimate_asleep(model.model_copy(update=changes), 1)
    assert estimate is not None
    return estimate.need.host_mib


def test_only_the_precision_that_is_loaded_counts(tmp_path: Path) -> None:
    both = {"diffusion_pytorch_model.safetensors": 4, "diffusion_pytorch_model.fp16.safetensors": 4}
    model = pipeline(tmp_path, unet=both)
    # Four millions of four bytes, one of the other component, and the rounding of an arena.
    assert weights_mib(model) == 16 + 4 + 4
    assert weights_mib(model, dtype="float16") == 8 + 2 + 4
    assert [file.name for file in ENGINE.files(model) if file.parent.name == "unet"] == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]


def test_a_component_that_has_half_precision_alone_is_counted(tmp_path: Path) -> None:
    model = pipeline(tmp_path, unet={"diffusion_pytorch_model.fp16-00001-of-00001.safetensors": 4})
    assert weights_mib(model) == 8 + 4 + 4


def test_a_file_with_a_bad_header_counts_by_its_size(tmp_path: Path) -> None:
    model = pipeline(tmp_path)
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"x" * 3 * MILLION)
    assert weights_mib(model) == 3 + 4 + 1 + 4


def test_ready_takes_room_for_decoding_a_picture_of_the_usual_size(tmp_path: Path) -> None:
    model = pipeline(tmp_path)
    (tmp_path / "unet" / "config.json").write_text('{"sample_size": 128}')
    small = ENGINE.estimate(model, 1)
    (tmp_path / "vae" / "config.json").write_text('{"block_out_channels": [128, 256, 512, 512], "force_upcast": true}')
    large = ENGINE.estimate(model, 1)
    assert small is not None and large is not None
    # 1,024 × 1,024 pixels, 256 numbers of 4 bytes each, four times over.
    assert large.need.gpu_mib - small.need.gpu_mib == 4_096
    assert large.need.host_mib == small.need.host_mib == 12
    host = ENGINE.estimate(model, 0)
    assert host is not None and host.need.gpu_mib == 0 and host.need.host_mib > 4_096


def test_its_worker_is_another_program_than_that_of_transformers(tmp_path: Path) -> None:
    model = pipeline(tmp_path)
    key = ENGINE.host_key("s", model, None)
    assert key != TransformersEngine().host_key("s", Model(path=str(tmp_path)), None)
    argv = ENGINE.launch_worker(key, "/run/s").argv
    assert argv[1:] == (LAUNCH, "torch_host.main", "--program", "diffusers", "--control", "/run/s")
    options = ENGINE.options(model, (), {})
    assert (options["device"], options["dtype"], options["trust_remote_code"]) == ("cpu", "auto", False)
    assert ENGINE.concurrency(model) == 1


def test_a_folder_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusableModel, match="diffusers serves folders"):
        ENGINE.options(Model(path=str(tmp_path / "file"), engine="diffusers"), None, {})
    with pytest.raises(UnusableModel, match="there is no folder"):
        ENGINE.options(Model(path=str(tmp_path / "none"), engine="diffusers"), None, {})


def test_a_pipeline_given_to_transformers_is_told_apart(tmp_path: Path) -> None:
    pipeline(tmp_path)
    with pytest.raises(UnusableModel, match="engine: diffusers"):
        TransformersEngine().options(Model(path=str(tmp_path)), None, {})


def test_category_diffusion_chooses_it(tmp_path: Path) -> None:
    assert engine_for(Model(path=str(tmp_path), category="diffusion")) is engine_for(pipeline(tmp_path))


def test_what_is_missing_is_said_with_what_to_type(tmp_path: Path) -> None:
    said = ENGINE.missing(pipeline(tmp_path))
    assert said is not None and "torch" in said and "'greenroom[diffusers]'" in said


def test_components_are_whole_parts_that_may_be_spread(tmp_path: Path) -> None:
    model = pipeline(tmp_path, unet={"diffusion_pytorch_model.safetensors": 5})
    facts = ENGINE.facts(model)
    assert (facts.can_split, dict(facts.parts)) == (Split.PARTS, {"unet": 20, "vae": 4})
    estimate = ENGINE.estimate(model, 1)
    assert estimate is not None and estimate.need.gpu_mib > 24 and facts.beside_mib > 0
    for whole in (model.model_copy(update=keys) for keys in ({"device_map": "one"}, {"device": "cpu"})):
        assert ENGINE.facts(whole).can_split is None
    assert split_keys(facts)["parts"] == (20, 4)


def test_a_pipeline_of_one_component_cannot_be_spread(tmp_path: Path) -> None:
    model = pipeline(tmp_path, vae={})
    assert ENGINE.facts(model).can_split is None and not split_keys(ENGINE.facts(model))["can_split"]


def test_the_worker_is_told_which_gpu_holds_each_component(tmp_path: Path) -> None:
    model = pipeline(tmp_path, unet={"diffusion_pytorch_model.safetensors": 5})
    a, b = DeviceId("GPU-a"), DeviceId("GPU-b")
    assert ENGINE.options(model, (a, b), {a: 104, b: 120})["device_map"] == {"unet": 1, "vae": 0}
    assert ENGINE.options(model, (a, b), {a: 120, b: 104})["device_map"] == {"unet": 0, "vae": 1}
    assert "device_map" not in ENGINE.options(model, (a,), {a: 124})


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1),
    st.lists(st.integers(0, 99), min_size=2, max_size=4),
)
def test_every_component_has_a_gpu_whatever_the_shares(parts: dict[str, int], shares: list[int]) -> None:
    found = device_map(parts, shares)
    assert found.keys() == parts.keys() and set(found.values()) <= set(range(len(shares)))
