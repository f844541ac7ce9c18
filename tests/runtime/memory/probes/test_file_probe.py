from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.errors import ProbeFailed
from greenroom.runtime.memory.probes import FileProbe
from tests.standins import fake_gpu


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return fake_gpu.describe(
        tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 24_000, 500), fake_gpu.gpu("GPU-b", 8_000, temperature_c=40)
    )


def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    ended.wait()
    return ended.pid


def test_gpus_are_as_the_file_describes_them(file: Path) -> None:
    first, second = FileProbe(file).look().gpus
    assert (first.uuid, first.index, first.total_mib, first.used_mib, first.processes) == ("GPU-a", 0, 24_000, 500, {})
    assert (second.uuid, second.index, second.temperature_c, second.utilisation) == ("GPU-b", 1, 40, None)


def test_a_process_counts_while_it_lives(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as living:
        assert fake_gpu.take(file, 3_000, living.pid)
        assert [(gpu.used_mib, gpu.processes) for gpu in FileProbe(file).look().gpus] == [
            (2_000, {living.pid: 1_500}),
            (1_500, {living.pid: 1_500}),
        ]
        living.kill()
        # Not yet waited for, it is a zombie, which has no memory any more.
        os.waitid(os.P_PID, living.pid, os.WEXITED | os.WNOWAIT)
        assert [gpu.used_mib for gpu in FileProbe(file).look().gpus] == [500, 0]
    assert [gpu.processes for gpu in FileProbe(file).look().gpus] == [{}, {}]


def test_memory_of_the_dead_lingers_as_long_as_the_file_says(tmp_path: Path) -> None:
    file = fake_gpu.describe(tmp_path / "gpus.json", fake_gpu.gpu("GPU-a", 24_000), linger_s=2)
    fake_gpu.take(file, 1_000, dead_pid())
    now = [50.0]
    probe = FileProbe(file, clock=lambda: now[0])
    assert [(gpu.used_mib, gpu.processes) for gpu in probe.look().gpus] == [(1_000, {})]
    now[0] += 1.9
    assert probe.look().gpus[0].used_mib == 1_000
    now[0] += 0.2
    assert probe.look().gpus[0].used_mib == 0


def test_pids_can_be_hidden(file: Path) -> None:
    fake_gpu.describe(file, fake_gpu.gpu("GPU-a", 24_000), pids_visible=False)
    assert fake_gpu.take(file, 700)
    (gpu,) = FileProbe(file).look().gpus
    assert (gpu.used_mib, gpu.processes) == (700, None)


def test_changes_are_seen_at_the_next_look(file: Path) -> None:
    probe = FileProbe(file)
    probe.look()
    fake_gpu.describe(file, fake_gpu.gpu("GPU-a", 24_000, 9_000))
    assert [gpu.used_mib for gpu in probe.look().gpus] == [9_000]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"gpus": [{"uuid": "a"}]}',
        '{"gpus": [{"uuid": "a", "memory_mib": -1}]}',
        '{"gpus": [], "pids": true}',
        '{"gpus": [{"uuid": "a b", "memory_mib": 1}]}',
        '{"gpus": [{"uuid": "a", "memory_mib": 1}, {"uuid": "a", "memory_mib": 1}]}',
    ],
)
def test_a_file_that_describes_nothing_fails_and_is_named(content: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(ProbeFailed, match=r"gpus\.json"):
        FileProbe(file).look()


def test_a_missing_file_fails(tmp_path: Path) -> None:
    with pytest.raises(ProbeFailed, match="No such file"):
        FileProbe(tmp_path / "none.json").look()


def test_what_a_process_wrote_badly_fails_and_strange_files_are_nothing(file: Path) -> None:
    folder = file.with_name("gpus.json.d")
    folder.mkdir()
    (folder / "README").write_text("hello")
    assert FileProbe(file).look().gpus[1].used_mib == 0
    (folder / str(os.getpid())).write_text('{"GPU-a": "much"}')
    with pytest.raises(ProbeFailed, match=str(os.getpid())):
        FileProbe(file).look()


def test_more_than_there_is_cannot_be_taken(file: Path) -> None:
    assert not fake_gpu.take(file, 23_501)
    assert FileProbe(file).look().gpus[0].used_mib == 500
    assert fake_gpu.take(file, 23_500)
