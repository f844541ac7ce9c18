"""The image without Docker: built as `make image` does, then run as a platform and as a cluster would run it.

Read-only root, user 10001, process 1. One has the variables of the runner API and a network of its own, the other those
of the ConfigMap (but the ports, which may be taken here).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from greenroom.process import proc
from tests.deploy.image_root import MAKE, ROOT, Image, build, cannot
from tests.deploy.kustomize import KUBERNETES, render
from tests.deploy.test_kubernetes import KEYS, SECRET, container, named, pods
from tests.features.governance.token_rig import key_file, shared_token
from tests.harness import FAKE_ENGINE
from tests.models import tiny
from tests.ports import free_port
from tests.waiting import until_now

DOCKERFILE = (ROOT / "Dockerfile").read_text()
instructions = runpy.run_path(str(MAKE))["instructions"]
USER = 10001
START_S = 150.0


def test_what_runs_has_no_tools_to_build_with_and_is_not_root() -> None:
    steps = instructions(DOCKERFILE)
    (*_, last_from) = (index for index, (word, _) in enumerate(steps) if word == "FROM")
    final = steps[last_from:]
    assert "-slim-" in final[0][1]
    assert not [rest for word, rest in final if word == "RUN" and re.search(r"pip|gcc|curl|-dev", rest)]
    assert [rest for word, rest in final if word == "USER"] == [f"{USER}:{USER}"]
    copied = [rest for word, rest in final if word == "COPY"]
    assert copied == ["--from=build /opt/greenroom /opt/greenroom"]


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {source for word, rest in instructions(DOCKERFILE) if word == "COPY" for source in rest.split()[:-1]}
    assert "*" in ignored and kept == {name for name in copied if not name.startswith(("-", "/"))}


# --- built and run --------------------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    """Pure: compiling takes minutes."""
    # The user of the image must be able to walk to it.
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    *steps, result = build(tmp_path / "image", COMPILE="0")
    assert any("pip" in step for step in steps)
    documented = (ROOT / "docs" / "deploying.md").read_text()
    assert re.sub(r"\d+ MB", "", result.partition(": ")[2]) in re.sub(r"\d+ MB", "", documented)
    yield Image(tmp_path / "image")
    shutil.rmtree(tmp_path / "image")


@pytest.mark.skipif(cannot() is not None, reason=str(cannot()))
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_image_serves_by_variables_alone_and_as_a_pod(image: Image, tmp_path: Path) -> None:
    """One test: to build the image takes longer than all else."""
    has_no_tools_and_nothing_of_this_machine(image.root)
    for part in (serves_by_its_environment_alone, answers_its_probes_and_drains):
        (folder := tmp_path / part.__name__).mkdir()
        part(image, folder)
    # Where volumes are mounted there are empty files.
    new = ["find", image.root, "-type", "f", "-newer", image.archive, "-size", "+0"]
    assert subprocess.run(new, capture_output=True, text=True, check=True).stdout == ""


def has_no_tools_and_nothing_of_this_machine(root: Path) -> None:
    assert [*root.glob("usr/bin/python3.*")]
    for unwanted in ("usr/include/*.h", "usr/bin/*gcc*", "usr/bin/pip*", "var/lib/apt/lists/*_*", "usr/share/man/*/*"):
        assert not [*root.glob(unwanted)], unwanted
    docs = [path for path in root.glob("usr/share/doc/**/*") if path.is_file()]
    assert {path.name for path in docs} == {"copyright"}
    assert not [*root.glob("etc/apt/sources.list*/*")] and (root / "etc" / "resolv.conf").read_text() == ""


def user_folder(folder: Path) -> Path:
    folder.mkdir()
    os.chown(folder, USER, USER)
    return folder


class Container:
    """A container of the image as a process."""

    def __init__(self, image: Image, log: Path, words: list[str], env: Mapping[str, str], **options: Any) -> None:
        self.image, self.log, self.env = image, log, env
        command = image.command([*image.config["Entrypoint"], *words], env, **options)
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The namespace of processes ends with its first one, and that with unshare.
        self.process.kill()
        self.process.wait()

    def status(self, path: str) -> int:
        raise NotImplementedError

    def until_ready(self) -> None:
        until_now(lambda: self.status("/readyz") == 200 or self.process.poll() is not None, self.log.read_text, START_S)
        assert self.process.poll() is None, self.log.read_text()

    @property
    def gateway(self) -> int:
        """The pid of the gateway as this machine sees it: the one child of unshare."""
        (pid,) = (seen.pid for seen in filter(None, map(proc.stat, proc.pids())) if seen.parent == self.process.pid)
        return pid

    def run_inside(self, words: list[str], *, given: str = "") -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.gateway}", "--mount", "--net", "--uts", "--root"]
        command = [*enter, *self.image.inside(words, self.env)]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=START_S)

    def is_as_it_should_be(self) -> None:
        with open(f"/proc/{self.gateway}/status") as lines:
            said = dict(line.rstrip("\n").split(":\t", 1) for line in lines if ":\t" in line)
        assert said["Uid"].split() == [str(USER)] * 4 and said["NSpid"].split()[-1] == "1"
        check = self.run_inside(self.image.config["Healthcheck"]["Test"][1:])
        assert check.returncode == 0, check.stderr
        # Nothing of the root can be written to by anyone inside.
        assert "Read-only" in self.run_inside(["touch", "/opt/greenroom/x"]).stderr


# --- a runner -------------------------------------------------------------------------------------------------------

# All that the runner API names, with its values.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "0",
    "HF_HOME": "/models/cache",
    "MODEL_BASE_PATH": "/models",
    "VLLM_ENABLE_PREFIX_CACHING": "true",
    "VLLM_MAX_MODEL_LEN": "32768",
    "VLLM_GPU_MEMORY_UTILIZATION": "0.9",
    "ENABLE_MULTI_TENANT": "true",
    "DEFAULT_RATE_LIMIT": "100req/min",
    "TENANT_RATE_LIMIT_community-x": "100req/min",
    "TENANT_RATE_LIMIT_community-y": "500req/min",
    "TENANT_RATE_LIMIT_default": "50req/min",
    "VERIFIED_OP_TOKEN_KEY_PATH": "/etc/safebox/model-api.key",
    "LOG_LEVEL": "info",
    "LOG_FORMAT": "json",
    "ENABLE_METRICS": "true",
    "METRICS_PORT": "9090",
    "MAX_QUEUE_DEPTH": "16",
    "QUEUE_TIMEOUT_MS": "30000",
}
NAME = "safebox-model-llm"
CLIENT = """
import json, sys, urllib.error, urllib.request
url, body = json.load(sys.stdin)
data = json.dumps(body).encode() if body else None
try:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    answer = urllib.request.urlopen(request, timeout=120)
except urllib.error.HTTPError as refused:
    answer = refused
print(json.dumps([answer.status, answer.read().decode()]))
"""


class Runner(Container):
    """Reached by its name, from inside of its network."""

    def ask(self, path: str, body: Any = None, *, port: int = 8080) -> tuple[int, str]:
        given = json.dumps([f"http://{NAME}:{port}{path}", body])
        done = self.run_inside(["python", "-I", "-c", CLIENT], given=given)
        status, text = json.loads(done.stdout) if done.returncode == 0 else (0, done.stderr)
        return status, text

    def status(self, path: str) -> int:
        # Before the process is there, and before it listens.
        with contextlib.suppress(ValueError):
            return self.ask(path)[0]
        return 0

    def load(self, model: str) -> dict[str, Any]:
        """Ordered and polled as the API's client does it."""
        token = shared_token(operation="model-load", modelId=model, issuedAt=int(time.time()), signers=["admin1"])
        status, text = self.ask("/v1/models/load", {"modelId": model, "verifiedOpToken": token})
        assert status == 202, text
        path = f"/v1/models/load/{json.loads(text)['taskId']}"
        until_now(lambda: json.loads(self.ask(path)[1])["status"] != "loading", self.log.read_text)
        done: dict[str, Any] = json.loads(self.ask(path)[1])
        return done


def serves_by_its_environment_alone(image: Image, folder: Path) -> None:
    (folder / "hosts").write_text(f"127.0.0.1 localhost {NAME}\n")
    models = user_folder(folder / "models")
    for name in ("alpha", "beta"):
        shutil.copy(tiny(name), models / f"{name}.gguf")
    key = Path(key_file(folder))
    os.chown(key, USER, USER)
    volumes = {
        "/etc/hosts": folder / "hosts",
        "/models": models,
        "/var/lib/greenroom": user_folder(folder / "state"),
        VARIABLES["VERIFIED_OP_TOKEN_KEY_PATH"]: key,
    }
    with Runner(image, folder / "log", image.config["Cmd"], VARIABLES, volumes=volumes, hostname=NAME) as runner:
        runner.until_ready()
        runner.is_as_it_should_be()
        assert runner.status("/health") == 200
        capabilities = json.loads(runner.ask("/v1/capabilities")[1])
        assert capabilities["runnerId"] == NAME, capabilities
        assert {"alpha.gguf", "beta.gguf"} <= set(capabilities["models"]["available"]), capabilities
        chat = {"model": "alpha.gguf", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        status, text = runner.ask("/v1/chat/completions", chat)
        assert status == 200 and "alpha says hello" in text, text
        assert runner.load("beta.gguf")["status"] == "completed"
        status, metrics = runner.ask("/metrics", port=9090)
        assert status == 200 and "greenroom_requests_total{" in metrics
        assert runner.ask("/metrics", port=8080)[0] == 200
        os.kill(runner.gateway, signal.SIGTERM)
        assert runner.process.wait(START_S) == 0, runner.log.read_text()


# --- a pod ----------------------------------------------------------------------------------------------------------


class Pod(Container):
    """The pod's container, with volumes below `folder`."""

    def __init__(self, image: Image, folder: Path) -> None:
        base = render(KUBERNETES / "base")
        ports = {"PORT": str(free_port()), "METRICS_PORT": str(free_port())}
        self.port, self.metrics_port = map(int, ports.values())
        said = named(base, "ConfigMap", "inference-environment")["data"]
        # There is no hub here that the model could be fetched from.
        env = {**said, **SECRET, "POD_NAMESPACE": "greenroom", **ports, "MODEL_REPO_ID": ""}
        config = named(base, "ConfigMap", "inference-config")["data"]["greenroom.yaml"]
        pod = next(pods(base))
        volumes = self._volumes(folder, pod, config)
        super().__init__(image, folder / "log", container(pod)["args"], env, volumes=volumes)

    def _volumes(self, folder: Path, pod: dict[str, Any], config: str) -> dict[str, Path]:
        """Folders for the pod's volumes, by where they are mounted; one model is added to the configuration."""
        mounts = {one["mountPath"]: one["name"] for one in container(pod)["volumeMounts"]}
        volumes = {
            path: user_folder(folder / name) for path, name in mounts.items() if path not in ("/dev/shm", "/tmp")
        }
        (programs := folder / "models" / "tests" / "standins").mkdir(parents=True)
        shutil.copy(FAKE_ENGINE.parents[1] / "__init__.py", programs.parent)
        for program in FAKE_ENGINE.parent.glob("*.py"):
            shutil.copy(program, programs)
        fake = {"cmd": "python /models/tests/standins/fake_engine.py --port ${PORT} --name fake", "memory_mib": 10}
        whole = {**yaml.safe_load(config), "models": {"fake": fake}}
        (folder / "config" / "greenroom.yaml").write_text(yaml.safe_dump(whole))
        return volumes

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


def answers_its_probes_and_drains(image: Image, folder: Path) -> None:
    with Pod(image, folder) as pod:
        pod.until_ready()
        pod.is_as_it_should_be()
        answers_probes(pod)
        drains(pod)


def answers_probes(pod: Pod) -> None:
    # Probes ask by the pod's address, others by the Service's names, and a page's own name is no such name.
    assert [pod.status(path, host="10.1.2.3") for path in ("/healthz", "/readyz")] == [200, 200]
    assert pod.status("/v1/models", host="inference.greenroom.svc", key=KEYS["CLIENT"]) == 200
    assert pod.status("/v1/models", host="attacker.example.org", key=KEYS["CLIENT"]) == 403
    assert pod.status("/v1/models") == 401
    assert pod.status("/metrics", port=pod.metrics_port, key=KEYS["METRICS"]) == 200
    assert pod.status("/v1/models", key=KEYS["METRICS"]) == 403


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
