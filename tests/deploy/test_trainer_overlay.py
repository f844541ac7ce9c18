"""The overlay `trainer` played on loopback: its pods' commands and variables, real replicas, a stand-in hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

    def __init__(self, folder: Path, hub: str, sync: str) -> None:
        self.folder = folder
        self.objects = render(KUBERNETES / "overlays" / "trainer")
        if sync == "file":
            # As the page of the overlay says.
            page = (KUBERNETES / "overlays" / "trainer" / "README.md").read_text()
            (words,) = re.findall(r"`\[(trainer, keep, --sync, file)\]`", page)
            (variable,) = re.findall(r"add `(SYNC_STATE_FILE=\S+)` to\s+the map `inference-environment`", page)
            container(self._pod_of("trainer"))["args"] = words.split(", ")
            named(self.objects, "ConfigMap", "inference-environment")["data"] |= [variable.split("=")]
        self.ports = [free_port(), free_port()]
        self.repo_id = variables(self.objects, "trainer")["MODEL_REPO_ID"]
        self._hub = hub
        (folder / "greenroom.yaml").write_text(
            named(self.objects, "ConfigMap", "inference-config")["data"]["greenroom.yaml"]
        )

    def _pod_of(self, name: str) -> Object:
        pod: Object = named(self.objects, "Deployment", name)["spec"]["template"]["spec"]
        return pod

    @contextlib.contextmanager
    def replica(self, number: int) -> Iterator[Path]:
        ports = {"PORT": str(self.ports[number]), "METRICS_PORT": str(free_port()), "HOST": "127.0.0.1"}
        places = {"/etc/greenroom": str(self.folder), "/var/lib/greenroom": str(self.folder / f"pod-{number}")}
        with self._pod("inference", f"replica-{number}", ports, places) as log:
            yield log

    @contextlib.contextmanager
    def trainer(self) -> Iterator[Path]:
        with self._pod("trainer", "trainer", {}, {}, "--every-s", "0.2", *self._named_here) as log:
            yield log

    def in_trainer(self, command: str) -> str:
        """What `kubectl exec deployment/trainer -- greenroom …` prints."""
        env = self._environment("trainer", self._here({}))
        run = [sys.executable, "-P", "-m", "greenroom", *command.split(), *self._named_here]
        return subprocess.run(run, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60).stdout

    @property
    def _named_here(self) -> list[str]:
        """On one machine no name has the addresses of both."""
        return [word for port in self.ports for word in ("--replica", f"http://127.0.0.1:{port}")]

    def _here(self, places: dict[str, str]) -> Callable[[str], str]:
        def here(text: str) -> str:
            for there, place in {"/models": str(self.folder / "models"), **places}.items():
                text = text.replace(there, place) if text.startswith(there) else text
            return text

        return here

    def _environment(self, name: str, here: Callable[[str], str]) -> dict[str, str]:
        said = {key: here(text) for key, text in variables(self.objects, name).items()}
        return {"PATH": os.environ["PATH"], "HF_ENDPOINT": self._hub, "PYTHONUNBUFFERED": "1", **said}

    @contextlib.contextmanager
    def _pod(self, name: str, called: str, own: dict[str, str], places: dict[str, str], *more: str) -> Iterator[Path]:
        here = self._here(places)
        words = [*map(here, container(self._pod_of(name))["args"]), *more]
        log, env = self.folder / f"{called}.log", {**self._environment(name, here), **own}
        with log.open("ab") as out:
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
@pytest.mark.parametrize("sync", ["api", "file"])
def test_the_trainer_waits_for_first_weights_updates_all_and_a_new_pod_catches_up(tmp_path: Path, sync: str) -> None:
    with standin_hub() as hub, contextlib.ExitStack() as stack, contextlib.ExitStack() as second:
        cluster = Cluster(tmp_path, hub.url, sync)
        repo, _, quantization = cluster.repo_id.partition(":")

        def publish(name: str) -> None:
            weights = tiny(name).read_bytes()
            assert F16 in weights
            if repo in hub.repos:
                hub.older[hub.commit(repo)] = hub.repos[repo]
            hub.repos[repo] = {f"model-{quantization}.gguf": weights.replace(F16, Q4_K_M)}

        def is_told(words: str) -> bool:
            """By the last report."""
            return words in re.split(r"\n(?=\S)", trainer.read_text())[-1]

        def says(number: int) -> tuple[int, str]:
            status, answer = cluster.ask(number, "/generate", "CLIENT", {"prompt": "hi", "max_tokens": 8})
            return status, answer["choices"][0]["text"].split()[0] if status == 200 else str(answer)

        old, new = [(200, "alpha")], [(200, "bravo")]
        publish("alpha")
        with hub.lock:
            # The trainer comes up first, as it may.
            trainer = stack.enter_context(cluster.trainer())
            until_now(lambda: "cannot be reached" in trainer.read_text(), trainer.read_text)
            logs = [one.enter_context(cluster.replica(number)) for number, one in enumerate((stack, second))]
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
            assert [says(number)] == old and cluster.ask(number, "/readyz")[0] == 200

        publish("bravo")
        hub.tags.add("step-1200")
        page = (KUBERNETES / "overlays" / "trainer" / "README.md").read_text()
        update, verify = re.findall(r"exec deployment/trainer -- greenroom (.*)", page)
        ending = threading.Event()
        ask = lambda number: [says(number) for _ in iter(ending.is_set, True)]  # noqa: E731
        with ThreadPoolExecutor(2) as threads:
            asking = [threads.submit(ask, number) for number in range(2)]
            try:
                told = cluster.in_trainer(update)
            finally:
                ending.set()
        assert told.startswith(f"All replicas serve {cluster.repo_id} as version 2."), told
        assert all(set(one.result()) in ({*old}, {*old, *new}) for one in asking), [one.result() for one in asking]
        assert [says(number) for number in range(2)] == 2 * new
        until_now(lambda: is_told("as version 2."), trainer.read_text, 60)

        # A pod's state goes with it. What is newer meanwhile is for the next update.
        publish("charlie")
        second.close()
        until_now(lambda: is_told("cannot be reached"), trainer.read_text, 60)
        shutil.rmtree(tmp_path / "pod-1")
        stack.enter_context(cluster.replica(1))
        until_now(lambda: is_told("All replicas serve"), trainer.read_text, 60)
        assert [says(number) for number in range(2)] == 2 * new
        assert cluster.in_trainer(verify).startswith("All replicas serve the same weights.")
