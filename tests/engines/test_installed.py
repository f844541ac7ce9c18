"""What an engine lacks is known from files, said with what to type, and never guessed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from greenroom.config.schema import Model
from greenroom.engines.identity import packages_missing
from greenroom.engines.registry import engine_for


def environment(home: Path, *packages: str, system: bool = False) -> str:
    """A virtual environment with these packages, as far as files tell."""
    site = home / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for name in packages:
        (site / f"{name}-1.0.dist-info").mkdir()
    (home / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = {str(system).lower()}\n")
    (home / "bin").mkdir()
    (home / "bin" / "python").symlink_to(sys.executable)
    return str(home / "bin" / "python")


def lacks(python: str | None, *packages: str, **keys: dict[str, str]) -> str | None:
    return packages_missing(Model(path="/m", python=python, **keys), packages, "transformers")


def test_our_own_python_is_asked_without_importing_anything() -> None:
    assert lacks(None, "json", "pytest") is None
    install = f"{sys.executable} -m pip install 'greenroom[transformers]'"
    assert lacks(None, "json", "no_such_package") == (
        f"no_such_package is not installed in {sys.executable}; type: {install}"
    )
    assert "torch" not in sys.modules


def test_a_package_is_looked_for_by_the_name_it_is_imported_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert lacks(None, "pillow") is None


def test_a_virtual_environment_tells_what_it_lacks(tmp_path: Path) -> None:
    python = environment(tmp_path, "torch", "Jinja2")
    assert lacks(python, "torch", "jinja2") is None
    told = lacks(python, "torch", "transformers", "h11")
    assert told == (f"transformers, h11 are not installed in {python}; type: {python} -m pip install transformers h11")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["pyvenv.cfg", "lib/python3.11/site-packages/x.pth"])
def test_pipes_in_an_environment_block_nothing(tmp_path: Path, name: str) -> None:
    python = environment(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert lacks(python, "torch") is None, "only a start can tell"


def test_nothing_is_said_where_packages_may_lie_elsewhere(tmp_path: Path) -> None:
    assert lacks(environment(tmp_path / "a", system=True), "torch") is None
    assert lacks(environment(tmp_path / "b"), "torch", env={"PYTHONPATH": "/elsewhere"}) is None
    (tmp_path / "c").symlink_to(sys.executable)
    assert lacks(str(tmp_path / "c"), "torch") is None


def test_a_python_that_is_not_there_is_named() -> None:
    assert lacks("/no/python", "torch") == "there is no Python /no/python; correct `python`"


def test_engines_say_what_they_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    python = environment(tmp_path)
    said = {
        "llamacpp": Model(path="/m.gguf", python=python),
        "transformers": Model(path="/m", python=python),
        "command": Model(cmd="no-such-program ${PORT}"),
    }
    told = {name: engine_for(model).missing(model) for name, model in said.items()}
    assert told["llamacpp"] == f"xllamacpp is not installed in {python}; type: {python} -m pip install xllamacpp"
    assert told["transformers"] is not None and "torch, transformers, h11, jinja2 are not" in told["transformers"]
    assert told["command"] == "there is no program no-such-program; install it or correct `cmd`"
    for model in (Model(path="/m.gguf"), Model(cmd="sh ${PORT}"), Model(cmd="./relative ${PORT}")):
        assert engine_for(model).missing(model) is None


@pytest.mark.parametrize(
    ("line", "is_known"),
    [("/opt/other/site-packages", False), ("import sys  # at its start", True), ("# nothing", True), ("", True)],
)
def test_an_environment_that_names_further_folders_is_left_to_its_start(
    tmp_path: Path, line: str, is_known: bool
) -> None:
    python = environment(tmp_path)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "more.pth").write_text(f"{line}\n")
    assert (lacks(python, "torch") is not None) == is_known
