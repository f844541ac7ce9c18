"""The unit for systemd: known directives, a command that the program understands, and little that it may do."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from greenroom.cli.parser import parser
from greenroom.config.schema import Server
from greenroom.runtime.timeouts import STOP_MAX_S

ROOT = Path(__file__).parents[2]
UNIT = (ROOT / "deploy" / "systemd" / "greenroom.service").read_text()
# From 0 (safe) to 10; 9.4 without any hardening.
EXPOSURE_MAX = 4.0

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


def directive(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return value


def analyzed(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze says of this unit, whose program is one that is here."""
    unit = folder / "greenroom.service"
    unit.write_text(text.replace("/opt/greenroom/bin/greenroom", sys.executable))
    return subprocess.run(
        ["systemd-analyze", *words, str(unit)], capture_output=True, text=True, timeout=60, check=False
    )


@needs_systemd
def test_systemd_knows_every_directive(tmp_path: Path) -> None:
    done = analyzed(tmp_path, UNIT, "verify", "--man=no")
    assert (done.returncode, done.stderr) == (0, "")
    # It tells a wrong one.
    wrong = analyzed(tmp_path, UNIT.replace("NoNewPrivileges=", "NoNewPrivilege="), "verify", "--man=no")
    assert "NoNewPrivilege" in wrong.stderr


@needs_systemd
def test_the_service_is_well_shut_off(tmp_path: Path) -> None:
    done = analyzed(tmp_path, UNIT, "security", "--offline=true", "--no-pager")
    found = re.search(r"Overall exposure level for greenroom.service: ([0-9.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= EXPOSURE_MAX


def test_its_command_is_understood_and_its_state_is_where_it_may_write() -> None:
    args = parser().parse_args(shlex.split(directive("ExecStart"))[1:])
    assert args.state_dir.startswith(f"/var/lib/{directive('StateDirectory')}/")


def test_it_has_time_to_drain() -> None:
    assert int(directive("TimeoutStopSec")) > Server().drain_s + STOP_MAX_S
