"""What users install: the sdist becomes a wheel without a compiler, and the wheel serves from an empty environment.

`make wheel` names a compiled wheel in GREENROOM_WHEEL, which is then tried instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom import __version__
from tests.waiting import until_now

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")
# The package index may be slow, and so may this machine be.
INSTALL_S = 400.0
START_S = 170.0


def run(*words: str | Path, **options: Any) -> str:
    done = subprocess.run(list(words), capture_output=True, text=True, timeout=INSTALL_S, check=False, **options)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def without_compiler() -> dict[str, str]:
    return {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "GREENROOM_COMPILE": ""}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel to try: the one named, or a plain one, made from the sdist."""
    if named := os.environ.get("GREENROOM_WHEEL"):
        return Path(named).resolve()
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree)
    run(sys.executable, "-m", "build", "--outdir", folder, tree, env=without_compiler())
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/setup.py") for name in archive.getnames())
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has this wheel and what the demo needs."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=True)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
    run(*pip, "--only-binary=:all:", f"{wheel}[demo]", cwd=folder, env=without_compiler())
    return folder / "bin"


@contextlib.contextmanager
def demo(programs: Path, folder: Path) -> Iterator[str]:
    """`greenroom demo`, and its address."""
    log = folder / "log"
    command = [programs / "greenroom", "demo", "--port", "0", "--state-dir", folder / "state"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=kept, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def address() -> str | None:
        found = re.search(r"serves smollm2 .* at (http://\S+)", log.read_text())
        return found[1] if found else None

    try:
        until_now(lambda: address() or process.poll() is not None, log.read_text, START_S)
        url = address()
        assert url is not None, log.read_text()
        yield url
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()[-2000:]


def asked(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        said: dict[str, Any] = json.load(answer)
    return said


def test_the_wheel_serves_from_an_empty_environment(wheel: Path, installed: Path, tmp_path: Path) -> None:
    assert run(installed / "greenroom", "--version", cwd=tmp_path) == f"greenroom {__version__}\n"
    is_plain = wheel.name.endswith("-py3-none-any.whl")
    with demo(installed, tmp_path) as url:
        chat = {"model": "smollm2", "max_tokens": 12, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        assert asked(f"{url}/v1/chat/completions", chat)["choices"][0]["message"]["content"].strip()
        status = asked(f"{url}/api/v1/status")
        assert (status["version"], status["build"]) == (__version__, "pure" if is_plain else "compiled")
