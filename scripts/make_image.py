#!/usr/bin/env python3
"""Builds the image of the Dockerfile without Docker and without a registry: make_image.py [FOLDER], by default dist/.

    EXTRAS=llamacpp,hub,transformers COMPILE=0 scripts/make_image.py        arguments of the Dockerfile

Executes the Dockerfile. Debian's packages, which mmdebstrap installs from the machine's apt sources, stand in for the
base images, so Python is Debian's. Writes an archive that `docker load`, `podman load` and `skopeo` take. Needs root,
or user namespaces (subuids and uidmap).
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
# What the base images have beyond Debian's essential packages, as far as the gateway and its engines need it.
SLIM = ["ca-certificates", "libstdc++6", "netbase", "passwd", "python-is-python3", "python3", "tzdata"]
TOOLS = ["python3-pip"]
COMPILER = ["gcc", "libc6-dev", "python3-dev"]
NO_DOCS = [f"path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")]
NO_DOCS += ["path-include=/usr/share/doc/*/copyright"]
# How packages are fetched is the machine's affair: the stage that builds gets its names, certificates and indexes.
LENT = ("/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
LENT_NAMES = re.compile(r"PIP_|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|https?_proxy|no_proxy", re.IGNORECASE)
# Of the last stage nothing may tell about the machine, but what a container gets mounted must be there.
ANONYMOUS = """cd "$1/etc"; rm -f apt/sources.list apt/sources.list.d/* */*.d/99mmdebstrap hosts hostname resolv.conf
touch hosts hostname resolv.conf"""
LAST_LINES = 30


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their words; lines that go on are joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(word, " ".join(rest.split())) for word, rest in lines]


@dataclass
class Stage:
    name: str
    suite: str
    packages: list[str]
    hooks: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
    # Stages and paths in them that are layers of this one.
    copied: list[tuple[str, str]] = field(default_factory=list)
    config: Json = field(default_factory=dict)


class Dockerfile:
    """Translates instructions to hooks of mmdebstrap, which get a stage's root as $1, and to the image's config."""

    def __init__(self, work: Path, epoch: int, given: Mapping[str, str]) -> None:
        self.stages: list[Stage] = []
        self._work, self._given, self._args = work, given, dict[str, str]()
        self._lent = {name: value for name, value in given.items() if LENT_NAMES.match(name)}
        self._lent["SOURCE_DATE_EPOCH"] = str(epoch)
        for word, rest in instructions((ROOT / "Dockerfile").read_text()):
            # An instruction that is not known here is an AttributeError.
            getattr(self, f"_{word.lower()}")(rest)

    @property
    def stage(self) -> Stage:
        return self.stages[-1]

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self._args[name] = self._given.get(name, default)

    def _from(self, rest: str) -> None:
        image, _, name = string.Template(rest).substitute(self._args).partition(" AS ")
        suite = image.rpartition("-")[2]
        if "-slim-" in image:
            self.stages.append(Stage(name or "image", suite, [*SLIM]))
            return
        tools = TOOLS if self._given.get("COMPILE") == "0" else TOOLS + COMPILER
        self.stages.append(Stage(name, suite, SLIM + tools))
        self.stage.hooks += [f"upload {path} {path}" for path in LENT if Path(path).exists()]

    def _workdir(self, rest: str) -> None:
        self.stage.config["WorkingDir"] = rest
        self.stage.hooks.append(f'mkdir -p "$1{rest}"')

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        if sources[0].startswith("--from="):
            assert sources[1:] == [target], f"COPY {rest}: only to the same place"
            self.stage.copied.append((sources[0].removeprefix("--from="), target))
            return
        ignored = [line[3:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("**/")]

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "root", "root"
            return None if any(fnmatch.fnmatch(Path(entry.name).name, pattern) for pattern in ignored) else entry

        context = self._work / f"{self.stage.name}-{len(self.stage.hooks)}.tar"
        with tarfile.open(context, "w") as tar:
            for source in map(ROOT.joinpath, sources):
                place = os.path.join(self.stage.config["WorkingDir"], target, "" if source.is_dir() else source.name)
                tar.add(source, os.path.normpath(place), filter=kept)
        self.stage.hooks.append(f"tar-in {context} /")

    def _run(self, rest: str) -> None:
        if installed := re.search(r"apt-get install (?:-\S+ )*([^&;]+)", rest):
            self.stage.packages += installed[1].split()
            return
        assert not self.stage.copied, "a RUN after a COPY --from would need a layer of its own"
        env = [f"{name}={value}" for name, value in {**self.stage.env, **self._lent, **self._args}.items()]
        inside = ["env", "-i", *env, "sh", "-euc", f"cd {self.stage.config.get('WorkingDir', '/')}; {rest}"]
        self.stage.hooks.append(f'echo {shlex.quote(f"I: RUN {rest}")} >&2; chroot "$1" {shlex.join(inside)}')

    def _env(self, rest: str) -> None:
        self.stage.env.update(word.split("=", 1) for word in shlex.split(rest))

    def _user(self, rest: str) -> None:
        self.stage.config["User"] = rest

    def _expose(self, rest: str) -> None:
        self.stage.config["ExposedPorts"] = {f"{port}/tcp": {} for port in rest.split()}

    def _volume(self, rest: str) -> None:
        self.stage.config["Volumes"] = {path: {} for path in json.loads(rest)}

    def _stopsignal(self, rest: str) -> None:
        self.stage.config["StopSignal"] = rest

    def _entrypoint(self, rest: str) -> None:
        self.stage.config["Entrypoint"] = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.stage.config["Cmd"] = json.loads(rest)

    def _healthcheck(self, rest: str) -> None:
        options, _, command = rest.partition(" CMD ")
        check: Json = {"Test": ["CMD", *json.loads(command)]}
        for name, value in (option.removeprefix("--").split("=") for option in options.split()):
            key = name.title().replace("-", "")
            check[key] = int(value) if key == "Retries" else int(value.removesuffix("s")) * 10**9
        self.stage.config["Healthcheck"] = check


def apt_options(suite: str) -> Iterator[str]:
    """The machine's sources of this suite and its proxies, as mmdebstrap takes them; without, it asks Debian itself."""
    for path in sorted([*Path("/etc/apt").glob("sources.list"), *Path("/etc/apt/sources.list.d").glob("*.*")]):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        if path.suffix in (".list", ".sources") and suite in " ".join(lines):
            yield str(path)
    dump = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
    for line in dump.splitlines():
        if re.match(r"Acquire::(\S+::Proxy|Check-Valid-Until) \"[^\"]", line):
            yield f"--aptopt={line}"


def mmdebstrap(stage: Stage, target: str, work: Path, epoch: int, hooks: list[str]) -> None:
    """Builds a stage; prints its steps, or at a failure its last lines."""
    # The hook spares the package that would merge /usr, and with it Perl.
    command = ["mmdebstrap", "--variant=essential", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
    command += [f"--include={','.join(stage.packages)}", "--skip=output/dev"]
    command += [f"--dpkgopt={option}" for option in ["force-unsafe-io", *NO_DOCS]]
    command += [f"--customize-hook={hook}" for hook in [*stage.hooks, *hooks]]
    options = list(apt_options(stage.suite))
    command += [option for option in options if option.startswith("--")]
    command += [stage.suite, target, *(option for option in options if not option.startswith("--"))]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "TMPDIR": str(work)}
    said: list[str] = []
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stderr or ():
            said.append(line)
            if re.match(r"I: RUN|I: (?!removing|finding)[^/]*\.\.\.$", line):
                print(f"{stage.name}: {line[3:].rstrip()}", flush=True)
    if process.returncode:
        sys.exit(f"make_image.py: the stage {stage.name} failed\n{''.join(said[-LAST_LINES:])}")


def blob(blobs: Path, data: bytes, kind: str) -> Json:
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}


def layer(blobs: Path, tar: Path) -> tuple[str, Json, int]:
    """Packs a layer: the hash of what is in it, what names it, and its unpacked size."""
    inside, packed = hashlib.sha256(), hashlib.sha256()
    zipper, part = zlib.compressobj(wbits=31), tar.with_suffix(".gz")
    with tar.open("rb") as source, part.open("wb") as target:
        while chunk := source.read(1 << 20):
            inside.update(chunk)
            packed.update(out := zipper.compress(chunk))
            target.write(out)
        packed.update(out := zipper.flush())
        target.write(out)
    size = part.stat().st_size
    part.rename(blobs / packed.hexdigest())
    kind = "application/vnd.oci.image.layer.v1.tar+gzip"
    named = {"mediaType": kind, "digest": f"sha256:{packed.hexdigest()}", "size": size}
    return f"sha256:{inside.hexdigest()}", named, tar.stat().st_size


def build(out: Path, work: Path) -> None:
    log = subprocess.run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"], capture_output=True, text=True)
    committed = log.stdout.strip() or int((ROOT / "pyproject.toml").stat().st_mtime)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or committed)
    *builders, image = Dockerfile(work, epoch, os.environ).stages
    (blobs := work / "oci" / "blobs" / "sha256").mkdir(parents=True)

    def built(stage: Stage) -> tuple[str, Json, int]:
        """The layer that comes of a stage: all of it, or what is copied from it."""
        tar = work / f"{stage.name}.tar"
        if stage is image:
            mmdebstrap(stage, str(tar), work, epoch, [ANONYMOUS])
            return layer(blobs, tar)
        pack = (
            f"tar -cf /copied.tar --sort=name --numeric-owner --owner=0 --group=0 --mtime=@{epoch} --clamp-mtime -C /"
        )
        paths = [path.lstrip("/") for name, path in image.copied if name == stage.name]
        pack = f'chroot "$1" {pack} {shlex.join(paths)}'
        mmdebstrap(stage, "/dev/null", work, epoch, [pack, f"download /copied.tar {tar}"])
        return layer(blobs, tar)

    with ThreadPoolExecutor() as pool:
        layers = list(pool.map(built, [image, *builders]))
    machine = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config = {
        "created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        "architecture": machine,
        "os": "linux",
        "config": {**image.config, "Env": [f"{name}={value}" for name, value in image.env.items()]},
        "rootfs": {"type": "layers", "diff_ids": [inside for inside, _, _ in layers]},
    }
    described = blob(blobs, json.dumps(config).encode(), "config.v1+json")
    manifest = {"schemaVersion": 2, "config": described, "layers": [named for _, named, _ in layers]}
    entry = blob(blobs, json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": f"greenroom:{version}"}
    # For `docker load`, which may know only the layout of `docker save`.
    places = [f"blobs/sha256/{named['digest'].partition(':')[2]}" for named in (described, *manifest["layers"])]
    saved = [{"Config": places[0], "RepoTags": [f"greenroom:{version}"], "Layers": places[1:]}]
    index = {"schemaVersion": 2, "manifests": [entry]}
    documents: Json = {"oci-layout": {"imageLayoutVersion": "1.0.0"}, "index.json": index, "manifest.json": saved}
    for name, document in documents.items():
        (work / "oci" / name).write_text(json.dumps(document))

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid, info.gid, info.uname, info.gname, info.mtime, info.mode = 0, 0, "", "", epoch, info.mode & 0o755
        return info

    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"greenroom-{version}-{machine}.oci.tar"
    with tarfile.open(part := archive.with_suffix(".part"), "w") as tar:
        for name in (*documents, "blobs"):
            tar.add(work / "oci" / name, name, filter=plain)
    part.rename(archive)
    unpacked = sum(size for _, _, size in layers) / 1e6
    size = archive.stat().st_size / 1e6
    print(f"{os.path.relpath(archive)}: greenroom:{version} for {machine}, {size:.0f} MB, unpacked {unpacked:.0f} MB")


def main() -> None:
    if shutil.which("mmdebstrap") is None:
        sys.exit("make_image.py: mmdebstrap is not here; on Debian or Ubuntu: apt-get install mmdebstrap")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute()
    # mmdebstrap's chroots are in here.
    with tempfile.TemporaryDirectory(prefix="greenroom-image-") as work:
        os.chmod(work, 0o755)
        build(out, Path(work))


if __name__ == "__main__":
    main()
