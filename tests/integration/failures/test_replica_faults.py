"""Two replicas as processes, and a trainer: one is killed, loses its disk, or stops; then all agree again."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.process import orphans
from greenroom.trainer import Outcome, Patience, ReplicaStatus, Report, Trainer
from greenroom.trainer.replica import Replica
from tests.deploy.test_scripts import answers
from tests.harness import write_config
from tests.integration.versions.test_versions import models, options, weights
from tests.ports import free_port
from tests.redis_server import redis_server
from tests.standins import fake_gpu
from tests.waiting import PATIENCE_S, until_now

PATIENCE = Patience(answer_s=PATIENCE_S, away_s=PATIENCE_S, poll_s=0.05)
# Of a trainer that soon takes a silent replica for lost.
HASTY = Patience(answer_s=4, away_s=5, poll_s=0.05)
NAMES = ("bravo", "charlie", "delta", "alpha")


class Pair:
    """`greenroom replicas 2` as a process, with what a test needs to disturb it."""

    def __init__(self, folder: Path, *words: str, **sections: Any) -> None:
        self.folder, self.state_file = folder, str(folder / "sync_state.json")
        sections = {**options(folder), "versions": {"state_file": self.state_file}, **sections}
        config, port = write_config(folder, models(folder, keep=3), **sections), free_port(2)
        self.log = folder / "log"
        argv = [sys.executable, "-P", "-m", "greenroom", "replicas", "2", "--first-port", str(port)]
        argv += ["--config", str(config), "--state-dir", str(folder / "state"), *words]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
        for one in (port, port + 1):
            until_now(lambda one=one: answers(one) or self.process.poll() is not None, self.log.read_text)

    def trainer(self, patience: Patience = PATIENCE, *, by_file: bool = False) -> Trainer:
        return Trainer(self.urls, patience=patience, state_file=self.state_file if by_file else None)

    def second_pid(self) -> int:
        return int((self.folder / "state" / "replica-2" / "lock").read_text())

    def status(self) -> ReplicaStatus | None:
        """Of the second replica, if it answers."""
        seen = Replica(self.urls[1], api_key=None, model=None, answer_max_s=PATIENCE_S).look()
        return seen if isinstance(seen, ReplicaStatus) else None

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, self.log.read_text()
        for id in self.folder.glob("state/replica-*/id"):
            assert not orphans.find(id.read_text().strip() + ":"), "engines were left behind"


@contextlib.contextmanager
def pair(folder: Path, *words: str, **sections: Any) -> Iterator[Pair]:
    made = Pair(folder, *words, **sections)
    try:
        yield made
    finally:
        made.close()


def disturbed(pair: Pair, trainer: Trainer, name: str, disturb: Callable[[], None]) -> Report:
    """Update all, and disturb the second replica as soon as it says that it is being updated."""
    reports: list[Report] = []
    updating = threading.Thread(target=lambda: reports.append(trainer.update(f"{name}.gguf")))
    updating.start()
    until_now(lambda: not updating.is_alive() or ((seen := pair.status()) and seen.is_updating), "it is updating")
    disturb()
    updating.join(PATIENCE_S)
    return reports[0]


def outcomes(report: Report) -> list[Outcome]:
    return [result.outcome for result in report.results]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_agree_again_after_each_fault(tmp_path: Path) -> None:
    for name in NAMES:
        weights(tmp_path, name)
    with pair(tmp_path) as both:
        report = both.trainer().update("bravo.gguf")
        assert report.ok and {result.model_version for result in report.results} == {2}, report
        check_killed_in_the_middle(both)
        check_full_disk(both)
        check_stopped(both)
        assert both.process.poll() is None
        said = both.log.read_text()
    assert said.count("replica-2 ended (killed by SIGKILL); it is started again") == 1


def check_killed_in_the_middle(both: Pair) -> None:
    """It is started again, and asked again."""
    report = disturbed(both, both.trainer(), "charlie", lambda: os.kill(both.second_pid(), signal.SIGKILL))
    assert report.ok and {result.model_repo_id for result in report.results} == {"charlie.gguf"}, report
    until_now(both.status, "it is back")
    assert both.trainer().verify().ok
    assert [(one.text or "").split()[0] for one in both.trainer().prompt("hi")] == ["charlie"] * 2


def check_full_disk(both: Pair) -> None:
    """It refuses, the other one goes back, and both take the version once there is room again."""
    pid = both.second_pid()
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    report = both.trainer().update("delta.gguf")
    assert outcomes(report) == [Outcome.ROLLED_BACK, Outcome.FAILED], report
    assert report.results[1].code == "job_store_full" and both.urls[1] in str(report)
    assert both.trainer().verify().ok
    resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    assert both.trainer().update("delta.gguf").ok


def check_stopped(both: Pair) -> None:
    """It is lost in the middle of an update by file. The others go back, and so does it when it goes on."""
    for name in ("alpha", "bravo", "charlie"):
        pid = both.second_pid()
        report = disturbed(both, both.trainer(HASTY, by_file=True), name, lambda pid=pid: os.kill(pid, signal.SIGSTOP))
        os.kill(pid, signal.SIGCONT)
        until_now(lambda: both.trainer().verify().ok, lambda: str(both.trainer().verify()))
        if not report.ok:
            break
    # Else it was always done before it was stopped.
    assert outcomes(report) == [Outcome.ROLLED_BACK, Outcome.LOST], report
    assert "did not answer within 4 s" in str(report)
    old = report.results[0].model_repo_id
    assert old != f"{name}.gguf"
    assert {result.model_repo_id for result in both.trainer().verify().results} == {old}


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [False, True])
def test_replicas_share_gpus_by_a_lease_store(tmp_path: Path, is_given: bool) -> None:
    gpus = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-aaaa", 10_000))
    with contextlib.ExitStack() as stack:
        options = ["--lease-store", stack.enter_context(redis_server(tmp_path / "redis")).url] if is_given else []
        both = stack.enter_context(pair(tmp_path, *options, gpus=[], memory={"probe": "file", "file": str(gpus)}))
        for url in both.urls:

            def is_up(url: str = url) -> bool:
                with urllib.request.urlopen(f"{url}/api/v1/status", timeout=PATIENCE_S) as answer:
                    store = json.load(answer)["lease_store"]
                return store is not None and bool(store["up"])

            until_now(is_up, both.log.read_text)
        assert (tmp_path / "state" / "leases.sock").exists() is not is_given
    # Their own outlives them, and then ends, too.
    assert not (tmp_path / "state" / "leases.sock").exists()
