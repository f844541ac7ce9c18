"""What an interpreter or a program has of what an engine needs: asked of itself, by a short call that is waited for.

Owns the list of packages each engine needs and the words to install them. Never imports any of them: versions come from
what was installed, not from running it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# Looking into metadata takes a tenth of a second; a cold disk some seconds.
ASK_MAX_S: Final = 20.0
_ASK: Final = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except Exception:
        pass
print(json.dumps({"python": "%d.%d.%d" % sys.version_info[:3], "found": found}))
"""
_VERSION: Final = re.compile(r"version:?\s+(\S+)")
_NUMBERS: Final = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class Package:
    """A package, from which version on it will do, and what it is there for. Only some calls miss an optional one."""

    name: str
    at_least: str
    job: str
    optional: bool = False

    @property
    def requirement(self) -> str:
        return f"{self.name}>={self.at_least}"


# As the extra of the same name says; pyproject.toml is compared with this by a test.
TRANSFORMERS: Final = (
    Package("torch", "2.11", "computes, on GPUs and on the CPU"),
    Package("transformers", "5.17", "knows the models' shapes and their tokenizers"),
    Package("jinja2", "3.1.6", "renders chat templates"),
    Package("llguidance", "1.0", "keeps answers to a JSON schema", optional=True),
)
LLAMACPP: Final = (Package("xllamacpp", "2026.10", "llama.cpp's own server as a package"),)


@dataclass(frozen=True, slots=True)
class Found:
    """What is there. `why` is set where the interpreter itself could not be asked."""

    python: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    why: str | None = None

    def lacks(self, wanted: Sequence[Package]) -> list[Package]:
        """Those that are missing or too old."""
        return [one for one in wanted if not _will_do(self.versions.get(one.name), one.at_least)]


def ask_python(python: str, wanted: Sequence[Package]) -> Found:
    """What this interpreter has of these. Never raises."""
    found = shutil.which(python)
    if found is None:
        return Found(why=f"there is no Python {python}")
    said = _said([found, "-c", _ASK, *(one.name for one in wanted)])
    try:
        answer = json.loads(said or "")
        return Found(str(answer["python"]), dict(answer["found"]))
    except (ValueError, LookupError, TypeError):
        return Found(why=f"{python} does not answer like a Python")


def ask_program(program: str) -> str | None:
    """The version a program says it is, where it says one. Never raises."""
    match = _VERSION.search(_said([program, "--version"]) or "")
    return match[1] if match else None


def install_words(python: str | None, missing: Sequence[Package], extra: str) -> str:
    """What to type so that it is there. Into our own environment by our own extra, into others by the packages."""
    if python is None:
        return f"{sys.executable} -m pip install 'greenroom[{extra}]'"
    return f"{python} -m pip install " + " ".join(f"'{one.requirement}'" for one in missing)


def _said(command: list[str]) -> str | None:
    """Started in the root folder: what lies in the current one must not stand in for a package."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=ASK_MAX_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _will_do(version: str | None, at_least: str) -> bool:
    return version is not None and _numbers(version) >= _numbers(at_least)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` is (2, 13, 0)."""
    match = _NUMBERS.match(version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
