"""The dashboard for Grafana and the unit for systemd: both name what there is, and the unit may do little."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.parser import parser
from greenroom.config.schema import Server
from greenroom.runtime.timeouts import STOP_MAX_S
from greenroom.telemetry import table
from greenroom.telemetry.table import MetricSpec

BOARD: dict[str, Any] = json.loads((Path(__file__).resolve().parents[2] / "deploy" / "grafana.json").read_text())
SPECS = {spec.name: spec for spec in vars(table).values() if isinstance(spec, MetricSpec)}

# Prometheus adds these: to every series, and to those of a histogram.
ADDED = {"instance", "job", "le"}


def _panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in BOARD["panels"] if panel["type"] != "row")


def _questions() -> list[str]:
    variables = [one["query"]["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    return variables + [target["expr"] for panel in _panels() for target in panel["targets"]]


def _spec(name: str) -> MetricSpec | None:
    """The metric of a series; the series of a histogram have endings."""
    plain = re.sub(r"_(bucket|sum|count)$", "", name)
    found = SPECS.get(name) or SPECS.get(plain)
    return found if found is None or name == found.name or found.buckets else None


@pytest.mark.parametrize("asked", _questions())
def test_every_question_is_about_metrics_and_labels_that_there_are(asked: str) -> None:
    names = set(re.findall(r"greenroom_\w+", asked))
    specs = [_spec(name) for name in names]
    assert names and None not in specs, asked
    labels = set(re.findall(r"(\w+)\s*=~?\s*\"", asked))
    for group in re.findall(r"by \(([^)]*)\)", asked):
        labels |= {label.strip() for label in group.split(",")}
    known = ADDED.union(*(spec.labels for spec in specs if spec is not None))
    assert labels <= known, asked


def test_panels_lie_beside_each_other_and_show_what_was_asked_for() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + right, place["y"] + down) for right in range(place["w"]) for down in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    labels = {
        label
        for panel in _panels()
        for one in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", one["legendFormat"])
    }
    assert labels <= {label for spec in SPECS.values() for label in spec.labels}


def test_no_source_of_data_is_built_in() -> None:
    sources = {target["datasource"]["uid"] for panel in _panels() for target in panel["targets"]}
    assert sources == {"${datasource}"}


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
