"""Paths start at the file's folder; what will not work is said, not refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.config.loader import load
from greenroom.config.problems import open_door, problems
from greenroom.config.schema import Config, Server
from greenroom.errors import ConfigError
from greenroom.process.state_dir import StateDir

from .conftest import Complaints, Loads


def test_relative_paths_start_at_the_folder_of_the_file(
    loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = loads("""\
        state_dir: ../state
        models:
          a: {path: m/a.gguf, cwd: ., program: bin/llama-server, python: ~/venv/bin/python}
          b: {path: ~/b.gguf, program: llama-server, python: python3}
          c: {path: /m/../c.gguf}
          d: {cmd: "./d ${PORT}"}
        """)
    a, b, c, d = (config.models[name] for name in "abcd")
    assert config.state_dir == str(tmp_path.parent / "state")
    assert (a.path, a.cwd, a.program) == (f"{tmp_path}/m/a.gguf", str(tmp_path), f"{tmp_path}/bin/llama-server")
    assert a.python == "/home/someone/venv/bin/python"
    assert (b.path, b.program, b.python) == ("/home/someone/b.gguf", "llama-server", "python3")
    assert (c.path, c.cwd, c.program, c.python) == ("/c.gguf", None, None, None)
    assert d.cmd == "./d ${PORT}"


def test_default_state_directory_is_in_the_home(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert loads("log: {}\n").state_dir == "/home/someone/.local/state/greenroom"


def test_missing_files_are_warnings_of_a_load_that_succeeds(tmp_path: Path) -> None:
    (tmp_path / "there.gguf").touch()
    (tmp_path / "no-program").touch(mode=0o600)
    (tmp_path / "my.yaml").write_text(
        "models:\n"
        "  a: {path: there.gguf, cwd: ., program: sh}\n"
        "  b: {path: gone.gguf, cwd: gone, program: ./no-program, python: gone/python}\n"
        "  c: {path: .gguf}\n"
        "  d: {cmd: 'no-such-server ${PORT}'}\n"
        "  e: {cmd: 'sh ${PORT}'}\n"
        "  f: {cmd: './gone ${PORT}', cwd: .}\n"
        "  g: {cmd: './gone ${PORT}'}\n"
        "  h: {cmd: 'sh ${PORT}', env: {PATH: /gone}}\n"
    )
    assert load(tmp_path / "my.yaml", {}).warnings == (
        f"models.b: path: there is no file {tmp_path}/gone.gguf",
        f"models.b: cwd: there is no directory {tmp_path}/gone",
        f"models.b: program: there is no program {tmp_path}/no-program",
        f"models.b: python: there is no program {tmp_path}/gone/python",
        f"models.c: path: there is no file {tmp_path}/.gguf",
        "models.d: cmd: there is no program no-such-server on PATH",
        "models.f: cmd: there is no program ./gone",
        "models.h: cmd: there is no program sh on PATH",
    )


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("gpus: [{memory_mib: 1512}, {memory_mib: 1512}]", []),
        ("gpus: [{memory_mib: 1512}]", ["pinned models (a, b) need 1,600 MiB together, the budget is 1,000 MiB"]),
        (
            "host: {memory_mib: 700, margin_mib: 100}",
            [
                "models.a: memory_mib: 800 MiB can never fit into the budget of 600 MiB",
                "models.b: memory_mib: 800 MiB can never fit into the budget of 600 MiB",
                "pinned models (a, b) need 1,600 MiB together, the budget is 600 MiB",
            ],
        ),
        ("log: {}", []),
    ],
)
def test_more_than_the_budget_is_told(loads: Loads, budget: str, told: list[str]) -> None:
    config = loads(f"""\
        {budget}
        models:
          a: {{cmd: "sh ${{PORT}}", pinned: true, memory_mib: 800}}
          b: {{cmd: "sh ${{PORT}}", pinned: true, memory_mib: 800}}
          c: {{cmd: "sh ${{PORT}}", memory_mib: 500}}
          d: {{cmd: "sh ${{PORT}}", pinned: true}}
        """)
    # d is pinned too, but its need is not known yet.
    assert [text.replace("(a, b, d)", "(a, b)") for text in problems(config)] == told


def test_a_model_on_the_host_is_measured_against_the_host_alone(loads: Loads) -> None:
    config = loads("""\
        gpus: [{memory_mib: 1512}]
        models:
          a: {cmd: "sh ${PORT}", pinned: true, memory_mib: 1500, devices: [host]}
          b: {cmd: "sh ${PORT}", pinned: true, memory_mib: 1500, device: cpu}
          c: {cmd: "sh ${PORT}", memory_mib: 1500}
          d: {path: /dev/null, engine: llamacpp, memory_mib: 1500, n_gpu_layers: 0}
        """)
    assert problems(config) == [
        "models.d: path: /dev/null is no file",
        "models.c: memory_mib: 1,500 MiB can never fit into the budget of 1,000 MiB",
    ]


def test_a_path_of_the_wrong_kind_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").mkdir()
    (tmp_path / "folder").write_text("")
    (tmp_path / "my.yaml").write_text("models:\n  a: {path: a.gguf}\n  b: {path: folder}\n")
    assert load(tmp_path / "my.yaml", {}).warnings == (
        f"models.a: path: {tmp_path}/a.gguf is no file",
        f"models.b: path: {tmp_path}/folder is no folder",
    )


def test_a_state_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    (tmp_path / "my.yaml").write_text("state_dir: state\n")
    assert load(tmp_path / "my.yaml", {}).warnings == (f"state_dir: {tmp_path}/state is no directory",)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("")
    (tmp_path / "my.yaml").write_text("state_dir: home\n")
    (told,) = load(tmp_path / "my.yaml", {}).warnings
    assert told == f"state_dir: {tmp_path}/home holds other files; a state directory must be empty or new at first"
    with pytest.raises(ConfigError, match="holds other files"):
        StateDir.open(tmp_path / "home")
    StateDir.open(tmp_path / "used").close()
    (tmp_path / "used" / "notes.txt").write_text("")
    (tmp_path / "my.yaml").write_text("state_dir: used\n")
    assert load(tmp_path / "my.yaml", {}).warnings == ()
    (tmp_path / "my.yaml").write_text("state_dir: not-there-yet\n")
    assert load(tmp_path / "my.yaml", {}).warnings == ()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("loop", "Too many levels of symbolic links"),
        ("loop/below", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
        ("x/" * 2_100, "File name too long"),
    ],
)
def test_a_state_directory_that_cannot_be_reached_is_told(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "my.yaml").write_text(f"state_dir: {name}\n")
    (told,) = load(tmp_path / "my.yaml", {}).warnings
    assert told.startswith("state_dir: ") and told.endswith(f" cannot be used: {why}")
    with pytest.raises(ConfigError, match=r"cannot be used|cannot be made"):
        StateDir.open(tmp_path / name)


def test_empty_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "my.yaml").write_text("models: {a: {path: empty}}\n")
    assert load(tmp_path / "my.yaml", {}).warnings == (f"models.a: path: {tmp_path}/empty is empty",)


def test_folder_of_a_pipeline_tells_its_engine(tmp_path: Path) -> None:
    (tmp_path / "sdxl").mkdir()
    (tmp_path / "sdxl" / "model_index.json").write_text("{}")
    (tmp_path / "my.yaml").write_text("models: {a: {path: sdxl}, b: {path: sdxl, engine: transformers}}\n")
    models = load(tmp_path / "my.yaml", {}).config.models
    assert (models["a"].engine, models["b"].engine) == ("diffusers", "transformers")


def test_device_that_is_not_there_is_told(loads: Loads) -> None:
    config = loads("gpus: [{memory_mib: 999}]\nmodels: {a: {cmd: 'sh ${PORT}', devices: [gpu0, gpu1, host]}}\n")
    assert problems(config) == ["models.a: devices: there is no gpu1 among gpus"]


def test_gpus_chosen_behind_the_planners_back_are_told(loads: Loads) -> None:
    config = loads("models: {a: {cmd: 'sh ${PORT}', env: {CUDA_VISIBLE_DEVICES: '1'}}}\n")
    assert [text.partition(" wins")[0] for text in problems(config)] == ["models.a: env: CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "a.localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert open_door(Config(server=Server(host=host))) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_other_addresses_need_keys_or_an_explicit_word(loads: Loads, host: str) -> None:
    refused = open_door(Config(server=Server(host=host)))
    assert (refused or "").startswith(f"server.host: {host} can be reached by others")
    assert open_door(Config(server=Server(host=host, insecure=True))) is None
    keyed = loads(f"server: {{host: '{host}', api_keys: [{{name: a, key: b, admin: true}}]}}\n")
    assert open_door(keyed) is None
    assert problems(keyed) == []
    (told,) = problems(signed := loads(f"server: {{host: '{host}'}}\ngovernance: {{key_path: /k}}\n"))
    assert open_door(signed) is None and "who may ask models without a key" in told
    assert len(problems(loads(f"server: {{host: '{host}'}}\n"))) == 1


def test_keys_without_an_admin_among_them_are_told_of(loads: Loads) -> None:
    (told,) = problems(loads("server: {api_keys: [{name: a, key: b}, {name: c, key: d, leases: true}]}\n"))
    assert told.startswith("server.api_keys: no key has admin: true")
    assert problems(loads("server: {api_keys: [{name: a, key: b}, {name: c, key: d, admin: true}]}\n")) == []


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ("{record_activity: a, record_events: ./b/../a}", "my.yaml:1: server.record_events: a is used by"),
        ("{record_activity: a.1, record_events: a}", "my.yaml:1: server.record_events: a.1 is used by"),
        ("{record_activity: a, record_events: a.1}", "my.yaml:1: server.record_events: a.1 is used by"),
        ("{record_events: my.yaml}", "my.yaml:1: server.record_events: my.yaml is the configuration file"),
        ("{record_activity: link/my.yaml}", "my.yaml:1: server.record_activity: my.yaml is the configuration file"),
    ],
)
def test_recordings_over_each_other_or_over_the_configuration_are_refused(
    complaints: Complaints, tmp_path: Path, server: str, told: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    [line] = complaints(f"server: {server}\n")
    assert line.startswith(told)


def test_recordings_to_files_of_their_own_are_fine(loads: Loads) -> None:
    assert loads("server: {record_activity: a, record_events: b}\n").server.record_events is not None


@pytest.mark.parametrize(
    ("path", "said"), [("gone/a.csv", "there is no directory"), ("/dev/null", "is no plain file"), ("a.csv", None)]
)
def test_recording_that_a_start_would_refuse_is_told(loads: Loads, path: str, said: str | None) -> None:
    found = problems(loads(f"server: {{record_events: {path}}}\n"))
    assert (said is None and not found) or (said is not None and said in found[0] and "record_events" in found[0])


def test_a_model_outside_of_the_roots_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "in.gguf").touch()
    (tmp_path / "out.gguf").touch()
    (tmp_path / "models" / "link.gguf").symlink_to(tmp_path / "out.gguf")
    (tmp_path / "my.yaml").write_text(
        "model_roots: [models]\n"
        "models:\n"
        "  in: {path: models/in.gguf}\n"
        "  out: {path: out.gguf}\n"
        "  link: {path: models/link.gguf}\n"
        "  program: {cmd: 'sh ${PORT}'}\n"
    )
    loaded = load(tmp_path / "my.yaml", {})
    assert loaded.config.model_roots == (str(tmp_path / "models"),)
    assert loaded.warnings == (
        f"models.out: path: {tmp_path}/out.gguf lies outside of model_roots and will not be loaded",
        f"models.link: path: {tmp_path}/models/link.gguf lies outside of model_roots and will not be loaded",
    )


def test_a_folder_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    (tmp_path / "my.yaml").write_text("models:\n  a: {path: there}\n  b: {path: gone}\n")
    assert load(tmp_path / "my.yaml", {}).warnings == (f"models.b: path: there is no folder {tmp_path}/gone",)
