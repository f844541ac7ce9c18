"""Executes a Dockerfile without Docker: each stage is a directory that its steps run in, by chroot.

The machine's own system (/usr, read-only) and Python (as /usr/local) stand in for the base images. Knows only the
instructions that our Dockerfile uses. Needs root, for mounts in a namespace of their own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# What a step may take: it installs packages, on a machine that may be busy.
STEP_S = 500.0
# Links or folders at the top of a system, all of it in /usr.
SYSTEM = ("bin", "sbin", "lib", "lib64")
FROM_ETC = (
    "passwd",
    "group",
    "ssl",
    "ca-certificates",
    "resolv.conf",
    "hosts",
    "nsswitch.conf",
    "login.defs",
    "pip.conf",
)
# How packages are fetched is the machine's affair, as in a real build.
HANDED_ON = re.compile(r"PIP_|SSL_|REQUESTS_|https?_proxy|no_proxy", re.IGNORECASE)

# root volume=place… -- command…: mounts, makes everything but the volumes read-only where asked, and runs the command.
ENTER = r"""
set -eu
root=$1 python=$2 read_only=$3; shift 3
mount --bind "$root" "$root"
mount --bind -o ro /usr "$root/usr"
mount --bind -o ro "$python" "$root/usr/local"
mount --bind -o ro "$python" "$root$python"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
while test "$1" != --; do mount --bind "${1%%=*}" "$root${1#*=}"; shift; done
shift
if test "$read_only" = yes; then mount -o remount,bind,ro "$root"; fi
exec "$@"
"""
NAMESPACES = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")


def cannot() -> str | None:
    """Why no image can be made here, or None."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return "mounts need root and unshare"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode != 0:
        return "a namespace cannot be made here"
    python = Path(sys.base_prefix)
    if python == Path("/usr") or not (python / "bin" / "python").exists() or not Path("/bin").is_symlink():
        return "this Python cannot stand in for that of an image"
    return None


@dataclass
class Stage:
    """One stage: its root, and what its instructions have set."""

    root: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
    user: str = "0:0"
    cwd: str = "/"
    said: dict[str, Any] = field(default_factory=dict)

    def command(
        self,
        words: list[str],
        env: Mapping[str, str] = {},
        *,
        volumes: Mapping[Path, str] = {},
        read_only: bool = False,
        user: str | None = None,
    ) -> list[str]:
        """The command line that runs these words inside, as process 1."""
        mounts = [f"{source}={place}" for source, place in volumes.items()]
        inside = ["env", "-i", *(f"{name}={value}" for name, value in {**self.env, **env}.items())]
        enter = ["sh", "-c", ENTER, "sh", str(self.root), sys.base_prefix, "yes" if read_only else "no", *mounts, "--"]
        jail = ["chroot", f"--userspec={user or self.user}", "--groups=", str(self.root)]
        return [
            *NAMESPACES,
            *enter,
            *jail,
            *inside,
            "sh",
            "-c",
            'cd "$1" && shift && exec "$@"',
            "sh",
            self.cwd,
            *words,
        ]

    def run(self, text: str, env: Mapping[str, str]) -> None:
        done = subprocess.run(
            self.command(["sh", "-euc", text], env), capture_output=True, text=True, timeout=STEP_S, check=False
        )
        assert done.returncode == 0, f"RUN {text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their words; lines that go on are joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in joined.splitlines() if line.strip()]


class Builder:
    """Executes the instructions in order. `args` are those of `docker build --build-arg`."""

    def __init__(self, folder: Path, args: Mapping[str, str]) -> None:
        self._folder = folder
        self._given = args
        self._args: dict[str, str] = {}
        self._stages: dict[str, Stage] = {}
        self._stage: Stage | None = None

    def build(self, dockerfile: str) -> Stage:
        for word, rest in instructions(dockerfile):
            getattr(self, f"_{word.lower()}")(rest)
        assert self._stage is not None
        return self._stage

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "FROM comes first"
        return self._stage

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self._args[name] = self._given.get(name, default)

    def _from(self, rest: str) -> None:
        image, _, name = rest.partition(" AS ")
        assert re.fullmatch(r"python:\$\{PYTHON\}-(slim-)?\$\{DEBIAN\}", image), image
        self._stage = self._stages[name] = Stage(_system(self._folder / (name or "final")))

    def _workdir(self, rest: str) -> None:
        self.stage.cwd = rest
        (self.stage.root / rest.strip("/")).mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        source_root = ROOT
        if sources[0].startswith("--from="):
            source_root = self._stages[sources.pop(0).removeprefix("--from=")].root
        place = Path(os.path.join(self.stage.cwd, target))
        into = self.stage.root / str(place).strip("/")
        for source in sources:
            found = source_root / source.strip("/")
            if found.is_dir():
                shutil.copytree(found, into, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
            else:
                shutil.copy(found, into / found.name)

    def _run(self, rest: str) -> None:
        handed_on = {name: value for name, value in os.environ.items() if HANDED_ON.match(name)}
        self.stage.run(rest, {**handed_on, **self._args})

    def _env(self, rest: str) -> None:
        self.stage.env.update(word.split("=", 1) for word in shlex.split(rest))

    def _user(self, rest: str) -> None:
        self.stage.user = rest

    def _said(self, name: str, rest: str) -> None:
        self.stage.said[name] = rest

    def _expose(self, rest: str) -> None:
        self._said("EXPOSE", rest)

    def _stopsignal(self, rest: str) -> None:
        self._said("STOPSIGNAL", rest)

    def _volume(self, rest: str) -> None:
        self.stage.said["VOLUME"] = json.loads(rest)

    def _healthcheck(self, rest: str) -> None:
        self.stage.said["HEALTHCHECK"] = json.loads(rest.partition("CMD ")[2])

    def _entrypoint(self, rest: str) -> None:
        self.stage.said["ENTRYPOINT"] = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.stage.said["CMD"] = json.loads(rest)


def _system(root: Path) -> Path:
    """A root with nothing of its own but accounts and certificates."""
    for name in ("usr", "dev", "proc", "sys", "opt", "root", "run", "var/lib", "etc"):
        (root / name).mkdir(parents=True)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    for name in SYSTEM:
        if (Path("/") / name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for name in FROM_ETC:
        source = Path("/etc") / name
        if source.is_dir():
            shutil.copytree(source, root / "etc" / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, root / "etc" / name)
    (root / sys.base_prefix.strip("/")).mkdir(parents=True, exist_ok=True)
    return root
