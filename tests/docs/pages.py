"""Pages of the documentation: their blocks, and packages that they build: as pip would leave them, with programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Generous: the machine may be busy.
PATIENCE_S = 120


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """What is below a heading of the second level."""
    return text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text_of(page), re.MULTILINE | re.DOTALL)


def module_blocks(page: str) -> dict[str, str]:
    """Python on the page by the file name in its first line."""
    found = {}
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None, "every block says in its first line which file it is"
        found[name[1]] = block
    return found


def defined_in(page: str, name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": name}
    exec(compile(module_blocks(page)[name], name, "exec"), names)  # noqa: S102
    return names


def package_of(page: str, folder: Path) -> Path:
    """The page's files as pip would leave them, and its configuration in the folder around them."""
    site = folder / "site"
    site.mkdir()
    for name, code in module_blocks(page).items():
        (site / name).write_text(code, encoding="utf-8")
    (toml,) = blocks(page, "toml")
    project = tomllib.loads(toml)["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (yaml,) = blocks(page, "yaml")
    (folder / "greenroom.yaml").write_text(yaml, encoding="utf-8")
    return site


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, so that what is found there is found nowhere else."""
    environ = {**os.environ, "PYTHONPATH": str(package)}
    environ.pop("GREENROOM_CONFIG", None)
    return subprocess.run(
        [sys.executable, *words], cwd=package.parent, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )


def commands(page: str) -> list[str]:
    (bash,) = blocks(page, "bash")
    return bash.splitlines()
