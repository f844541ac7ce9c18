"""`greenroom import`: make a configuration of what llama-swap or Ollama was configured with. Starts nothing. What is
made is checked as `greenroom check` does before anything is written, and no file is ever overwritten."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed

if TYPE_CHECKING:
    from greenroom.config.reader import Problem
    from greenroom.importing.result import Imported

    # What an import makes, and the comments above it.
    Made = Callable[[argparse.Namespace], tuple[Imported, list[str]]]


def _add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="FROM", required=True)
    swap = _sub(commands, "llama-swap", "Make a configuration of a llama-swap file.", _of_llama_swap)
    swap.add_argument("file", help="its configuration, such as config.yaml")
    ollama = _sub(commands, "ollama", "Serve the models that Ollama has on disk, where they lie.", _of_ollama)
    ollama.add_argument(
        "folder", nargs="?", help="its folder of models (default: OLLAMA_MODELS, else ~/.ollama/models)"
    )


def _sub(commands: Any, name: str, about: str, made: Made) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(made=made)
    parser.add_argument("-w", "--write", metavar="FILE", help="write the configuration to this new file")
    return parser


def _run(args: argparse.Namespace) -> None:
    from greenroom.importing.result import as_yaml

    imported, title = args.made(args)
    text = as_yaml(imported.tree, title, imported.notes)
    unset = _checked(text, imported)
    if args.write is None:
        screen.say(text)
    else:
        _write(args.write, text)
        for note in imported.notes:
            screen.say(note.line)
        screen.say(f"{args.write}: {len(imported.tree['models'])} models, {imported.mapped} keys mapped")
        screen.hint(f"check it: greenroom check {args.write}")
    if unset:
        screen.note(f"set before `greenroom serve`: {', '.join(unset)}")


COMMAND = Subcommand("import", "Make a configuration of llama-swap's or Ollama's.", _add_options, _run)


def _of_llama_swap(args: argparse.Namespace) -> tuple[Imported, list[str]]:
    from greenroom.importing.llama_swap import import_file

    title = [
        f"Made by `greenroom import llama-swap` of {os.path.basename(args.file)}.",
        "",
        "Models run together as its groups or matrix say, and memory does not count, as before. To let memory decide,",
        "delete `fit_memory` and `company` below: then models stay until their room is needed.",
    ]
    return import_file(Path(args.file)), title


def _of_ollama(args: argparse.Namespace) -> tuple[Imported, list[str]]:
    from greenroom.importing.ollama import default_folder, import_folder

    folder = Path(args.folder) if args.folder else default_folder(os.environ)
    title = [
        "Made by `greenroom import ollama`. The files of models stay where they are: `ollama rm` deletes them.",
        "It listens where Ollama does: stop Ollama first, or choose another port.",
    ]
    return import_folder(folder), title


def _checked(text: str, imported: Imported) -> list[str]:
    """Check the configuration. Returns the environment variables that it needs and that are not set."""
    from greenroom.config import loader
    from greenroom.config.reader import FileRefused
    from greenroom.importing.llama_swap_keys import variables_of

    unset = [name for name in variables_of(text) if name not in os.environ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / loader.DEFAULT_NAME
        path.write_text(text, encoding="utf-8")
        try:
            # Keys that are not set yet must not look like one key.
            loader.load(path, {**os.environ, **{name: f"unset-{name}" for name in unset}})
        except FileRefused as error:
            told = [*error.of_variables, *_mistakes(error.problems, imported, unset)]
            if told:
                raise CommandFailed("it cannot be imported as it is; nothing is written", "\n".join(told)) from None
    return unset


def _mistakes(problems: Sequence[Problem], imported: Imported, unset: Collection[str]) -> list[str]:
    """What is wrong with the source, a line each. Says nothing of values that depend on variables to be set yet."""
    found: list[Problem] = []
    for problem in problems:
        variables = imported.variables_at(problem.where)
        if any(name in unset for name in variables):
            continue
        if variables and not any(name in problem.message for name in variables):
            problem = replace(problem, message=f"{problem.message} (the environment variable {', '.join(variables)})")
        found.append(problem)
    return imported.refused(found).message.splitlines() if found else []


def _write(name: str, text: str) -> None:
    try:
        # Like the source, it may hold secrets.
        descriptor = os.open(os.path.expanduser(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise CommandFailed(f"{name} exists; choose another name, or remove it first") from None
    except OSError as error:
        raise CommandFailed(f"{name} cannot be written: {error.strerror}") from None
