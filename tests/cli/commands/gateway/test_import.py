from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.cli.command import Cli
from tests.importing.ollama_folder import OllamaFolder
from tests.models import tiny

SWAP = """
logTimeFormat: kitchen
models:
  m: {cmd: "sh -c ${env.WHAT} ${PORT}", aliases: [other]}
"""


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(SWAP)
    return path


def test_an_import_is_written_once_and_checked(swap: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    new = swap.parent / "greenroom.yaml"
    said = cli("import", "llama-swap", swap, "--write", new)
    assert said.out.splitlines()[0].startswith("logTimeFormat: not mapped: ")
    assert said.out.splitlines()[-1] == f"{new}: 1 models, 2 keys mapped" and "serve`: WHAT" in said.err
    assert "# logTimeFormat: not mapped" in new.read_text() and stat.S_IMODE(os.stat(new).st_mode) == 0o600
    monkeypatch.setenv("WHAT", "true")
    assert "m      command" in cli("check", new).out
    before = new.read_text()
    assert "exists" in cli("import", "llama-swap", swap, "--write", new, status=1).err and new.read_text() == before


def test_without_a_file_it_is_printed(swap: Path, cli: Cli) -> None:
    out = cli("import", "llama-swap", swap).out
    assert "# logTimeFormat: not mapped" in out and "aliases:" in out


def test_what_would_be_refused_is_not_written(swap: Path, cli: Cli) -> None:
    swap.write_text(SWAP + '  n: {cmd: "x ${PORT}", aliases: [other]}\n')
    new = swap.parent / "new.yaml"
    said = cli("import", "llama-swap", swap, "--write", new, status=1).err
    assert "nothing is written" in said and not new.exists()
    assert f"{swap}:{len(SWAP.splitlines()) + 1}: models.n.aliases[0]: other is already an alias of m" in said
    cli("import", "llama-swap", swap.parent / "nothing.yaml", status=1)
    cli("import", "llama-swap", swap, "--write", "/nowhere/new.yaml", status=1)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("startPort: 70000", "1: startPort: must be at most 65,535, not 70000"),
        (
            "models: {m: {cmd: 'x ${PORT}', cmdStop: \"'\"}}",
            "1: models.m.cmdStop: cannot be split into words: no closing quotation",
        ),
        (
            "models: {m: {cmd: 'x ${PORT}', concurrencyLimit: 9999999999}}",
            "1: models.m.concurrencyLimit: must be at most ",
        ),
        ("healthCheckTimeout: 1e300", "1: healthCheckTimeout: must be at most "),
        ("unloadTimeout: 1e300", "1: unloadTimeout: must be at most "),
    ],
)
def test_a_mistake_is_told_in_the_file_and_by_the_keys_of_llama_swap(
    swap: Path, line: str, told: str, cli: Cli
) -> None:
    models = "" if line.startswith("models") else "models: {m: {cmd: 'x ${PORT}'}}\n"
    swap.write_text(f"{line}\n{models}")
    assert f"{swap}:{told}" in cli("import", "llama-swap", swap, status=1).err


RULES = """
models: {m: {cmd: "x ${PORT}"}}
routing:
  router:
    use: %s
    settings:
      %s
"""


@pytest.mark.parametrize(
    ("used", "rules", "told"),
    [
        ("group", 'groups: {g: {members: [m]}, "g\\t": {members: [m]}}', '.groups."g\\t": may not contain control'),
        ("matrix", 'matrix: {sets: {x: "m & zz"}}', ".matrix.sets.x: "),
        ("matrix", 'matrix: {vars: {a: "b//c"}, sets: {x: m}}', ".matrix.vars.a: "),
    ],
)
def test_a_mistake_in_the_settings_of_its_router_is_told_there(
    swap: Path, used: str, rules: str, told: str, cli: Cli
) -> None:
    swap.write_text(RULES % (used, rules))
    assert f"{swap}:7: routing.router.settings{told}" in cli("import", "llama-swap", swap, status=1).err


def test_a_rule_of_the_older_key_is_told_there(swap: Path, cli: Cli) -> None:
    newer = 'groups: {g: {members: [m]}}\ngroups: {"h ": {members: [m]}}'
    swap.write_text(RULES % ("group", newer))
    assert (
        f'{swap}:8: groups."h ": may not begin or end with a space' in cli("import", "llama-swap", swap, status=1).err
    )


def test_a_wrong_variable_is_named_and_no_line_of_the_file(
    swap: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", "abc")
    monkeypatch.setenv("TENANT_RATE_LIMIT_lab", "fast")
    said = cli("import", "llama-swap", swap, status=1).err
    assert "the environment variable PORT (server.port): a whole number is wanted" in said
    assert "the environment variable TENANT_RATE_LIMIT_lab (tenants.lab.requests_per_minute): " in said
    assert f"{swap}:" not in said


OF_VARIABLES = """
macros: {path: "${env.CHECK}"}
apiKeys: ["${env.FIRST}", "${env.SECOND}"]
models:
  m: {cmd: "x ${PORT}", checkEndpoint: "${path}"}
"""


def test_the_variable_in_a_wrong_value_is_named_where_it_is_used(
    swap: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap.write_text(OF_VARIABLES)
    monkeypatch.setenv("FIRST", "a secret")
    monkeypatch.setenv("CHECK", "health")
    said = cli("import", "llama-swap", swap, status=1).err
    assert f"{swap}:3: apiKeys[0]: must be visible ASCII characters without spaces, at least one (the" in said
    assert "environment variable FIRST)" in said and "a secret" not in said
    assert f"{swap}:5: models.m.checkEndpoint: must begin with / " in said and "environment variable CHECK)" in said


def test_values_of_variables_that_are_not_set_are_not_judged(swap: Path, cli: Cli) -> None:
    swap.write_text(OF_VARIABLES)
    assert cli("import", "llama-swap", swap).err.endswith("set before `greenroom serve`: FIRST, SECOND, CHECK\n")


def test_a_mistake_in_a_macro_is_told_by_its_name_once(swap: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    swap.write_text(OF_VARIABLES)
    monkeypatch.setenv("CHECK", "a\nb")
    (line,) = (line for line in cli("import", "llama-swap", swap, status=1).err.splitlines() if "macros" in line)
    assert line.endswith(
        f"{swap}:2: macros.path: the environment variable CHECK holds a line break or bytes that are no text"
    )


@pytest.mark.parametrize("options", [[], ["--write", "new.yaml"]])
def test_an_import_of_nothing_fails_and_writes_nothing(
    options: list[str], swap: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap.parent)
    swap.write_text("models: {m: {cmd: srv}}")
    said = cli("import", "llama-swap", swap, *options, status=1)
    assert "no model that can be served" in said.err and "models.m: not mapped: the whole model: " in said.err
    assert not said.out and os.listdir(swap.parent) == [swap.name]


def test_models_of_ollama_are_checked_like_any(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = OllamaFolder(tmp_path / "models")
    folder.manifest("library/alpha/latest", [("model", tiny("alpha"))])
    monkeypatch.setenv("OLLAMA_MODELS", str(folder.root))
    new = tmp_path / "greenroom.yaml"
    cli("import", "ollama", "--write", new)
    out = cli("check", new).out
    assert "alpha:latest  llamacpp" in out and "warning: models" not in out
