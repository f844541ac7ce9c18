"""What the engine `whisper` says of a model, from its files alone, and how its program is started."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

from greenroom.config import loader
from greenroom.config.schema import Ability, Model
from greenroom.engines.base import LaunchPlace
from greenroom.engines.builtin.whisper import PROGRAM_MIB, SOUND_MIB, WhisperEngine, is_multilingual, stored_type
from greenroom.engines.registry import engine_for
from greenroom.errors import LoadFailed, UnusableModel
from tests.models import tiny_ears

ENGINE = WhisperEngine()
PLACE = LaunchPlace({}, socket="/run/s", gpus=())


def described(path: Path | str, **keys: object) -> Model:
    return Model.model_validate({"engine": "whisper", "path": str(path), **keys})


def loaded(tmp_path: Path, model: str) -> Model:
    (tmp_path / "my.yaml").write_text(f"models: {{q: {model}}}\n")
    return loader.load(tmp_path / "my.yaml").config.models["q"]


def weights(folder: Path, kind: int, size: int) -> None:
    """A model.bin as CTranslate2 begins it: one number, then one matrix of this type."""
    folder.mkdir(parents=True, exist_ok=True)

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    head = struct.pack("<I", 6) + name("WhisperSpec") + struct.pack("<II", 3, 2)
    number = name("decoder/alignment_heads") + struct.pack("<BBI", 0, 2, 2) + b"\0\0"
    matrix = name("decoder/embeddings/weight") + struct.pack("<BIIBI", 2, 1, size, kind, size)
    with open(folder / "model.bin", "wb") as file:
        file.write(head + number + matrix)
        file.truncate(size)


# --- abilities ------------------------------------------------------------------------------------------------------


def test_only_a_model_of_many_languages_translates(tmp_path: Path) -> None:
    both, one = tiny_ears("alpha speaks"), tiny_ears("english only", multilingual=False)
    assert ENGINE.facts(described(both)).abilities == {Ability.TRANSCRIPTION, Ability.TRANSLATION}
    assert ENGINE.facts(described(one)).abilities == {Ability.TRANSCRIPTION}
    assert is_multilingual(tmp_path), "unknown until it is there"


@pytest.mark.parametrize(
    ("name", "text", "translates"),
    [
        ("vocabulary.txt", "a\nb\n", False),
        ("vocabulary.txt", "a\n\nb\n", True),
        ("vocabulary.json", json.dumps(["a", '"']), False),
        ("vocabulary.json", "{broken", True),
        ("vocabulary.json", "7", False),
    ],
)
def test_vocabulary_of_any_form_tells(tmp_path: Path, name: str, text: str, translates: bool) -> None:
    (tmp_path / name).write_text(text)
    assert is_multilingual(tmp_path) is translates


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["vocabulary.json", "vocabulary.txt", "model.bin", "refs/main"])
def test_pipes_in_its_folder_block_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    model = described(tmp_path)
    assert ENGINE.facts(model).abilities == {Ability.TRANSCRIPTION, Ability.TRANSLATION}
    assert ENGINE.estimate(model, 1) is None


def test_it_sleeps_on_gpus_alone() -> None:
    facts = ENGINE.facts(described(tiny_ears("alpha speaks")))
    assert facts.can_sleep and facts.sleeps_off_gpu_only


# --- memory ---------------------------------------------------------------------------------------------------------


def test_type_of_the_weights_is_read_from_the_file(tmp_path: Path) -> None:
    assert stored_type(tiny_ears("alpha speaks") / "model.bin") == "int8"
    weights(tmp_path, 4, 1000)
    assert stored_type(tmp_path / "model.bin") == "float16"
    for broken in (b"", b"\6\0\0\0", b"\6\0\0\0\xff\xff", b"\6\0\0\0\0\0" + b"\xff" * 40):
        (tmp_path / "model.bin").write_bytes(broken)
        assert stored_type(tmp_path / "model.bin") == "float32"


@pytest.mark.parametrize(
    ("keys", "gpus", "weights_mib"),
    [
        ({}, 0, 200),
        ({}, 1, 100),
        ({"compute_type": "int8_float16"}, 1, 50),
        ({"compute_type": "int8"}, 0, 50),
        ({"compute_type": "float32"}, 1, 200),
    ],
)
def test_weights_take_as_much_as_they_are_computed_with(
    tmp_path: Path, keys: dict[str, str], gpus: int, weights_mib: int
) -> None:
    weights(tmp_path, 4, 100 * 2**20)
    estimate = ENGINE.estimate(described(tmp_path, **keys), gpus)
    assert estimate is not None
    (found,) = (part for part in estimate.parts if part.what == "weights")
    assert (found.gpu_mib, found.host_mib) == ((weights_mib, 0) if gpus else (0, weights_mib))


def test_each_request_at_once_has_its_own_sound(tmp_path: Path) -> None:
    weights(tmp_path, 1, 2**20)
    one, two = (ENGINE.estimate(described(tmp_path, concurrency=count), 0) for count in (1, 2))
    assert one is not None and two is not None
    assert one.need.host_mib == 1 + PROGRAM_MIB + SOUND_MIB
    assert two.need.host_mib - one.need.host_mib == SOUND_MIB
    asleep = ENGINE.estimate_asleep(described(tmp_path), 1)
    assert asleep is not None and asleep.need.host_mib == 1 + PROGRAM_MIB
    assert ENGINE.estimate(described(tmp_path / "none"), 0) is None


def test_identity_is_that_of_the_files(tmp_path: Path) -> None:
    weights(tmp_path, 1, 1000)
    before = ENGINE.identity(described(tmp_path))
    weights(tmp_path, 1, 2000)
    assert ENGINE.identity(described(tmp_path)) != before
    assert [file.name for file in ENGINE.files(described(tmp_path))] == ["model.bin"]


# --- start ----------------------------------------------------------------------------------------------------------


def test_program_is_told_all_it_needs(tmp_path: Path) -> None:
    weights(tmp_path, 1, 1000)
    model = described(tmp_path, threads=3, concurrency=2, compute_type="int8", python=sys.executable)
    launch = ENGINE.launch("ear", model, PLACE)
    python, _, program, *options = launch.command.argv
    assert (python, program, launch.check_path) == (sys.executable, "whisper.main", "/health")
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--socket": "/run/s",
        "--model": str(tmp_path),
        "--device": "cpu",
        "--compute-type": "int8",
        "--beam-size": "5",
        "--concurrency": "2",
        "--threads": "3",
    }
    assert launch.command.env["HF_HUB_OFFLINE"] == "1"


def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match="there is no folder"):
        ENGINE.launch("ear", described(tmp_path / "none"), PLACE)
    with pytest.raises(UnusableModel, match=r"no model\.bin"):
        ENGINE.launch("ear", described(tmp_path), PLACE)
    with pytest.raises(LoadFailed, match="no Python"):
        ENGINE.launch("ear", described(tmp_path, python="/no/python"), PLACE)


def test_what_is_missing_is_told_with_what_to_type(tmp_path: Path) -> None:
    assert ENGINE.missing(described(tmp_path)) is None
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "env" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    said = ENGINE.missing(described(tmp_path, python=str(python)))
    assert (
        said == f"faster_whisper, h11 are not installed in {python}; type: {python} -m pip install faster_whisper h11"
    )


# --- the configuration ----------------------------------------------------------------------------------------------


def test_folder_with_such_a_model_needs_no_engine(tmp_path: Path) -> None:
    shutil.copytree(tiny_ears("alpha speaks"), tmp_path / "ears")
    assert loaded(tmp_path, "{path: ears}").engine == "whisper"
    assert loaded(tmp_path, "{path: somewhere, category: transcription}").engine == "whisper"


def test_size_is_a_folder_of_the_hub_unless_there_is_one_of_that_name(tmp_path: Path) -> None:
    model = loaded(tmp_path, "{engine: whisper, path: large, env: {HF_HUB_CACHE: /cache}}")
    assert model.path == "/cache/models--Systran--faster-whisper-large-v3"
    assert isinstance(engine_for(model), WhisperEngine)
    english = loaded(tmp_path, "{engine: whisper, path: tiny.en, env: {HF_HOME: /home}}")
    assert english.path == "/home/hub/models--Systran--faster-whisper-tiny.en"
    os.mkdir(tmp_path / "large")
    assert loaded(tmp_path, "{engine: whisper, path: large}").path == str(tmp_path / "large")
    assert loaded(tmp_path, "{engine: transformers, path: tiny}").path == str(tmp_path / "tiny")


def test_check_says_that_a_size_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("models: {q: {engine: whisper, path: base, env: {HF_HOME: /none}}}\n")
    warnings = loader.load(tmp_path / "my.yaml").warnings
    assert "models.q: path: there is no folder /none/hub/models--Systran--faster-whisper-base" in warnings
