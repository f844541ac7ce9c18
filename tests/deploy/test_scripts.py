"""The scripts: two replicas on this machine, the image, the cluster. docker and kubectl are stand-ins."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest

from greenroom import __version__
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until_now

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
# Two gateways start at once, perhaps beside other tests.
START_S = 150.0


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with a docker and a kubectl that write down how they are called, and what they read."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("docker", "kubectl"):
        program = folder / name
        # Of what a script asks, only `get secret` fails: there is none yet. Only `kustomize` prints.
        program.write_text(
            "#!/bin/sh\n"
            f'echo "{name} $*" >> {tmp_path}/calls\n'
            'case "$*" in\n'
            "  *'get secret'*) exit 1;;\n"
            "  *kustomize*) echo 'image: greenroom:0.0.0';;\n"
            f"  *stdin*|*'-f -') cat >> {tmp_path}/read;;\n"
            "esac\n"
        )
        program.chmod(0o755)
    return tmp_path


def run(script: str, tools: Path, *words: str, **environ: str) -> list[str]:
    env = {**os.environ, "PATH": f"{tools}/bin:{os.environ['PATH']}", **environ}
    subprocess.run([SCRIPTS / script, *words], env=env, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    return (tools / "calls").read_text().splitlines()


def test_build_images_builds_this_version(tools: Path) -> None:
    assert run("build_images.sh", tools) == [f"docker build --tag greenroom:{__version__} ."]


def test_build_images_takes_a_name_and_extras(tools: Path) -> None:
    (call,) = run("build_images.sh", tools, "--push", IMAGE="r.example.org/g:1", EXTRAS="hub,transformers")
    assert call == "docker build --tag r.example.org/g:1 --build-arg EXTRAS=hub,transformers --push ."


def test_deploy_makes_keys_applies_the_overlay_and_waits(tools: Path) -> None:
    calls = run("deploy.sh", tools, "one-gpu", IMAGE="r.example.org/g:1")
    verbs = [call.removeprefix("kubectl ").removeprefix("--namespace greenroom ") for call in calls]
    assert sorted(verbs) == sorted(
        (
            "apply -f deploy/kubernetes/base/namespace.yaml",
            "get secret greenroom-keys",
            "create secret generic greenroom-keys --from-env-file=/dev/stdin",
            "kustomize deploy/kubernetes/overlays/one-gpu",
            "apply -f -",
            "rollout status deployment/inference --timeout 10m",
        )
    )
    read = (tools / "read").read_text()
    keys = re.findall(r"^GREENROOM_(\w+)_KEY=(gr-[0-9a-f]{48})$", read, re.MULTILINE)
    assert [name for name, _ in keys] == ["ADMIN", "CLIENT", "METRICS"] and len({key for _, key in keys}) == 3
    # Keys are in no command line.
    assert not any(key in " ".join(calls) for _, key in keys)
    assert read.endswith("image: r.example.org/g:1\n")


def test_deploy_refuses_an_overlay_that_is_not_there(tools: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run("deploy.sh", tools, "nowhere")
    assert failed.value.returncode == 2 and "there is no deploy/kubernetes/overlays/nowhere" in failed.value.stderr


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        ([], "--models models"),
        (["--log-level", "debug"], "--models models --log-level debug"),
        (["--config", "greenroom.yaml"], "--config greenroom.yaml"),
        (["-c", "greenroom.yaml"], "-c greenroom.yaml"),
        (["--models=elsewhere"], "--models=elsewhere"),
    ],
)
def test_run_local_serves_the_folder_models_unless_told_what_to_serve(
    tmp_path: Path, words: list[str], passed: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GREENROOM_CONFIG"} | {"GREENROOM": "echo"}
    script = [SCRIPTS / "run_local.sh", *words]
    said = subprocess.run(script, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout
    assert said == f"replicas 2 --first-port 8001 --state-dir .greenroom {passed}\n"


def answers(port: int) -> bool:
    with (
        contextlib.suppress(OSError, HTTPException),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5),
    ):
        return True
    return False


@contextlib.contextmanager
def local_replicas(folder: Path, first: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """run_local.sh in this folder, and its log. Ended by SIGTERM: after SIGKILL its replicas would go on."""
    log = folder / "log"
    env = {**os.environ, "FIRST_PORT": str(first), "GREENROOM": str(Path(sys.executable).with_name("greenroom"))}
    with log.open("wb") as out:
        script = subprocess.Popen([SCRIPTS / "run_local.sh"], cwd=folder, env=env, stdout=out, stderr=out)
    try:
        yield script, log
    finally:
        script.terminate()
        script.wait(START_S)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_local_serves_two_replicas_and_ends_both(tmp_path: Path, number: signal.Signals) -> None:
    first = free_port(2)
    with local_replicas(tmp_path, first) as (script, log):
        for port in (first, first + 1):
            until_now(lambda port=port: answers(port) or script.poll() is not None, log.read_text, START_S)
        assert script.poll() is None, log.read_text()
        assert sorted(path.name for path in (tmp_path / ".greenroom").iterdir()) == ["replica-1", "replica-2"]
        script.send_signal(number)
        assert script.wait(START_S) == 0, log.read_text()
        assert not answers(first) and not answers(first + 1)
        # One signal each: a second one would have cut answers off.
        assert log.read_text().count("shutting down") == 2


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_local_ends_both_where_one_cannot_start(tmp_path: Path) -> None:
    first = free_port(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        with local_replicas(tmp_path, first) as (script, log):
            assert script.wait(START_S) == 1 and "is taken" in log.read_text()
            assert not answers(first)
