from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from xml.etree.ElementTree import Element

import pytest

from greenroom.core.model import ModelId, TenantId
from greenroom.sim.cases import Case, CaseResult, cases, play
from greenroom.sim.results.plots import (
    HEIGHT,
    MARKS_MAX,
    WIDTH,
    Axis,
    Bar,
    Line,
    bars,
    linear,
    logarithmic,
    plot,
    thinned,
)
from greenroom.sim.results.report import columns, comparison, html, over_time_plots, tiers_plot, wait_plots
from greenroom.sim.results.stats import Moment, stats_of
from greenroom.sim.results.verdict import advice
from greenroom.sim.workloads import Mix, Poisson, zipf
from greenroom.sim.world import World
from tests.sim.settings import names, setting, sim_model

SVG = "{http://www.w3.org/2000/svg}"
WITH_WORDS = ("figcaption", "li", f"{SVG}text")


@pytest.fixture(scope="module")
def results() -> list[CaseResult]:
    base = setting(*(sim_model(name) for name in names(3)), mib=1_000)
    mix = Mix(zipf(names(3)), tenants={"<b>&": 1.0, "y": 1.0}, priorities={0: 1.0, 1: 1.0})
    compared = cases(["default", "fifo"], [1, 2], [0, 4_000])
    return [play(case, base, Poisson(mix, 0.2, 600.0)) for case in compared]


def drawn(svg: str) -> Element:
    return ElementTree.fromstring(svg)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in drawn(svg).iter() if element.tag in WITH_WORDS]


def titles(svg: str) -> list[str]:
    return [element.text or "" for element in drawn(svg).iter(f"{SVG}title")]


def words(x: float, y: float) -> str:
    return f"{y:g} at {x:g}"


def lines(svg: str) -> list[list[tuple[float, float]]]:
    found = [element.attrib["points"].split() for element in drawn(svg).iter(f"{SVG}polyline")]
    return [[(float(point.split(",")[0]), float(point.split(",")[1])) for point in points] for points in found]


# --- the writer -------------------------------------------------------------------------------------------------------


def test_a_plot_is_well_formed_and_says_what_it_shows() -> None:
    lines_of = [Line("one", [(0, 0), (10, 4)]), Line("<two>", [])]
    svg = plot("A < B & C", linear("x", [10]), linear("y", [4]), lines_of, words)
    said = texts(svg)
    assert said[0] == "A < B & C" and {"x", "y", "one", "<two>"} <= set(said)
    assert [element.attrib["aria-label"] for element in drawn(svg).findall(f"{SVG}svg")] == ["A < B & C"]


def test_points_lie_within_the_picture_with_more_higher_up() -> None:
    svg = plot("p", linear("x", [10]), linear("y", [4]), [Line("one", [(0, 0), (10, 4)])], words)
    ((first, last),) = lines(svg)
    assert 0 < first[0] < last[0] < WIDTH and HEIGHT > first[1] > last[1] > 0


def test_points_tell_their_values() -> None:
    points = [(float(number), 1.0) for number in range(1_000)]
    lines_of = [Line("one", [(0, 0), (10, 4)]), Line("many", points)]
    said = titles(plot("p", linear("x", [10]), linear("y", [4]), lines_of, words))
    assert said[:2] == ["one: 0 at 0", "one: 4 at 10"] and said[-1] == "many: 1 at 999" and len(said) == 2 + MARKS_MAX


def test_bars_have_one_scale_and_tell_their_parts() -> None:
    rows = [Bar("long", [30.0, 10.0], "40 <s>"), Bar("short", [0.0, 4.0], "4"), Bar("none", [0.0, 0.0], "0")]
    figure = drawn(bars("Delay", ("a & b", "c"), rows))
    parts = [element for element in figure.iter("i") if "title" in element.attrib]
    assert [element.attrib["title"] for element in parts][:3] == [
        "long: a & b 30 s",
        "long: c 10 s",
        "short: a & b 0.0 s",
    ]
    widths = [float(element.attrib["style"].split("width: ")[1].split("%")[0]) for element in parts]
    assert widths == pytest.approx([45, 15, 0, 6, 0, 0])
    assert "40 <s>" in "".join(figure.itertext())


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
    lines_of = [Line(str(number), [(0, 0)]) for number in range(12)]
    svg = plot("p", linear("x", [1]), linear("y", [1]), lines_of, words)
    strokes = [(line.get("style"), line.get("stroke-dasharray")) for line in drawn(svg).iter(f"{SVG}polyline")]
    assert len(set(strokes)) == 12 and len({dash for _, dash in strokes}) == 4
    assert all(one[1] != other[1] for one, other in itertools.pairwise(strokes[:6]))


# --- the report -------------------------------------------------------------------------------------------------------


def test_there_is_a_wait_plot_for_each_class_with_a_line_for_each_case(results: list[CaseResult]) -> None:
    plots = wait_plots(results)
    assert [texts(svg)[0] for svg in plots] == [
        "Share of requests of class high served within",
        "Share of requests of class normal served within",
    ]
    for svg in plots:
        assert len(lines(svg)) == len(results)
        # A share only grows, and ends with all requests.
        assert all(before[1] >= after[1] for line in lines(svg) for before, after in itertools.pairwise(line))


def test_requests_that_are_lost_keep_a_line_from_reaching_the_top() -> None:
    """Of a class that is served and one that is refused throughout."""
    base = setting(sim_model("m0"), sim_model("large", 9_000))
    world = World(base)
    for number in range(40):
        world.arrive(ModelId("m0"), 1, 1, TenantId("x"), priority=1 if number % 4 else 0)
        world.arrive(ModelId("large"), 1, 1, TenantId("y"), priority=2 if number % 2 else 0)
    world.run()
    result = CaseResult(Case("fifo"), stats_of(world))
    high, normal, low = wait_plots([result])
    # 10 of 30 high ones are served, all of the normal ones, none of the low ones.
    assert titles(high)[-1].startswith("fifo: 33 % within") and titles(normal)[-1].startswith("fifo: 100 % within")
    assert titles(low) == [] and "class low" in texts(low)[0]
    page = html([result], ["-"])
    assert '<td class="name">low</td><td>0</td><td>20</td><td>-</td>' in page
    assert '<td class="name">y</td><td>0</td><td>40</td>' in page


def test_waits_are_drawn_over_time_by_what_tells_cases_apart(results: list[CaseResult]) -> None:
    (svg,) = over_time_plots(results)
    assert len(lines(svg)) == len(results) and "default, 1 GPU, no green room" in texts(svg)
    same_policy = [result for result in results if result.case.policy == "fifo"]
    assert "1 GPU, no green room" in texts(over_time_plots(same_policy)[0])


def test_requests_that_are_lost_are_drawn_over_time_if_there_are_some(results: list[CaseResult]) -> None:
    moments = (Moment(30.0, 3, 1, 7.0), Moment(90.0, 0, 2, 0.0), Moment(150.0, 0, 0, 0.0))
    one = replace(results[0], stats=replace(results[0].stats, served=3, requests=6, over_time=moments))
    waits, lost = over_time_plots([one])
    assert [said.partition(": ")[2] for said in titles(waits)] == ["at 30 s, p95 wait 7.0 s"]
    assert [said.partition(": ")[2] for said in titles(lost)] == ["at 30 s, 25 % lost", "at 90 s, 100 % lost"]


def test_tiers_are_drawn_for_each_case(results: list[CaseResult]) -> None:
    svg = tiers_plot(results[-1])
    assert {"ready", "asleep", "moving"} <= set(texts(svg)) and len(lines(svg)) == 3


def test_the_report_is_one_well_formed_page_that_fetches_and_runs_nothing(results: list[CaseResult]) -> None:
    page = html(results, ["From <a trace>.", "Loads take <long>."])
    body = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    chosen = advice(results).chosen
    assert 2 <= len(chosen) < len(results)
    # What requests wait for, waits over time, two classes, and where models are in each chosen case.
    assert len(list(body.iter("figure"))) == 1 + 1 + 2 + len(chosen)
    assert "A second GPU would take the p95 wait" in page and "The bottleneck: " in page
    assert "Loads take &lt;long&gt;." in page and "prefers-color-scheme: dark" in page and "@media print" in page
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", page)
    assert "&lt;b&gt;&amp;" in page and "<b>&" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_bottom_line_is_first_and_the_best_change_stands_out(results: list[CaseResult]) -> None:
    body = ElementTree.fromstring(html(results, []).removeprefix("<!DOCTYPE html>"))
    bottom = body.find(".//section")
    assert bottom is not None
    paragraphs = ["".join(element.itertext()) for element in bottom]
    said = advice(results)
    assert bottom[0][0].text == said.best and paragraphs[0].startswith(f"{said.best} It would ")
    assert set(paragraphs) == set(said.bottom_line)


def test_models_are_counted_in_whole_numbers_on_the_axis() -> None:
    assert linear("models", [0.9], step_min=1.0).ticks() == [0.0, 1.0]
    assert linear("models", [4.9], step_min=1.0).ticks() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_table_has_a_row_for_each_case_and_plain_numbers_under_a_unit(results: list[CaseResult]) -> None:
    table = ElementTree.fromstring(comparison(results, results[:2]))
    head = list(table.iter("th"))
    shown = [(element.text, "".join(element.find("span").itertext())) for element in head]  # type: ignore[union-attr]
    assert shown[:4] == [("policy", ""), ("GPUs", ""), ("green room", "MiB"), ("served", "")]
    assert ("p95 wait", "s") in shown and ("busy", "%") in shown and all(element.get("title") for element in head)
    rows = [["".join(cell.itertext()) for cell in row.iter("td")] for row in table.iter("tr")][1:]
    assert len(rows) == len(results)
    assert all(re.fullmatch(r"[\d,.]+", cell) for row in rows for cell in row[1:])
    assert [row.get("class") for row in table.iter("tr")][1:4] == ["chosen", "chosen", None]


def test_columns_that_say_nothing_are_left_out(results: list[CaseResult]) -> None:
    assert "lost" not in [column.title for column in columns(results)]
    lossy = [replace(one, stats=replace(one.stats, requests=one.stats.requests + 5, by_tenant={})) for one in results]
    shown = [column.title for column in columns(lossy)]
    assert "lost" in shown and "fairness" not in shown


def test_a_run_without_requests_can_be_reported() -> None:
    empty = CaseResult(Case("fifo"), stats_of(World(setting(sim_model("a")))))
    page = html([empty], [])
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")) is not None
    assert TenantId("") not in empty.stats.by_tenant
