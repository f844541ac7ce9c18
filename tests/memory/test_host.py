from __future__ import annotations

import os
from pathlib import Path

import pytest

from greenroom.memory.host import THIS_MACHINE, Host

MIB = 1024 * 1024


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine of 64,000 MiB, 50,000 of them available, without cgroups."""
    proc = tmp_path / "proc"
    write(proc / "meminfo", f"MemTotal: {64_000 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {50_000 * 1024} kB\n")
    return Host(proc, tmp_path / "cgroup", tmp_path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_machine_has_memory_and_shared_memory() -> None:
    seen = THIS_MACHINE.look()
    assert 0 < seen.available_mib <= seen.total_mib
    assert 0 <= seen.shm_free_mib <= seen.shm_total_mib


def test_a_machine_without_cgroups_is_taken_whole(host: Host) -> None:
    seen = host.look()
    assert (seen.total_mib, seen.available_mib) == (64_000, 50_000)
    assert seen.shm_total_mib > 0


def test_a_container_may_use_its_limit_less_what_it_uses_but_files_in_the_cache_are_free(host: Host) -> None:
    write(host.proc / "self/cgroup", "0::/pod/box\n")
    group = host.cgroups / "pod/box"
    write(group / "memory.max", f"{8_000 * MIB}\n")
    write(group / "memory.current", f"{3_000 * MIB}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {1_000 * MIB}\n")
    assert (host.look().total_mib, host.look().available_mib) == (8_000, 6_000)


def test_a_limit_further_up_counts_too(host: Host) -> None:
    write(host.proc / "self/cgroup", "0::/pod/box\n")
    write(host.cgroups / "pod/box/memory.max", "max\n")
    write(host.cgroups / "pod/memory.max", f"{4_000 * MIB}\n")
    assert host.look().total_mib == 4_000


def test_the_root_counts_where_the_own_group_is_mounted_as_the_root(host: Host) -> None:
    write(host.proc / "self/cgroup", "0::/../elsewhere\n")
    write(host.cgroups / "memory.max", f"{2_000 * MIB}\n")
    assert host.look().total_mib == 2_000


def test_groups_of_the_first_version_count(host: Host) -> None:
    write(host.proc / "self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    group = host.cgroups / "memory/box"
    write(group / "memory.limit_in_bytes", f"{6_000 * MIB}\n")
    write(group / "memory.usage_in_bytes", f"{2_000 * MIB}\n")
    write(group / "memory.stat", f"total_inactive_file {500 * MIB}\n")
    assert (host.look().total_mib, host.look().available_mib) == (6_000, 4_500)


def test_a_limit_above_the_machine_is_none(host: Host) -> None:
    write(host.proc / "self/cgroup", "4:memory:/\n")
    write(host.cgroups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert (host.look().total_mib, host.look().available_mib) == (64_000, 50_000)


def test_a_machine_that_says_nothing_is_taken_by_its_pages(tmp_path: Path) -> None:
    seen = Host(tmp_path / "none", tmp_path / "none", tmp_path / "none").look()
    physical_mib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    assert (seen.total_mib, seen.available_mib) == (physical_mib, physical_mib)
    assert (seen.shm_total_mib, seen.shm_free_mib) == (0, 0)


def test_what_processes_of_one_engine_may_share_is_counted_once(host: Host) -> None:
    for pid, file_mib in ((11, 300), (12, 200)):
        sizes = {"RssAnon": 100, "RssFile": file_mib, "RssShmem": 50, "VmRSS": 999}
        write(host.proc / f"{pid}/status", "".join(f"{name}:\t{mib * 1024} kB\n" for name, mib in sizes.items()))
    assert host.used_mib([11, 12, 13]) == 100 + 100 + 350


def test_this_process_uses_memory() -> None:
    assert THIS_MACHINE.used_mib([os.getpid()]) > 1
