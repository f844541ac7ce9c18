"""The image that `scripts/make_image.py` builds, as a directory, and its containers as processes in namespaces.

Needs root, for mounts in a namespace of their own, and Debian's mmdebstrap.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAKE = ROOT / "scripts" / "make_image.py"
# It installs packages, on a machine that may be busy.
BUILD_S = 900.0
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# root hostname place=source… -- command…: mounts, makes everything but these read-only, and runs the command. With a
# host name, loopback is all the network there is.
ENTER = r"""
set -eu
root=$1 name=$2; shift 2
mount --bind "$root" "$root"
mkdir -p "$root/dev"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
while test "$1" != --; do mount --bind "${1#*=}" "$root${1%%=*}"; shift; done
shift
mount -o remount,bind,ro "$root"
if test -n "$name"; then
  hostname "$name"
  chroot "$root" python3 -c "
import fcntl, socket, struct
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
fcntl.ioctl(socket.socket(), SIOCSIFFLAGS, struct.pack('16sh14x', b'lo', IFF_UP))"
fi
exec "$@"
"""
NAMESPACES = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
OWN_NETWORK = ("--net", "--uts")


def cannot() -> str | None:
    """Why no image can be run here, or None."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return "mounts need root and unshare"
    if subprocess.run([*NAMESPACES, *OWN_NETWORK, "true"], capture_output=True, check=False).returncode != 0:
        return "a namespace cannot be made here"
    if shutil.which("mmdebstrap") is None or not KEYS.exists():
        return "the image is built by mmdebstrap of packages that Debian's keys have signed"
    return None


def build(folder: Path, **args: str) -> list[str]:
    """Builds the image into `folder`, and returns the lines that this prints."""
    env = {**os.environ, **args}
    done = subprocess.run(
        [sys.executable, MAKE, folder], env=env, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


class Image:
    """The archive in `folder`, unpacked."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.root.mkdir()
        (self.archive,) = folder.glob("*.oci.tar")
        with tarfile.open(self.archive) as tar:

            def read(digest: str) -> Any:
                file = tar.extractfile(f"blobs/{digest.replace(':', '/')}")
                assert file is not None
                return file

            with tar.extractfile("index.json") as index:  # type: ignore[union-attr]
                (entry,) = json.load(index)["manifests"]
            manifest = json.load(read(entry["digest"]))
            self.config: dict[str, Any] = json.load(read(manifest["config"]["digest"]))["config"]
            for layer in manifest["layers"]:
                unpack = ["tar", "-xzp", "--numeric-owner", "-C", self.root]
                subprocess.run(unpack, input=read(layer["digest"]).read(), check=True)

    def command(
        self,
        words: list[str],
        env: Mapping[str, str] = {},
        *,
        volumes: Mapping[str, Path] = {},
        user: str | None = None,
        hostname: str = "",
    ) -> list[str]:
        """The command line that runs these words inside, as process 1 on a read-only root. With a host name it has a
        network of its own."""
        for place, source in volumes.items():
            inside = self.root / place.strip("/")
            (inside if source.is_dir() else inside.parent).mkdir(parents=True, exist_ok=True)
            if source.is_file():
                inside.touch()
        mounts = [f"{place}={source}" for place, source in volumes.items()]
        enter = ["sh", "-c", ENTER, "sh", str(self.root), hostname, *mounts, "--"]
        jail = ["chroot", f"--userspec={user or self.config['User']}", "--groups=", str(self.root)]
        return [*NAMESPACES, *(OWN_NETWORK if hostname else ()), *enter, *jail, *self.inside(words, env)]

    def inside(self, words: list[str], env: Mapping[str, str] = {}) -> list[str]:
        """The words with the environment and in the folder of a container, for one that runs."""
        known = [*self.config["Env"], *(f"{name}={value}" for name, value in env.items())]
        return [
            "env",
            "-i",
            *known,
            "sh",
            "-c",
            'cd "$1" && shift && exec "$@"',
            "sh",
            self.config["WorkingDir"],
            *words,
        ]
