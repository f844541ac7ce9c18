#!/usr/bin/env python3
"""Builds the image of the Dockerfile without Docker and without a registry: make_image.py [FOLDER], by default dist/.

    EXTRAS=llamacpp,hub,transformers COMPILE=0 scripts/make_image.py        arguments of the Dockerfile

Executes the Dockerfile. Debian's packages, which mmdebstrap installs from the machine's apt sources, stand in for the
base images, so Python is Debian's. Writes an archive that `docker load`, `podman load` and `skopeo` take. Needs root,
or user namespaces (subuids and uidmap).
"""

from __future__ import annotations

import fnmatch
import gzip
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
from collections.abc import Iterator
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
# How packages are fetched is the machine's affair: steps get its names, certificates and indexes, the image does not.
LENT = {"/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"}
LENT_NAMES = re.compile(r"PIP_|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|https?_proxy|no_proxy", re.IGNORECASE)
ANONYMOUS = """cd "$1/etc"; rm -f apt/sources.list apt/sources.list.d/* */*.d/99mmdebstrap hosts hostname resolv.conf
touch hosts hostname resolv.conf"""
LAST_LINES = 30


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their words; lines that go on are joined."""
    joined = re.sub(r"\s*\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    lines = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(word, rest.strip()) for word, rest in lines]


@dataclass
class Stage:
    """A stage: what makes it, as mmdebstrap takes it, and its part of the image's config."""

    name: str
    suite: str
    packages: list[str]
    hooks: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"})
    copied: list[str] = field(default_factory=list)
    config: Json = field(default_factory=lambda: {"WorkingDir": "/"})

    def copy(self, context: Path, sources: list[str], target: str) -> None:
        """Files of the checkout; of folders what is in them, but what .dockerignore leaves out."""
        ignored = [line[3:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("**/")]

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, "root", "root"
            return None if any(fnmatch.fnmatch(Path(entry.name).name, pattern) for pattern in ignored) else entry

        with tarfile.open(context, "w") as tar:
            for source in map(ROOT.joinpath, sources):
                place = os.path.join(self.config["WorkingDir"], target, "" if source.is_dir() else source.name)
                tar.add(source, os.path.normpath(place), filter=kept)
        self.hooks.append(f"tar-in {context} /")

    def run(self, text: str, env: dict[str, str]) -> None:
        """What apt-get would install is installed with all other packages: there is no apt inside."""
        if installed := re.search(r"apt-get install (?:-\S+ )*([^&;]+)", text):
            self.packages += installed[1].split()
            return
        assert not self.copied, "a RUN after a COPY --from would need a layer of its own"
        known = [f"{name}={value}" for name, value in {**self.env, **env}.items()]
        inside = shlex.join(["env", "-i", *known, "sh", "-euc", f"cd {self.config['WorkingDir']}; {text}"])
        self.hooks.append(f'echo {shlex.quote(f"I: RUN {text}")} >&2; chroot "$1" {inside}')


def stages(work: Path, epoch: int) -> list[Stage]:
    """The Dockerfile's. Those that are not the last are named."""
    found: list[Stage] = []
    args: dict[str, str] = {}
    lent = {name: value for name, value in os.environ.items() if LENT_NAMES.match(name)}
    files = sorted(path for path in LENT.union(lent.values()) if path.startswith("/") and Path(path).is_file())
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        if word == "ARG":
            name, _, default = rest.partition("=")
            args[name] = os.environ.get(name, default)
        elif word == "FROM":
            image, _, name = string.Template(rest).substitute(args).partition(" AS ")
            stage = Stage(name or "image", image.rpartition("-")[2], [*SLIM])
            found.append(stage)
            if "-slim-" not in image:
                stage.packages += TOOLS if os.environ.get("COMPILE") == "0" else TOOLS + COMPILER
                for path in files:
                    stage.hooks += [f'mkdir -p "$1{os.path.dirname(path)}"', f"upload {path} {path}"]
        elif word == "COPY" and rest.startswith("--from="):
            _, source, target = rest.split()
            assert source == target and len(found) == 2, f"COPY {rest}"
            stage.copied.append(source)
        elif word == "COPY":
            *sources, target = rest.split()
            stage.copy(work / f"context-{len(stage.hooks)}.tar", sources, target)
        elif word == "RUN":
            stage.run(rest, {**lent, **args, "SOURCE_DATE_EPOCH": str(epoch)})
        elif word == "ENV":
            stage.env.update(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "WORKDIR":
            stage.config["WorkingDir"] = rest
            stage.hooks.append(f'mkdir -p "$1{rest}"')
        else:
            stage.config |= configured(word, rest)
    return found


def configured(word: str, rest: str) -> Json:
    """The part of an image's config that an instruction says."""
    match word:
        case "USER":
            return {"User": rest}
        case "STOPSIGNAL":
            return {"StopSignal": rest}
        case "EXPOSE":
            return {"ExposedPorts": {f"{port}/tcp": {} for port in rest.split()}}
        case "VOLUME":
            return {"Volumes": {path: {} for path in json.loads(rest)}}
        case "ENTRYPOINT" | "CMD":
            return {word.title(): json.loads(rest)}
        case "HEALTHCHECK":
            options, _, command = rest.partition(" CMD ")
            check: Json = {"Test": ["CMD", *json.loads(command)]}
            for name, value in re.findall(r"--(\S+)=(\d+)", options):
                check[name.title().replace("-", "")] = int(value) * (1 if name == "retries" else 10**9)
            return {"Healthcheck": check}
    raise ValueError(f"make_image.py does not know {word}")


def apt_options(suite: str) -> Iterator[str]:
    """The machine's sources of this suite and its proxies, as mmdebstrap takes them; without, it asks Debian itself."""
    dump = subprocess.check_output(["apt-config", "dump", "Acquire"], text=True)
    for line in re.findall(r'^Acquire::(?:\S+::Proxy|Check-Valid-Until) "[^"].*', dump, re.MULTILINE):
        yield f"--aptopt={line}"
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.suffix in (".list", ".sources") and path.exists():
            lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
            if suite in " ".join(lines):
                yield str(path)


def mmdebstrap(stage: Stage, target: str, work: Path, epoch: int, *hooks: str) -> None:
    """Builds a stage; prints its steps, or at a failure its last lines."""
    # The hook spares the package that would merge /usr, and with it Perl.
    command = ["mmdebstrap", "--variant=essential", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
    command += [f"--include={','.join(stage.packages)}", "--skip=output/dev"]
    command += [f"--dpkgopt={option}" for option in ["force-unsafe-io", *NO_DOCS]]
    command += [f"--customize-hook={hook}" for hook in [*stage.hooks, *hooks]]
    command += [stage.suite, target, *apt_options(stage.suite)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "TMPDIR": str(work)}
    said: list[str] = []
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stderr or ():
            said.append(line)
            if re.match(r"I: RUN|I: (?!removing|finding)[^/]*\.\.\.$", line):
                print(f"{stage.name}: {line[3:].rstrip()}", flush=True)
    if process.returncode:
        sys.exit(f"make_image.py: the stage {stage.name} failed\n{''.join(said[-LAST_LINES:])}")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def stored(oci: Path, data: Path | Json, kind: str) -> Json:
    """Puts a file or a document among the blobs, and returns what refers to it."""
    if not isinstance(data, Path):
        (written := oci / "document").write_text(json.dumps(data))
        data = written
    named = {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(data), "size": data.stat().st_size}
    data.rename(place(oci, named))
    return named


def place(oci: Path, named: Json) -> Path:
    return oci.joinpath("blobs", *named["digest"].split(":"))


def layer(oci: Path, tar: Path) -> tuple[Json, str, int]:
    """Packs a layer: what refers to it, the hash of its content, and its unpacked size."""
    packed = tar.with_suffix(".gz")
    with tar.open("rb") as source, packed.open("wb") as target, gzip.GzipFile("", "wb", 6, target, 0) as zipped:
        shutil.copyfileobj(source, zipped, 1 << 20)
    return stored(oci, packed, "layer.v1.tar+gzip"), digest(tar), tar.stat().st_size


def build(out: Path, work: Path, epoch: int) -> None:
    builder, image = stages(work, epoch)
    ((oci := work / "oci") / "blobs" / "sha256").mkdir(parents=True)

    def base() -> tuple[Json, str, int]:
        mmdebstrap(image, f"{work}/base.tar", work, epoch, ANONYMOUS)
        return layer(oci, work / "base.tar")

    def copied() -> tuple[Json, str, int]:
        plain = f"--sort=name --numeric-owner --owner=0 --group=0 --mtime=@{epoch} --clamp-mtime"
        pack = f'chroot "$1" tar -cf /copied.tar {plain} -C / {shlex.join(path[1:] for path in image.copied)}'
        mmdebstrap(builder, "/dev/null", work, epoch, pack, f"download /copied.tar {work}/copied.tar")
        return layer(oci, work / "copied.tar")

    with ThreadPoolExecutor() as pool:
        layers, contents, sizes = zip(*pool.map(lambda stage: stage(), (base, copied)), strict=True)
    machine = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config = {
        "created": datetime.fromtimestamp(epoch, UTC).isoformat(),
        "architecture": machine,
        "os": "linux",
        "config": {**image.config, "Env": [f"{name}={value}" for name, value in image.env.items()]},
        "rootfs": {"type": "layers", "diff_ids": contents},
    }
    manifest = {"schemaVersion": 2, "config": stored(oci, config, "config.v1+json"), "layers": layers}
    entry = stored(oci, manifest, "manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": f"greenroom:{version}"}
    # For `docker load`, which may know only the layout of `docker save`.
    files = [str(place(oci, named).relative_to(oci)) for named in (manifest["config"], *layers)]
    documents: Json = {
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
        "index.json": {"schemaVersion": 2, "manifests": [entry]},
        "manifest.json": [{"Config": files[0], "RepoTags": [f"greenroom:{version}"], "Layers": files[1:]}],
    }
    for name, document in documents.items():
        (oci / name).write_text(json.dumps(document))

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid, info.gid, info.uname, info.gname, info.mtime = 0, 0, "", "", epoch
        return info

    out.mkdir(parents=True, exist_ok=True)
    archive = out / f"greenroom-{version}-{machine}.oci.tar"
    with tarfile.open(part := archive.with_suffix(".part"), "w") as tar:
        for name in (*documents, "blobs"):
            tar.add(oci / name, name, filter=anonymous)
    part.rename(archive)
    size, unpacked = (round(size / 1e6) for size in (archive.stat().st_size, sum(sizes)))
    print(f"{os.path.relpath(archive)}: greenroom:{version} for {machine}, {size} MB, unpacked {unpacked} MB")


def main() -> None:
    if shutil.which("mmdebstrap") is None:
        sys.exit("make_image.py: mmdebstrap is not here; on Debian or Ubuntu: apt-get install mmdebstrap")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").absolute()
    # The image's user must be able to read what is made.
    os.umask(0o022)
    log = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or log.stdout or (ROOT / "pyproject.toml").stat().st_mtime)
    with tempfile.TemporaryDirectory(prefix="greenroom-image-") as work:
        os.chmod(work, 0o755)
        build(out, Path(work), epoch)


if __name__ == "__main__":
    main()
