from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from greenroom.runtime.memory.readings import THIS_MACHINE, HostProbe

MIB = 1024 * 1024


@pytest.fixture
def host(tmp_path: Path) -> HostProbe:
    """A machine of 64,000 MiB, 50,000 of them available, without cgroups."""
    proc = tmp_path / "proc"
    write(proc / "meminfo", f"MemTotal: {64_000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {50_000 * 1024} kB\n")
    return HostProbe(proc, tmp_path / "cgroup", tmp_path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_machine_has_memory_and_shared_memory() -> None:
    seen = THIS_MACHINE.look()
    assert 0 < seen.available_mib <= seen.total_mib
    assert 0 <= seen.shm_free_mib <= seen.shm_total_mib


def test_a_machine_without_cgroups_is_taken_whole(host: HostProbe) -> None:
    seen = host.look()
    assert (seen.total_mib, seen.available_mib) == (64_000, 50_000)
    assert seen.shm_total_mib > 0


def test_a_container_may_use_its_limit_less_what_it_uses_but_files_in_the_cache_are_free(host: HostProbe) -> None:
    write(host.proc / "self/cgroup", "0::/pod/box\n")
    group = host.cgroups / "pod/box"
    write(group / "memory.max", f"{8_000 * MIB}\n")
    write(group / "memory.current", f"{3_000 * MIB}\n")
    # Arenas are shmem: they lie in no file that could be read again.
    cached = {"anon": 1, "file": 2_500, "shmem": 1_000, "inactive_file": 1_000, "active_file": 500}
    write(group / "memory.stat", "".join(f"{name} {mib * MIB}\n" for name, mib in cached.items()))
    assert (host.look().total_mib, host.look().available_mib) == (8_000, 6_500)


def test_a_group_that_is_slowed_down_above_a_mark_has_memory_up_to_that_mark(host: HostProbe) -> None:
    write(host.proc / "self/cgroup", "0::/pod/box\n")
    write(host.cgroups / "pod/box/memory.max", f"{8_000 * MIB}\n")
    write(host.cgroups / "pod/box/memory.high", f"{6_000 * MIB}\n")
    write(host.cgroups / "pod/box/memory.current", f"{1_000 * MIB}\n")
    assert (host.look().total_mib, host.look().available_mib) == (6_000, 5_000)
    write(host.cgroups / "pod/memory.high", f"{3_000 * MIB}\n")
    write(host.cgroups / "pod/memory.current", f"{2_500 * MIB}\n")
    assert (host.look().total_mib, host.look().available_mib) == (3_000, 500)


def test_a_limit_further_up_counts_too(host: HostProbe) -> None:
    write(host.proc / "self/cgroup", "0::/pod/box\n")
    write(host.cgroups / "pod/box/memory.max", "max\n")
    write(host.cgroups / "pod/memory.max", f"{4_000 * MIB}\n")
    assert host.look().total_mib == 4_000


def test_the_root_counts_where_the_own_group_is_mounted_as_the_root(host: HostProbe) -> None:
    write(host.proc / "self/cgroup", "0::/../elsewhere\n")
    write(host.cgroups / "memory.max", f"{2_000 * MIB}\n")
    assert host.look().total_mib == 2_000


def test_groups_of_the_first_version_count(host: HostProbe) -> None:
    write(host.proc / "self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    group = host.cgroups / "memory/box"
    write(group / "memory.limit_in_bytes", f"{6_000 * MIB}\n")
    write(group / "memory.usage_in_bytes", f"{2_000 * MIB}\n")
    write(group / "memory.stat", f"total_inactive_file {500 * MIB}\ntotal_active_file {300 * MIB}\n")
    assert (host.look().total_mib, host.look().available_mib) == (6_000, 4_800)


LOOK = "from greenroom.runtime.memory.readings import THIS_MACHINE; seen = THIS_MACHINE.look(); print(seen.total_mib)"


@pytest.fixture
def own_group() -> Iterator[Path]:
    """A real cgroup with a limit of 200 MiB, and the file of its processes. Skipped where none can be made."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"greenroom-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(200 * MIB))
            yield group / "cgroup.procs"
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no cgroup can be made here")


def test_a_process_in_a_group_sees_the_limit_of_the_group(own_group: Path) -> None:
    enter = f"from pathlib import Path; Path({str(own_group)!r}).write_text('0'); "
    done = subprocess.run([sys.executable, "-c", enter + LOOK], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 200


def test_a_limit_above_the_machine_is_none(host: HostProbe) -> None:
    write(host.proc / "self/cgroup", "4:memory:/\n")
    write(host.cgroups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert (host.look().total_mib, host.look().available_mib) == (64_000, 50_000)


def test_a_machine_that_says_nothing_is_taken_by_its_pages(tmp_path: Path) -> None:
    seen = HostProbe(tmp_path / "none", tmp_path / "none", tmp_path / "none").look()
    physical_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    assert (seen.total_mib, seen.available_mib) == (physical_mib, physical_mib)
    assert (seen.shm_total_mib, seen.shm_free_mib) == (0, 0)


def test_what_processes_of_one_engine_may_share_is_counted_once(host: HostProbe) -> None:
    for pid, file_mib in ((11, 300), (12, 200)):
        sizes = {"RssAnon": 100, "RssFile": file_mib, "RssShmem": 50, "VmRSS": 999}
        write(host.proc / f"{pid}/status", "".join(f"{name}:\t{mib * 1024} kB\n" for name, mib in sizes.items()))
    assert host.used_mib([11, 12, 13]) == 100 + 100 + 350


def test_this_process_uses_memory() -> None:
    assert THIS_MACHINE.used_mib([os.getpid()]) > 1
