"""Which engines are said to be there, where, and what is to be typed for those that are not."""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.commands import engines as engines_module
from greenroom.cli.commands.engines import PACKAGES_OF, InstalledPackages, RequiredPackage, ask_program, ask_python
from tests.cli.command import Cli
from tests.config.test_plugins import install

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration lies here, and no llama-server is found by its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def program(path: Path, says: str) -> Path:
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(says)}\n")
    path.chmod(0o755)
    return path


def python_with(path: Path, **versions: str) -> Path:
    """Answers like a Python that has these packages."""
    return program(path, json.dumps({"python": "3.12.1", "found": versions}))


def engines(cli: Cli, *options: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cli("engines", "--json", *options).json["engines"]
    return found


def configured(path: Path, models: str) -> str:
    path.write_text(f"models:\n{models}")
    return str(path)


def test_without_a_configuration_every_engine_has_its_usual_place(cli: Cli) -> None:
    found = {row["engine"]: row for row in engines(cli)}
    assert set(found) >= {"llamacpp", "transformers", "vllm", "sglang", "whisper", "command"}
    assert found["llamacpp"]["where"] == found["transformers"]["where"] == sys.executable
    assert found["llamacpp"]["installed"] and found["llamacpp"]["versions"]["xllamacpp"]
    assert all(row["models"] == [] for row in found.values())


@pytest.mark.slow
def test_it_is_said_why_no_models_are_named(tmp_path: Path, cli: Cli) -> None:
    assert cli("engines").err == "no configuration here, so no models; name one with --config\n"
    file = configured(tmp_path / "greenroom.yaml", "  a: {cmd: sh, memory_mib: 1, pined: true}\n")
    assert "greenroom.yaml cannot be used" in cli("engines").err
    configured(tmp_path / "greenroom.yaml", "  a: {cmd: 'sh --port ${PORT}', memory_mib: 1}\n")
    for options in ([], ["--config", file]):
        assert cli("engines", *options).err == ""


def test_each_python_is_asked_for_itself(tmp_path: Path, cli: Cli) -> None:
    whole = python_with(
        tmp_path / "whole", torch="2.13.0+cpu", transformers="5.22.2", h11="0.16.0", jinja2="3.1.6", llguidance="1.9"
    )
    old = python_with(tmp_path / "old", torch="2.9.1", transformers="5.22.2", h11="0.16.0", jinja2="3.1.6")
    models = "".join(
        f"  {name}: {{engine: transformers, path: m, python: {python}}}\n"
        for name, python in (("a", whole), ("b", old), ("c", whole), ("d", "/nowhere/python"))
    )
    rows = [row for row in engines(cli, "-c", configured(tmp_path / "c.yaml", models)) if row["models"]]
    assert [(row["where"], row["installed"], row["models"]) for row in rows] == [
        (str(whole), True, ["a", "c"]),
        (str(old), False, ["b"]),
        ("/nowhere/python", False, ["d"]),
    ]
    assert (rows[0]["python"], rows[0]["missing"], rows[0]["install"]) == ("3.12.1", [], None)
    assert [one["package"] for one in rows[1]["missing"]] == ["torch", "llguidance"]
    assert rows[1]["install"] == f"{old} -m pip install 'torch>=2.11' 'llguidance>=1.0'"
    assert rows[2]["why"] == "there is no Python /nowhere/python" and rows[2]["install"] is None


def test_people_are_told_what_is_missing_what_for_and_what_to_type(tmp_path: Path, cli: Cli) -> None:
    python = python_with(tmp_path / "python", torch="2.9.1", transformers="5.22.2", h11="0.16.0", llguidance="1.9")
    config = configured(
        tmp_path / "c.yaml", f"  a: {{engine: transformers, path: m, python: {python}}}\n  b: {{path: b.gguf}}\n"
    )
    lines = cli("engines", "-c", config).lines
    assert lines[0].split() == ["ENGINE", "INSTALLED", "VERSION", "MODELS", "WHERE"]
    versions = "torch=2.9.1,transformers=5.22.2,h11=0.16.0,llguidance=1.9"
    assert ["transformers", "no", versions, "a", str(python)] in [line.split() for line in lines]
    assert f"transformers: torch 2.9.1 is too old, 2.11 will do (computes, on GPUs and on the CPU) in {python}" in lines
    assert f"transformers: jinja2 is missing (renders chat templates) in {python}" in lines
    assert f"  {python} -m pip install 'torch>=2.11' 'jinja2>=3.1.6'" in lines


def test_what_only_some_calls_miss_is_said_and_does_not_make_it_unusable(tmp_path: Path, cli: Cli) -> None:
    python = python_with(tmp_path / "python", torch="2.11.0", transformers="5.17.0", h11="0.16.0", jinja2="3.1.6")
    config = configured(tmp_path / "c.yaml", f"  a: {{engine: transformers, path: m, python: {python}}}\n")
    assert "transformers  mostly" in cli("engines", "-c", config).out
    (row,) = [row for row in engines(cli, "-c", config) if row["engine"] == "transformers"]
    assert row["installed"] and [one["package"] for one in row["missing"]] == ["llguidance"]


def test_our_own_python_is_told_by_our_own_extra(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    # This Python has them, and a command cannot be told otherwise.
    monkeypatch.setattr(engines_module, "ask_python", lambda python, wanted: InstalledPackages("3.11.2"))
    found = {row["engine"]: row["install"] for row in engines(cli)}
    assert found["transformers"] == f"{sys.executable} -m pip install 'greenroom[transformers]'"
    assert found["llamacpp"] == f"{sys.executable} -m pip install 'greenroom[llamacpp]', or put llama-server on PATH"


def test_a_binary_of_llama_cpp_is_asked_for_its_version(tmp_path: Path, cli: Cli) -> None:
    binary = program(tmp_path / "llama-server", "version: 6543 (abc) built with cc")
    config = configured(
        tmp_path / "c.yaml", f"  a: {{path: a.gguf, program: {binary}}}\n  b: {{path: b.gguf, program: nowhere}}\n"
    )
    rows = {row["models"][0]: row for row in engines(cli, "-c", config) if row["models"]}
    assert rows["a"]["versions"] == {"llama-server": "6543"} and rows["a"]["installed"]
    assert not rows["b"]["installed"] and "nowhere" in rows["b"]["why"]


def test_commands_are_programs_that_are_there_or_not(tmp_path: Path, cli: Cli) -> None:
    config = configured(
        tmp_path / "c.yaml", '  a: {cmd: "sh --port ${PORT}"}\n  b: {cmd: "no-such-program --port ${PORT}"}\n'
    )
    rows = {row["models"][0]: row for row in engines(cli, "-c", config) if row["models"]}
    assert rows["a"]["installed"] and rows["a"]["where"].endswith("/sh")
    assert not rows["b"]["installed"] and "no-such-program" in rows["b"]["why"]


def test_installations_of_comfyui_are_there_or_not(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "main.py").touch()
    (tmp_path / "empty").mkdir()
    own = "workflow: w.json, inputs: {prompt: 6.text}"
    models = {"there": "path: comfy", "empty": "path: empty", "gone": "cmd: '/nowhere/comfy ${PORT}'"}
    lines = [f"  {name}: {{engine: comfyui, {place}, {own}}}" for name, place in models.items()]
    (tmp_path / "c.yaml").write_text("models:\n" + "\n".join(lines) + "\n")
    rows = cli("engines", "--json", "--config", tmp_path / "c.yaml").json["engines"]
    found = {row["models"][0]: row for row in rows if row["engine"] == "comfyui"}
    assert {name: row["installed"] for name, row in found.items()} == {"there": True, "empty": False, "gone": False}
    assert found["there"]["where"] == str(tmp_path / "comfy")
    assert "/nowhere/comfy" in found["gone"]["why"]


def test_a_file_that_is_named_must_be_right(tmp_path: Path, cli: Cli) -> None:
    assert "missing.yaml" in cli("engines", "--config", tmp_path / "missing.yaml", status=1).err


def test_a_real_python_says_what_it_has() -> None:
    found = ask_python(
        sys.executable, [RequiredPackage("pytest", "8.4", "tests"), RequiredPackage("no-such-package", "1", "nothing")]
    )
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert set(found.versions) == {"pytest"}
    assert [
        one.name for one in found.lacks([RequiredPackage("pytest", "8.4", ""), RequiredPackage("pytest", "999", "")])
    ] == ["pytest"]


@pytest.mark.parametrize("says", ["", "hello", "[]", '{"python": 3}'])
def test_what_does_not_answer_like_a_python_is_none(says: str, tmp_path: Path) -> None:
    found = ask_python(str(program(tmp_path / "odd", says)), PACKAGES_OF["transformers"])
    assert found.python is None and "does not answer like a Python" in str(found.why)


def test_one_that_hangs_is_not_waited_for_without_end(tmp_path: Path) -> None:
    path = tmp_path / "hangs"
    path.write_text("#!/bin/sh\nexec sleep 60\n")
    path.chmod(0o755)
    assert ask_python(str(path), PACKAGES_OF["transformers"], max_s=0.2).why is not None
    assert ask_program(str(path), max_s=0.2) is None


def test_the_extra_is_what_the_command_says_to_install() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, packages in PACKAGES_OF.items():
        assert extras[name] == [one.requirement for one in packages]


def test_an_engine_of_another_package_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    code = """
from greenroom.engines.base import ProcessEngine

class Forge(ProcessEngine):
    name = "forge"
    def missing(self, model):
        return "there is no anvil; type: apt install anvil"
    def launch(self, model_id, model, place):
        raise NotImplementedError
"""
    install(site, "[greenroom.engines]\nforge = acme_forge:Forge\nbent = acme_gone:Bent\n", acme_forge=code)
    config = configured(tmp_path / "c.yaml", "  a: {engine: forge}\n")
    rows = {row["engine"]: row for row in engines(cli, "-c", config)}
    assert (rows["forge"]["installed"], rows["forge"]["versions"]) == (False, {"acme": "1.0"})
    assert rows["forge"]["why"] == "there is no anvil; type: apt install anvil"
    assert "'bent' of acme_gone:Bent does not load" in rows["bent"]["why"]
    assert "warning: models.a: there is no anvil; type: apt install anvil" in cli("check", config).out
