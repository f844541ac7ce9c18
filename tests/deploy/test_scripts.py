"""The scripts: two replicas on this machine, the image, the cluster. docker and kubectl are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from greenroom import __version__
from greenroom.engines.estimates.gguf_header import read_header
from tests.models import tiny
from tests.ports import free_port
from tests.standins.standin_hub import standin_hub
from tests.waiting import PATIENCE_S, until_now

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
# Two gateways start at once, perhaps beside other tests.
START_S = 150.0
JSON = {"Content-Type": "application/json"}
# What run_local.sh leaves where nothing was named.
WRITTEN = [".greenroom", ".greenroom/replica-1", ".greenroom/replica-2", "models"]
WRITTEN += [f"models/tiny-{number}.gguf" for number in (1, 2)]


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
        (["--config", "greenroom.yaml"], "--config greenroom.yaml"),
        (["-c", "greenroom.yaml"], "-c greenroom.yaml"),
        (["--models=elsewhere"], "--models=elsewhere"),
    ],
)
def test_run_local_serves_what_it_is_told_to(tmp_path: Path, words: list[str], passed: str) -> None:
    assert printed(tmp_path, *words) == f"replicas 2 --first-port 8001 --state-dir .greenroom {passed}\n"


@pytest.mark.parametrize("named", ["MODEL_REPO_ID", "GREENROOM_CONFIG", "greenroom.yaml"])
def test_run_local_makes_no_model_where_one_is_named(tmp_path: Path, named: str) -> None:
    if named.islower():
        (tmp_path / named).touch()
    assert printed(tmp_path, **{} if named.islower() else {named: "org/name"}).startswith("replicas 2 ")
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["hf_home"]


def test_run_local_makes_two_tiny_models_and_says_what_to_ask_them_as_the_guide_shows(tmp_path: Path) -> None:
    said = printed(tmp_path, "--log-level", "debug")
    told, passed = said.rsplit("\n\n", 1)
    assert passed == "replicas 2 --first-port 8001 --state-dir .greenroom --models models --log-level debug\n"
    assert f"```text\n{told}\n```\n" in (ROOT / "docs" / "deploying.md").read_text()
    made = sorted((tmp_path / "models").glob("*.gguf"))
    assert [read_header(path).name for path in made] == ["tiny-1", "tiny-2"]
    before = [path.stat().st_mtime_ns for path in made]
    assert printed(tmp_path, "--log-level", "debug") == said
    assert [path.stat().st_mtime_ns for path in made] == before


def printed(folder: Path, *words: str, **environ: str) -> str:
    """What run_local.sh prints in this folder, with a stand-in that prints how greenroom would be called."""
    script, env = [SCRIPTS / "run_local.sh", *words], {**bare(folder), "GREENROOM": "echo", **environ}
    return subprocess.run(script, cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def bare(folder: Path) -> dict[str, str]:
    """The environment of somebody who has set nothing, with an empty home, and greenroom on the path."""
    for name in ("home", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PATH": path}


def answers(port: int) -> bool:
    with (
        contextlib.suppress(OSError, HTTPException),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5),
    ):
        return True
    return False


def until_up(script: subprocess.Popen[bytes], log: Path, *are_up: Callable[[], bool]) -> None:
    for is_up in are_up:
        until_now(lambda is_up=is_up: is_up() or script.poll() is not None, log.read_text, START_S)
    assert script.poll() is None, log.read_text()


@contextlib.contextmanager
def local_replicas(folder: Path, *inside: str, **environ: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """run_local.sh in this folder, and its log. Ended by SIGTERM: after SIGKILL its replicas would go on."""
    log, command, env = folder / "log", [*inside, SCRIPTS / "run_local.sh"], {**bare(folder), **environ}
    with log.open("wb") as out:
        # A group of its own, as a shell gives to what it runs: Ctrl-C reaches all of it.
        script = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, process_group=0)
    try:
        yield script, log
    finally:
        script.terminate()
        script.wait(START_S)


def generated(port: int) -> tuple[int, str]:
    """The version that answers a prompt, and what it says. Raises what urllib does for a failure."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/generate", b'{"prompt": "Hello"}', JSON)
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return int(answer.headers["X-Model-Version"]), json.load(answer)["choices"][0]["text"]


def typed(command: str, *inside: str) -> list[dict[str, Any]]:
    """The JSON answers to a command of what the script prints."""
    words = [*inside, "bash", "-c", command]
    said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=START_S).stdout
    return [json.loads(one) for one in re.split(r"(?<=})(?={)", said)]


def commands_in(text: str) -> list[str]:
    """What the script prints to be typed: status, generate, update."""
    return re.findall(r"^(for port .*?done)$", text, re.MULTILINE | re.DOTALL)


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that name this folder, or whose environment does: replicas, and all below them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            known = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            found += [str(known)] if os.fsencode(folder) in known else []
    return found


def written(folder: Path) -> list[str]:
    """What is in the folder, beside the test's own: all of models, and the roots of the rest."""
    assert not any((folder / "home").iterdir()) and not any((folder / "tmp").iterdir())
    below = [path for path in (folder / "models").rglob("*") if not path.is_dir()]
    found = {*folder.iterdir(), *(folder / ".greenroom").iterdir(), *below} - {folder / "log"}
    return sorted(str(path.relative_to(folder)) for path in found if path.name not in ("home", "tmp"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ended_by", ["ctrl-c", "sigterm"])
def test_run_local_does_as_it_prints_and_updates_both_without_a_failed_answer(tmp_path: Path, ended_by: str) -> None:
    ports = [first := free_port(2), first + 1]
    with local_replicas(tmp_path, FIRST_PORT=str(first)) as (script, log), ThreadPoolExecutor(2) as threads:
        until_up(script, log, *(partial(answers, port) for port in ports))
        status, generate, update = commands_in(log.read_text())
        assert [(one["model_version"], one["model_repo_id"]) for one in typed(status)] == 2 * [(1, "tiny-1.gguf")]
        assert [one["choices"][0]["text"] for one in typed(generate)] == 2 * [" tiny-1 says hello"]

        ending = threading.Event()
        ask = lambda port: [generated(port) for _ in iter(ending.is_set, True)]  # noqa: E731
        asking = [threads.submit(ask, port) for port in ports]
        try:
            assert [one["model_version"] for one in typed(update)] == [2, 2]
            assert [generated(port) for port in ports] == 2 * [(2, " tiny-2 says hello")]
        finally:
            ending.set()
        for one in asking:
            old, new = (1, " tiny-1 says hello"), (2, " tiny-2 says hello")
            said = one.result(START_S)
            assert said[0] == old and said == sorted(said) and set(said) <= {old, new}, "none failed, none went back"
        assert [(one["model_version"], one["model_repo_id"]) for one in typed(status)] == 2 * [(2, "tiny-2.gguf")]

        assert len(processes_of(tmp_path)) >= 4
        if ended_by == "ctrl-c":
            os.killpg(script.pid, signal.SIGINT)
        else:
            script.terminate()
        assert script.wait(START_S) == 0, log.read_text()
        assert not processes_of(tmp_path)
        # One signal each: a second one would have cut answers off.
        assert log.read_text().count("shutting down") == 2
        assert written(tmp_path) == WRITTEN


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_run_local_ends_both_where_one_cannot_start(tmp_path: Path) -> None:
    first = free_port(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        with local_replicas(tmp_path, FIRST_PORT=str(first)) as (script, log):
            assert script.wait(START_S) == 1 and "is taken" in log.read_text()
            assert not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))),
    reason="a network of its own needs root, unshare, nsenter and ip",
)
def test_on_its_own_ports_the_guides_commands_work_and_a_second_run_goes_on(tmp_path: Path) -> None:
    """Ports 8001 and 8002 are everybody's: the replicas have a network of their own."""
    guide = (ROOT / "docs" / "deploying.md").read_text()
    status, generate, _ = commands_in(guide)
    (update,) = re.findall(r"`(greenroom trainer update [^`]*)`", guide)
    alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    for number, serves in ((1, (1, "tiny-1.gguf")), (2, (2, "tiny-2.gguf"))):
        with local_replicas(tmp_path, *alone) as (script, log):
            beside = ("nsenter", "--net", "--target", str(script.pid), "env", *map("=".join, bare(tmp_path).items()))
            ready = ["curl", "--fail", "--fail-early", *(f"127.0.0.1:{port}/readyz" for port in (8001, 8002))]
            until_up(
                script, log, lambda words=(*beside, *ready): not subprocess.run(words, capture_output=True).returncode
            )
            assert [(one["model_version"], one["model_repo_id"]) for one in typed(status, *beside)] == 2 * [serves]
            if number == 1:
                told = subprocess.run([*beside, *update.split()], capture_output=True, text=True, timeout=START_S)
                assert told.stdout.startswith("All replicas serve tiny-2.gguf as version 2."), told.stderr
            assert [one["choices"][0]["text"] for one in typed(generate, *beside)] == 2 * [" tiny-2 says hello"]
            os.killpg(script.pid, signal.SIGINT)
            assert script.wait(START_S) == 0, log.read_text()
    assert not processes_of(tmp_path) and written(tmp_path) == WRITTEN


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_both_fetch_the_private_repository_that_is_named_and_are_updated_to_another(tmp_path: Path) -> None:
    ports = [first := free_port(2), first + 1]
    with standin_hub() as hub:
        hub.repos = {f"org/{name}-GGUF": {"model.gguf": tiny(name).read_bytes()} for name in ("alpha", "bravo")}
        hub.token = "hf_secret"
        named = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "MODEL_REPO_ID": "org/alpha-GGUF"}
        # Replicas that share GPUs would need Redis.
        with local_replicas(tmp_path, FIRST_PORT=str(first), CUDA_VISIBLE_DEVICES="-1", **named) as (script, log):
            until_up(script, log, *(partial(answers, port) for port in ports))
            assert [(number, text.split()[0]) for number, text in map(generated, ports)] == 2 * [(1, "alpha")]
            replicas = [word for port in ports for word in ("--replica", f"http://127.0.0.1:{port}")]
            update = ["greenroom", "trainer", "update", "org/bravo-GGUF", *replicas]
            told = subprocess.run(update, env=bare(tmp_path), capture_output=True, text=True, timeout=START_S)
            assert told.stdout.startswith("All replicas serve org/bravo-GGUF as version 2."), told.stderr
            assert [(number, text.split()[0]) for number, text in map(generated, ports)] == 2 * [(2, "bravo")]
            os.killpg(script.pid, signal.SIGINT)
            assert script.wait(START_S) == 0, log.read_text()
    assert not processes_of(tmp_path)
    assert {path.partition("/")[0] for path in written(tmp_path)} == {".greenroom", "models"}
