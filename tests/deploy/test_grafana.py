"""The dashboard for Grafana asks for metrics and labels that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
