"""A file cut off or damaged anywhere loads to something valid or is refused; nothing else can happen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.config.generate import ROOT
from greenroom.config.loader import load
from greenroom.config.schema import Config
from greenroom.errors import ConfigError

RICH = b"""\
macros: &m
  dir: /m
  serve: "s --port ${PORT} --name ${MODEL_ID}"
server:
  port: ${env.P}
  api_keys: [{name: a, key: "${env.K}"}, {name: b, sha256: HASH}]
gpus: [{memory_mib: 8192}, {memory_mib: 0x2000, margin_mib: 1_0}]
models:
  "org/chat": &chat
    path: ${dir}/\xc3\xbc-chat.gguf
    aliases: [default, 'x y']
    metadata: {a: [1, 2.5, null, {b: "\\u00e9"}]}
    set_params: {temperature: .5}
  other:
    <<: *chat
    aliases: []
    priority: low
  any:
    cmd: >
      ${serve}
      --x 'y z'
    cmd_stop: [kill, "${PID}"]
""".replace(b"HASH", b"0" * 64)
ENVIRON = {"P": "8080", "K": "k"}
EXAMPLE = (ROOT / "config.example.yaml").read_bytes()


def outcome(file: Path, data: bytes) -> Config | str:
    file.write_bytes(data)
    try:
        return load(file, ENVIRON).config
    except ConfigError as refused:
        assert refused.message.startswith(str(file))
        assert len(refused.message.splitlines()) <= 21
        return refused.message


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("half") / "my.yaml"


def test_the_whole_files_load(file: Path) -> None:
    assert isinstance(outcome(file, RICH), Config)
    assert isinstance(outcome(file, EXAMPLE), Config)


def test_file_cut_off_at_any_byte_loads_to_something_valid_or_is_refused(file: Path) -> None:
    ends = [outcome(file, RICH[:end]) for end in range(len(RICH))]
    assert any(isinstance(end, Config) for end in ends) and any(isinstance(end, str) for end in ends)
    for config in (end for end in ends if isinstance(end, Config)):
        assert all(model.engine for model in config.models.values())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(end=st.integers(0, len(EXAMPLE)))
def test_example_cut_off_anywhere_loads_or_is_refused(file: Path, end: int) -> None:
    outcome(file, EXAMPLE[:end])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start=st.integers(0, len(RICH)),
    removed=st.integers(0, 30),
    put=st.one_of(st.binary(max_size=8), st.text("[]{}:,&*!|>'\"#%@`$-?<~ \n\t0aé", max_size=8).map(str.encode)),
)
def test_file_damaged_anywhere_loads_or_is_refused(file: Path, start: int, removed: int, put: bytes) -> None:
    outcome(file, RICH[:start] + put + RICH[start + removed :])


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=60))
def test_any_text_loads_or_is_refused(file: Path, text: str) -> None:
    outcome(file, text.encode("utf-8", "surrogatepass"))
