"""The frame of every benchmark: its options, its heading, its closing line and, with --save, its file in `results/`.

The heading names command, machine and commit. The closing line is one JSON object: bench, figures, goals, met.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from benchmarks.rig.processes import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def options_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep the output in benchmarks/results, and list it there")
    parser.add_argument("--commit", help="what the code is, where this folder is no git checkout")
    return parser


class Run:
    """One run of a benchmark. Prints the heading when it is made; `report` ends it."""

    def __init__(self, bench: str, options: argparse.Namespace, *notes: str, results: Path = RESULTS) -> None:
        self._bench, self._results = bench, results
        self._about = {"machine": "; ".join((machine(), *notes)), "commit": options.commit or commit()}
        if options.save and not os.access(results, os.W_OK):
            raise SystemExit(f"--save: {results} cannot be written")
        self._kept = _Tee(sys.stdout) if options.save else None
        if self._kept is not None:
            sys.stdout = self._kept
        print(f"$ {command()}\n{self._about['machine']}\ncommit {self._about['commit']}\n", flush=True)

    def report(self, figures: Mapping[str, Any], goals: Mapping[str, Any], met: bool) -> None:
        """The last line of every benchmark."""
        figures = {**self._about, **figures}
        print(json.dumps({"bench": self._bench, "figures": figures, "goals": goals, "met": met}), flush=True)
        if self._kept is not None:
            sys.stdout = self._kept.stdout
            self._list(self._save(self._kept.text.getvalue()))

    def _save(self, text: str) -> Path:
        """Keep the output in a new file of this benchmark and day."""
        stem, number = f"{date.today()}-{self._bench.replace('_', '-')}", 1
        while (path := self._results / f"{stem}{f'-{number}' if number > 1 else ''}.txt").exists():
            number += 1
        with path.open("x") as file:
            file.write(text)
        return path

    def _list(self, path: Path) -> None:
        with open(self._results / "README.md", "a") as index:
            about = f"{self._about['machine']} | {self._about['commit']}"
            index.write(f"| [{path.name}]({path.name}) | `{command()}` | {about} |\n")


def command() -> str:
    """As it was typed, but for the interpreter's path."""
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name}" if spec is not None else sys.argv[0]
    return f"python {program} {shlex.join(sys.argv[1:])}".rstrip()


def machine() -> str:
    output = _output("lscpu") if shutil.which("lscpu") else ""
    models = [line.partition(":")[2].strip() for line in output.splitlines() if line.startswith("Model name")]
    processor = models[0] if models else "unknown processor"
    return f"{os.uname().machine}, {os.cpu_count()} cores, {processor}, Python {sys.version.split()[0]}"


def commit() -> str:
    """The commit of this checkout, and whether its source was changed since."""
    try:
        name = _output("git", "rev-parse", "--short", "HEAD")
        changed = _output("git", "status", "--porcelain", "--untracked-files=no", "src", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def _output(*argv: str) -> str:
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


class _Tee:
    """Standard output whose text is remembered. A run that fails leaves no file."""

    def __init__(self, stdout: TextIO) -> None:
        self.stdout, self.text = stdout, StringIO()

    def write(self, text: str) -> int:
        self.text.write(text)
        return self.stdout.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stdout, name)
