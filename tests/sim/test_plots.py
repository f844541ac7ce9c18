from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from xml.etree.ElementTree import Element

import pytest

from greenroom.core.model import TenantId
from greenroom.sim.cases import Case, Result, cases, run_all
from greenroom.sim.report import (
    HEIGHT,
    TITLES,
    WIDTH,
    Axis,
    Line,
    html,
    linear,
    logarithmic,
    plot,
    row,
    swaps_plot,
    thinned,
    tiers_plot,
    wait_plots,
)
from greenroom.sim.stats import stats_of
from greenroom.sim.workloads import Mix, Poisson, zipf
from greenroom.sim.world import World
from tests.sim.settings import names, setting, sim_model

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def results() -> list[Result]:
    base = setting(*(sim_model(name) for name in names(3)), mib=1_000)
    mix = Mix(zipf(names(3)), tenants={"<b>&": 1.0, "y": 1.0}, priorities={0: 1.0, 1: 1.0})
    compared = cases(["default", "fifo"], [1, 2], [0, 4_000])
    return run_all(compared, base, Poisson(mix, 0.2, 600.0), 0, lambda case, share: None)


def drawn(svg: str) -> Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in drawn(svg).iter(f"{SVG}text")]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    found = [element.attrib["points"].split() for element in drawn(svg).iter(f"{SVG}polyline")]
    return [[(float(point.split(",")[0]), float(point.split(",")[1])) for point in points] for points in found]


# --- the writer -------------------------------------------------------------------------------------------------------


def test_a_plot_is_well_formed_and_says_what_it_shows() -> None:
    svg = plot("A < B & C", linear("x", [10]), linear("y", [4]), [Line("one", [(0, 0), (10, 4)]), Line("<two>", [])])
    said = texts(svg)
    assert said[0] == "A < B & C" and {"x", "y", "one", "<two>"} <= set(said)
    assert drawn(svg).attrib["aria-label"] == "A < B & C"


def test_points_lie_within_the_picture_with_more_higher_up() -> None:
    ((first, last),) = lines(plot("p", linear("x", [10]), linear("y", [4]), [Line("one", [(0, 0), (10, 4)])]))
    assert 0 < first[0] < last[0] < WIDTH and HEIGHT > first[1] > last[1] > 0


def test_a_logarithmic_axis_has_powers_of_ten_and_keeps_smaller_values_at_its_beginning() -> None:
    axis = logarithmic("wait", [30.0], 0.01)
    assert axis.ticks() == pytest.approx([0.01, 0.1, 1.0, 10.0, 100.0])
    assert axis.share(0.0) == axis.share(0.01) == 0.0 and axis.share(1.0) == pytest.approx(0.5)
    assert logarithmic("wait", [], 0.01).share(5.0) == 1.0


@pytest.mark.parametrize(
    ("high", "ticks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (37.0, [0, 10, 20, 30]),
        (7.2e5, [0, 2e5, 4e5, 6e5]),
        (0.003, [0, 0.001, 0.002, 0.003]),
    ],
)
def test_a_linear_axis_has_round_ticks(high: float, ticks: list[float]) -> None:
    assert linear("x", [high]).ticks() == pytest.approx(ticks)


def test_an_axis_without_values_is_still_an_axis() -> None:
    assert linear("x", []) == linear("x", [0.0]) == Axis("x", 0.0, 1.0)


def test_many_points_are_thinned_but_the_last_stays() -> None:
    points = [(float(number), 0.0) for number in range(10_000)]
    few = thinned(points, 100)
    assert len(few) == 100 and few[0] == points[0] and few[-1] == points[-1]
    assert thinned(points[:5], 100) == points[:5]


def test_lines_differ_without_their_colours() -> None:
    svg = plot("p", linear("x", [1]), linear("y", [1]), [Line(str(number), [(0, 0)]) for number in range(8)])
    strokes = [(line.get("stroke"), line.get("stroke-dasharray")) for line in drawn(svg).iter(f"{SVG}polyline")]
    assert len(set(strokes)) == 8 and len({dash for _, dash in strokes}) == 4


# --- the report -------------------------------------------------------------------------------------------------------


def test_there_is_a_wait_plot_for_each_class_with_a_line_for_each_case(results: list[Result]) -> None:
    plots = wait_plots(results)
    assert [texts(svg)[0] for svg in plots] == [
        "Share of requests of class high served within",
        "Share of requests of class normal served within",
    ]
    for svg in plots:
        assert len(lines(svg)) == len(results)
        # A share only grows, and ends with everybody.
        assert all(before[1] >= after[1] for line in lines(svg) for before, after in itertools.pairwise(line))


def test_swaps_are_counted_over_time(results: list[Result]) -> None:
    found = lines(swaps_plot(results))
    assert len(found) == len(results)
    assert all(before[1] >= after[1] for line in found for before, after in itertools.pairwise(line))


def test_tiers_are_drawn_for_each_case(results: list[Result]) -> None:
    svg = tiers_plot(results[-1])
    assert {"ready", "asleep", "moving"} <= set(texts(svg)) and len(lines(svg)) == 3


def test_the_report_is_one_well_formed_page_that_fetches_and_runs_nothing(results: list[Result]) -> None:
    page = html(results, ["Loads take <long>."])
    body = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert len(list(body.iter(f"{SVG}svg"))) == 2 + 1 + len(results)
    assert (
        "A second GPU would take the p95 wait" in page
        and "The bottleneck: " in page
        and "Loads take &lt;long&gt;." in page
    )
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", page)
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_every_case_has_a_row(results: list[Result]) -> None:
    cells = row(results[0])
    assert len(cells) == len(TITLES) and cells[0] == "default, 1 GPU, no green room"


def test_a_run_without_requests_can_be_reported() -> None:
    empty = Result(Case("fifo"), stats_of(World(setting(sim_model("a")))))
    page = html([empty], [])
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")) is not None
    assert TenantId("") not in empty.stats.by_tenant
