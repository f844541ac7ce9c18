"""The parser, and how every command ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from greenroom import __version__
from greenroom.cli import failures
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed
from greenroom.cli.main import main
from greenroom.cli.parser import COMMANDS
from greenroom.cli.screen import say_json
from greenroom.errors import StateDirBusy
from tests.cli.command import Cli
from tests.cli.fake_gateway import FakeGateway, answer

README = Path(__file__).parents[2] / "README.md"
HEAVY = {
    "asyncio",
    "fastapi",
    "http.client",
    "importlib.metadata",
    "pydantic",
    "rich",
    "uvloop",
    "yaml",
    "greenroom.app",
}


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_explains_itself(command: str, cli: Cli) -> None:
    assert f"usage: greenroom {command}" in cli(command, "--help").out


def test_help_loads_nothing_heavy() -> None:
    program = "import sys, greenroom.cli.parser as m; m.parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert HEAVY.isdisjoint(done.stdout.split())


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"greenroom {__version__}\n")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["load"],
        ["serve", "--port", "70000"],
        ["serve", "--port", "x"],
        ["serve", "--log-level", "loud"],
        ["logs", "m", "--lines", "-1"],
        ["unload", "m", "--grace-s", "soon"],
        # Options are not guessed: a script must not change its meaning when an option is added.
        ["ps", "--wat"],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], cli: Cli) -> None:
    assert "usage: greenroom" in cli(*argv, status=2).err


def test_no_gateway_exits_with_3(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for argv in (["ps"], ["load", "m"], ["unload", "m"], ["logs", "m"], ["logs", "-f", "m"], ["reload"]):
        out, err = cli(*argv, "--url", url, status=3)
        assert out == ""
        assert f"greenroom: no gateway answers at {url}; start one with `greenroom serve`, or say where it is" in err


def running(raises: BaseException) -> Callable[[Namespace], int]:
    def run(args: Namespace) -> int:
        raise raises

    return run


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (CommandFailed("it broke"), 1, "greenroom: it broke\n"),
        (StateDirBusy("held by another"), 1, "greenroom: held by another\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_a_command_raises_becomes_a_status_and_a_line(
    raised: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Subcommand("fail", "Raises.", lambda parser: None, running(raised))
    assert main(["fail"], [failing]) == status
    assert capsys.readouterr().err == said


# Interrupts its own process when this module is first looked for, in the midst of imports.
INTERRUPTED = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from greenroom.cli.main import main
sys.exit(main(["serve", "--config", {file!r}, "--port", "0"]))
"""


@pytest.mark.parametrize(
    "module", ["argparse", "greenroom.cli.commands.chat", "pydantic_core", "datetime", "yaml", "uvloop"]
)
def test_an_interrupt_while_a_command_begins_ends_it_without_a_word(tmp_path: Path, module: str) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"models: {{}}\nstate_dir: {tmp_path}/state\n")
    program = INTERRUPTED.format(module=module, file=str(file))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_an_interrupt_handler_that_was_set_before_is_kept(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with failures.end_at_once():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_a_command_sets_as_it_begins_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with failures.end_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with failures.end_at_once():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_has_enough_ends_the_command_quietly(gateway: FakeGateway) -> None:
    gateway.on("GET", "/api/v1/models/m/logs", answer({"model": "m", "lines": ["x" * 1000] * 1000}))
    command = [sys.executable, "-m", "greenroom.cli.main", "logs", "m", "--url", gateway.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.read(10)
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait(60) == 1


def onto_a_full_disk(*argv: str, unbuffered: str = "") -> tuple[int, str]:
    """The exit status and what standard error says."""
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "greenroom.cli.main", *argv]
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    return done.returncode, done.stderr


A_MODEL = "gpus: [{memory_mib: 10000}]\nmodels: {m: {cmd: 'sh --port ${PORT}', memory_mib: 8000}}\n"
NO_SPACE = "greenroom: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        *((argv, "") for argv in ("--help", "--version", "key --help", "check -c FILE", "check --json -c FILE")),
        *((argv, "") for argv in ("simulate --json -c FILE", "simulate -c FILE --seconds 5")),
        *((argv, "1") for argv in ("--help", "--version", "simulate --help")),
    ],
)
def test_output_onto_a_full_disk_is_one_line_and_a_failure(argv: str, unbuffered: str, tmp_path: Path) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(A_MODEL)
    words = [str(file) if word == "FILE" else word for word in argv.split()]
    assert onto_a_full_disk(*words, unbuffered=unbuffered) == (1, NO_SPACE)


def test_more_than_a_buffer_onto_a_full_disk_is_no_fault_of_the_gateway(gateway: FakeGateway) -> None:
    gateway.on("GET", "/api/v1/models/m/logs", answer({"model": "m", "lines": ["x" * 100_000]}))
    gateway.on("GET", "/api/v1/usage", answer("model,requests\n" * 10_000))
    assert onto_a_full_disk("logs", "m", "--url", gateway.url) == (1, NO_SPACE)
    assert onto_a_full_disk("usage", "--csv", "--url", gateway.url) == (1, NO_SPACE)


def test_a_terminal_without_letters_beyond_ascii_is_served(gateway: FakeGateway) -> None:
    gateway.on("GET", "/api/v1/models/m/logs", answer({"model": "m", "lines": ["größe \ud83d"]}))
    command = [sys.executable, "-m", "greenroom.cli.main", "logs", "m", "--url", gateway.url]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, env=ascii_only, check=True)
    assert done.stdout == b"gr\\xf6\\xdfe \\ud83d\n"


@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONIOENCODING": "utf-8"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_json_is_valid_whatever_the_locale(gateway: FakeGateway, locale: dict[str, str]) -> None:
    said = {"é 漢 😀": ["\ud83d", "\x9b2J", "\udcff"]}
    gateway.on("GET", "/api/v1/usage", answer(said))
    command = [sys.executable, "-m", "greenroom.cli.main", "usage", "--json", "--url", gateway.url]
    done = subprocess.run(command, capture_output=True, timeout=60, env=locale, check=True)
    assert json.loads(done.stdout.decode("utf-8")) == said


def test_a_figure_that_json_does_not_have_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"a": [float("nan"), {"b": float("-inf")}], "c": 0.5})
    assert json.loads(capsys.readouterr().out) == {"a": [None, {"b": None}], "c": 0.5}
