"""The overlay `trainer` played on loopback: its pods' commands and variables, real replicas, a stand-in hub."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.kustomize import KUBERNETES, Object, render
from tests.deploy.test_kubernetes import SECRET, container, named
from tests.models import tiny
from tests.ports import free_port
from tests.standins.standin_hub import standin_hub
from tests.waiting import PATIENCE_S, until_now

# A general.file_type, as u32: what makes the tiny model, of 16 bits, pass for one of the quantization asked for.
F16, Q4_K_M = (b"general.file_type" + (4).to_bytes(4, "little") + kind.to_bytes(4, "little") for kind in (1, 15))


def variables(objects: list[Object], name: str) -> dict[str, str]:
    """The environment of the only container of this Deployment; the Secret is a made-up one."""
    said: dict[str, str] = {}
    pod = container(named(objects, "Deployment", name)["spec"]["template"]["spec"])
    for source in pod["envFrom"]:
        said |= (
            named(objects, "ConfigMap", source["configMapRef"]["name"])["data"] if "configMapRef" in source else SECRET
        )
    for variable in pod["env"]:
        source = variable["valueFrom"]
        if ref := source.get("configMapKeyRef"):
            said[variable["name"]] = named(objects, "ConfigMap", ref["name"])["data"][ref["key"]]
        elif ref := source.get("secretKeyRef"):
            said[variable["name"]] = SECRET[ref["key"]]
        else:
            said[variable["name"]] = "greenroom"
    return said


class Cluster:
    """Two replicas and a trainer as processes; /models is a folder, and so is each pod's state."""

    def __init__(self, folder: Path, hub: str) -> None:
        self.folder = folder
        self.objects = render(KUBERNETES / "overlays" / "trainer")
        self.ports = [free_port(), free_port()]
        self.repo_id = variables(self.objects, "trainer")["MODEL_REPO_ID"]
        self._hub = hub
        (folder / "greenroom.yaml").write_text(
            named(self.objects, "ConfigMap", "inference-config")["data"]["greenroom.yaml"]
        )

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[Path]:
        ports = {"PORT": str(self.ports[number]), "METRICS_PORT": str(free_port()), "HOST": "127.0.0.1"}
        places = {"/etc/greenroom": str(self.folder), "/var/lib/greenroom": str(self.folder / f"pod-{number}")}
        with self._pod("inference", f"replica-{number}", ports, places) as log:
            yield log

    @contextlib.contextmanager
    def trainer(self) -> Iterator[Path]:
        # On one machine no name has the addresses of both.
        named_here = [word for port in self.ports for word in ("--replica", f"http://127.0.0.1:{port}")]
        with self._pod("trainer", "trainer", {}, {}, "--every-s", "0.2", *named_here) as log:
            yield log

    @contextlib.contextmanager
    def _pod(self, name: str, called: str, own: dict[str, str], places: dict[str, str], *more: str) -> Iterator[Path]:
        def here(text: str) -> str:
            for there, place in {"/models": str(self.folder / "models"), **places}.items():
                text = text.replace(there, place) if text.startswith(there) else text
            return text

        pod = container(named(self.objects, "Deployment", name)["spec"]["template"]["spec"])
        words = [*map(here, pod["args"]), *more]
        said = {key: here(text) for key, text in variables(self.objects, name).items()}
        env = {"PATH": os.environ["PATH"], "HF_ENDPOINT": self._hub, "PYTHONUNBUFFERED": "1", **said, **own}
        log = self.folder / f"{called}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "greenroom", *words], env=env, stdout=out, stderr=out, cwd=self.folder
            )
        try:
            yield log
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, log.read_text()

    def ask(self, number: int, path: str, key: str = "ADMIN", body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {SECRET[f'GREENROOM_{key}_KEY']}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[number]}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)
        except OSError:
            return 0, None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_trainer_waits_for_the_first_weights_and_then_finds_all_in_step(tmp_path: Path) -> None:
    with standin_hub() as hub, contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, hub.url)
        repo, _, quantization = cluster.repo_id.partition(":")
        weights = tiny("alpha").read_bytes()
        assert F16 in weights
        hub.repos[repo] = {f"model-{quantization}.gguf": weights.replace(F16, Q4_K_M)}
        with hub.lock:
            # The trainer comes up first, as it may.
            trainer = stack.enter_context(cluster.trainer())
            until_now(lambda: "cannot be reached" in trainer.read_text(), trainer.read_text)
            logs = [stack.enter_context(cluster.replica(number)) for number in range(2)]
            words = f"it is being updated to {cluster.repo_id}"
            until_now(lambda: trainer.read_text().rpartition("Not all")[2].count(words) == 2, trainer.read_text, 60)
            assert [cluster.ask(number, "/readyz")[0] for number in range(2)] == [503, 503]
        until_now(
            lambda: f"\nAll replicas serve {cluster.repo_id} as version 1." in trainer.read_text(),
            trainer.read_text,
            60,
        )
        for number in range(2):
            _, told = cluster.ask(number, "/status")
            assert (told["model_version"], told["model_repo_id"]) == (1, cluster.repo_id), logs[number].read_text()
            status, answer = cluster.ask(number, "/generate", "CLIENT", {"prompt": "hi", "max_tokens": 8})
            assert status == 200 and answer["choices"][0]["text"].split()[0] == "alpha"
            assert cluster.ask(number, "/readyz")[0] == 200
