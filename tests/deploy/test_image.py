"""The image without Docker: its steps are executed, and the pod's command runs in it as the cluster would run it.

Read-only root, user 10001, process 1, the variables of the ConfigMap (but the ports, which may be taken here).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.process import proc
from tests.deploy.image_root import ROOT, Builder, Stage, cannot, instructions
from tests.deploy.kustomize import KUBERNETES, render
from tests.deploy.test_kubernetes import KEYS, SECRET, container, named, pods
from tests.harness import FAKE_ENGINE
from tests.ports import free_port
from tests.waiting import until_now

DOCKERFILE = (ROOT / "Dockerfile").read_text()
USER = 10001
START_S = 150.0


def test_what_runs_has_no_tools_to_build_with_and_is_not_root() -> None:
    steps = instructions(DOCKERFILE)
    (*_, last_from) = (index for index, (word, _) in enumerate(steps) if word == "FROM")
    final = steps[last_from:]
    assert "-slim-" in final[0][1]
    assert not [rest for word, rest in final if word == "RUN" and re.search(r"apt|pip|gcc|curl", rest)]
    assert [rest for word, rest in final if word == "USER"] == [f"{USER}:{USER}"]
    copied = [rest for word, rest in final if word == "COPY"]
    assert copied == ["--from=build /opt/greenroom /opt/greenroom"]


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {source for word, rest in instructions(DOCKERFILE) if word == "COPY" for source in rest.split()[:-1]}
    assert "*" in ignored and kept == {name for name in copied if not name.startswith(("-", "/"))}


# --- built and run --------------------------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(cannot() is not None, reason=str(cannot()))


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Pure and with one small extra: compiling takes minutes."""
    folder = tmp_path_factory.mktemp("image")
    # The user of the image must be able to walk to it.
    for parent in (folder, folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    return Builder(folder, {"COMPILE": "0", "EXTRAS": "comfyui"}).build(DOCKERFILE)


class Pod:
    """The pod's container as a process, with volumes below `folder`."""

    def __init__(self, image: Stage, folder: Path) -> None:
        base = render(KUBERNETES / "base")
        self.image, self.folder, self.log = image, folder, folder / "log"
        ports = {"PORT": str(free_port()), "METRICS_PORT": str(free_port())}
        self.port, self.metrics_port = map(int, ports.values())
        said = named(base, "ConfigMap", "inference-environment")["data"]
        # There is no hub here that the model could be fetched from, and the image has no engine for it.
        self.env = {**said, **SECRET, "POD_NAMESPACE": "greenroom", **ports, "MODEL_REPO_ID": ""}
        config = named(base, "ConfigMap", "inference-config")["data"]["greenroom.yaml"]
        self.volumes = self._volumes(next(pods(base)), config)
        words = [*image.said["ENTRYPOINT"], *container(next(pods(base)))["args"]]
        with self.log.open("wb") as out:
            command = image.command(words, self.env, volumes=self.volumes, read_only=True)
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def _volumes(self, pod: dict[str, Any], config: str) -> dict[Path, str]:
        """Folders for the pod's volumes, by where they are mounted; one model is added to the configuration."""
        volumes = {}
        for mount in container(pod)["volumeMounts"]:
            if mount["mountPath"] == "/dev/shm":
                continue
            volumes[folder := self.folder / mount["name"]] = mount["mountPath"]
            folder.mkdir()
            os.chown(folder, USER, USER)
            place = self.image.root / mount["mountPath"].strip("/")
            place.mkdir(parents=True, exist_ok=True)
        (programs := self.folder / "models" / "tests" / "standins").mkdir(parents=True)
        shutil.copy(FAKE_ENGINE.parents[1] / "__init__.py", programs.parent)
        for program in FAKE_ENGINE.parent.glob("*.py"):
            shutil.copy(program, programs)
        fake = {"cmd": "python /models/tests/standins/fake_engine.py --port ${PORT} --name fake", "memory_mib": 10}
        whole = {**yaml.safe_load(config), "models": {"fake": fake}}
        (self.folder / "config" / "greenroom.yaml").write_text(yaml.safe_dump(whole))
        return volumes

    @property
    def gateway(self) -> int:
        """The pid of the gateway as this machine sees it: the one child of unshare."""
        (pid,) = (seen.pid for seen in filter(None, map(proc.stat, proc.pids())) if seen.parent == self.process.pid)
        return pid

    def ask(self, path: str, *, port: int = 0, key: str = "", host: str = "inference", body: Any = None) -> Any:
        """The open answer."""
        line = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=START_S)
        headers = {"Host": f"{host}:{self.port}", "Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        line.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        return line.getresponse()

    def status(self, path: str, **options: Any) -> int:
        with contextlib.suppress(OSError), self.ask(path, **options) as answer:
            answer.read()
            return int(answer.status)
        return 0


@pytest.fixture
def pod(image: Stage, tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(image, tmp_path)
    try:
        until_now(lambda: pod.status("/readyz") == 200 or pod.process.poll() is not None, pod.log.read_text, START_S)
        assert pod.process.poll() is None, pod.log.read_text()
        yield pod
    finally:
        # The namespace of processes ends with its first one, and that with unshare.
        pod.process.kill()
        pod.process.wait()


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_pod_answers_its_probes_and_drains(pod: Pod) -> None:
    with open(f"/proc/{pod.gateway}/status") as lines:
        said = dict(line.rstrip("\n").split(":\t", 1) for line in lines if ":\t" in line)
    assert said["Uid"].split() == [str(USER)] * 4 and said["NSpid"].split()[-1] == "1"
    # Probes ask by the pod's address, others by the Service's names, and a page's own name is no such name.
    assert [pod.status(path, host="10.1.2.3") for path in ("/healthz", "/readyz")] == [200, 200]
    assert pod.status("/v1/models", host="inference.greenroom.svc", key=KEYS["CLIENT"]) == 200
    assert pod.status("/v1/models", host="attacker.example.org", key=KEYS["CLIENT"]) == 403
    assert pod.status("/v1/models") == 401
    assert pod.status("/metrics", port=pod.metrics_port, key=KEYS["METRICS"]) == 200
    assert pod.status("/v1/models", key=KEYS["METRICS"]) == 403
    check = pod.image.command(pod.image.said["HEALTHCHECK"], pod.env, read_only=True)
    assert subprocess.run(check, check=False, timeout=START_S).returncode == 0
    # Nothing of the root can be written to by anyone in the pod.
    write = pod.image.command(["touch", "/opt/greenroom/x"], read_only=True, user="0:0")
    assert subprocess.run(write, check=False, capture_output=True, timeout=START_S).returncode != 0
    drains(pod)


def drains(pod: Pod) -> None:
    """SIGTERM: an answer that runs ends well, the pod is not ready meanwhile, and then everything has ended."""
    body = {
        "model": "fake",
        "stream": True,
        "messages": [{"role": "user", "content": "hi"}],
        "tokens": 200,
        "token_s": 0.05,
    }
    answer = pod.ask("/v1/chat/completions", key=KEYS["CLIENT"], body=body)
    assert answer.status == 200, answer.read()
    first = answer.readline()
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.append(answer.read()))
    reader.start()
    os.kill(pod.gateway, signal.SIGTERM)
    until_now(lambda: pod.status("/readyz") == 503, "it is not ready any more")
    assert pod.status("/healthz") == 200
    reader.join(START_S)
    assert first and rest[0].rstrip().endswith(b"data: [DONE]")
    assert pod.process.wait(START_S) == 0, pod.log.read_text()
