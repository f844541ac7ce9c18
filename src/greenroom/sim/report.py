"""The report: one HTML file with the answer in words, the figures, and the plots. Nothing in it is fetched or run.

Owns the page and its line plots, which are SVG text. Text and axes take the colour of the page, so that a plot is
readable on light and on dark; lines differ by colour and by dashes, so that it is readable without colours. The
sentences come from `verdict.py`, the figures from `stats.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from greenroom.sim.cases import Result
from greenroom.sim.stats import Stats, Waits
from greenroom.sim.verdict import advice, seconds

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 34, 44
LEGEND_LINE = 18
# Middle tones, readable on white and on black.
COLOURS = ("#3b82c4", "#d9742b", "#2f9e6e", "#c0504d", "#8a6fc2", "#9a7b2f", "#d45fa0", "#5f8a8b")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
TICKS = 5
POINTS_MAX = 400


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of values shown. A logarithmic axis begins above zero, and shows smaller values at its start."""

    label: str
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where on the axis, from 0 to 1."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.is_log:
            return [10.0**power for power in range(floor(log10(self.low)), ceil(log10(self.high)) + 1)]
        step = _round_step((self.high - self.low) / TICKS)
        first, last = ceil(self.low / step), floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def linear(label: str, values: Sequence[float]) -> Axis:
    """From zero to a little above the largest."""
    high = max(values, default=0.0)
    return Axis(label, 0.0, high if high > 0 else 1.0)


def logarithmic(label: str, values: Sequence[float], low: float) -> Axis:
    """Whole powers of ten from `low` on."""
    high = max(max(values, default=low), low * 10)
    return Axis(label, low, 10.0 ** ceil(log10(high)), is_log=True)


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """One plot with its legend below, as an `<svg>` element."""
    height = HEIGHT + LEGEND_LINE * ceil(len(lines) / 2)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
            f'<text x="{LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
            *_x_axis(x),
            *_y_axis(y),
            *(_line(line, x, y, number) for number, line in enumerate(lines)),
            *(_legend(line, number) for number, line in enumerate(lines)),
            "</svg>",
        ]
    )


def _across(axis: Axis, value: float) -> float:
    return round(LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT), 1)


def _up(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM), 1)


def _x_axis(axis: Axis) -> list[str]:
    low, high = TOP, HEIGHT - BOTTOM
    parts = [f'<path d="M{LEFT} {high}H{WIDTH - RIGHT}" stroke="currentColor" fill="none"/>']
    for tick in axis.ticks():
        across = _across(axis, tick)
        parts.append(f'<path d="M{across} {low}V{high}" stroke="currentColor" stroke-opacity="0.15"/>')
        parts.append(f'<text x="{across}" y="{high + 16}" text-anchor="middle">{_figure(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) // 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axis.label)}</text>']


def _y_axis(axis: Axis) -> list[str]:
    parts = [f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}" stroke="currentColor" fill="none"/>']
    for tick in axis.ticks():
        up = _up(axis, tick)
        parts.append(f'<path d="M{LEFT} {up}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity="0.15"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up + 4}" text-anchor="end">{_figure(tick)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) // 2
    turned = f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(axis.label)}</text>'
    return [*parts, turned]


def _line(line: Line, x: Axis, y: Axis, number: int) -> str:
    points = " ".join(f"{_across(x, across)},{_up(y, up)}" for across, up in thinned(line.points))
    return f'<polyline points="{points}" fill="none" {_stroke(number)}/>'


def _legend(line: Line, number: int) -> str:
    across = LEFT + (number % 2) * (WIDTH - LEFT) // 2
    up = HEIGHT + LEGEND_LINE * (number // 2) + 4
    label = f'<text x="{across + 34}" y="{up + 4}">{escape(line.label)}</text>'
    return f'<path d="M{across} {up}h26" {_stroke(number)}/>{label}'


def _stroke(number: int) -> str:
    dash = DASHES[number // len(COLOURS) % len(DASHES)] if number >= len(COLOURS) else DASHES[number % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="2"{dashes}'


def thinned(points: Sequence[Point], most: int = POINTS_MAX) -> list[Point]:
    """At most this many of the points, evenly spaced, the last one included."""
    if len(points) <= most:
        return list(points)
    stride = (len(points) - 1) / (most - 1)
    return [points[round(number * stride)] for number in range(most)]


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, not below the step."""
    power = 10.0 ** floor(log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:g}" if value < 1e-9 else f"{round(value, 6):g}"


# Where a logarithmic axis shows requests that did not wait.
AT_ONCE_S = 0.01
# Enough to see a run, few enough for a page with many plots.
BUCKETS = 100
# Groups in one table of details; the largest are shown.
GROUPS_MAX = 50

TITLES = (
    "case",
    "served",
    "refused",
    "p50 wait",
    "p95 wait",
    "p99 wait",
    "mean wait",
    "longest wait",
    "swaps",
    "swaps/request",
    "busy",
    "fairness",
)
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 0.9rem; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.75rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
svg { width: 100%; height: auto; margin: 1rem 0; }
.answer { font-size: 1.1rem; }
"""


def row(result: Result) -> tuple[str, ...]:
    """The figures of a case, under `TITLES`."""
    stats, waits = result.stats, result.stats.waits
    times = (waits.p50_s, waits.p95_s, waits.p99_s, waits.mean_s, waits.max_s)
    return (
        result.case.label,
        f"{stats.served:,}",
        f"{sum(stats.rejected.values()):,}",
        *(seconds(value) for value in times),
        f"{stats.swaps:,}",
        f"{stats.swaps_per_request:.2f}",
        f"{stats.busy:.0%}",
        f"{stats.jain:.3f}",
    )


def html(results: Sequence[Result], assumed: Sequence[str]) -> str:
    """The whole page. `assumed` are sentences about where the numbers come from."""
    said = advice(results)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/><title>Greenroom simulation</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<style>{_STYLE}</style></head><body>",
            "<h1>What would happen</h1>",
            *(f'<p class="answer">{escape(sentence)}</p>' for sentence in (*said.bottom_line, *said.changes)),
            "<h2>All cases</h2>",
            _table(TITLES, [row(result) for result in results]),
            "<h2>How long requests wait</h2>",
            *wait_plots(results),
            "<h2>Swaps</h2>",
            swaps_plot(results),
            "<h2>Who is where</h2>",
            *(tiers_plot(result) for result in results),
            "<h2>By class, tenant and model</h2>",
            *(_details(result) for result in results),
            "<h2>What was assumed</h2><ul>",
            *(f"<li>{escape(sentence)}</li>" for sentence in assumed),
            "</ul></body></html>",
        ]
    )


# --- plots ------------------------------------------------------------------------------------------------------------


def wait_plots(results: Sequence[Result]) -> list[str]:
    """For each class the share of requests that waited at most so long, one line a case."""
    names = sorted({name for result in results for name in result.stats.by_class})
    return [_wait_plot(name, results) for name in names]


def _wait_plot(name: str, results: Sequence[Result]) -> str:
    found = [(result.case.label, result.stats.by_class[name]) for result in results if name in result.stats.by_class]
    x = logarithmic("wait in seconds", [waits.max_s for _, waits in found], AT_ONCE_S)
    lines = [Line(label, waits.curve) for label, waits in found]
    return plot(f"Share of requests of class {name} served within", x, linear("share", [1.0]), lines)


def swaps_plot(results: Sequence[Result]) -> str:
    """How many swaps there have been so far, one line a case."""
    lines = [Line(result.case.label, _counted(result.stats)) for result in results]
    x = linear("time in seconds", [at for line in lines for at, _ in line.points])
    y = linear("swaps so far", [count for line in lines for _, count in line.points])
    return plot("Swaps over time", x, y, lines)


def _counted(stats: Stats) -> list[Point]:
    counted: list[Point] = [(at, float(number)) for number, at in enumerate(stats.swaps_at, start=1)]
    return [(0.0, 0.0), *counted, (stats.ends_s, float(len(counted)))]


def tiers_plot(result: Result) -> str:
    """How many slots were ready, asleep and moving, as means over short stretches of time."""
    ends_s = max(result.stats.ends_s, 1e-9)
    means = _means(result.stats, ends_s)
    lines = [
        Line(name, [(at, values[number]) for at, values in means])
        for number, name in enumerate(("ready", "asleep", "moving"))
    ]
    y = linear("slots", [count for line in lines for _, count in line.points])
    return plot(f"Slots by tier: {result.case.label}", linear("time in seconds", [ends_s]), y, lines)


def _means(stats: Stats, ends_s: float) -> list[tuple[float, tuple[float, float, float]]]:
    """Per bucket of time the mean of each count."""
    width = ends_s / BUCKETS
    sums = [[0.0, 0.0, 0.0] for _ in range(BUCKETS)]
    marks = [*stats.tiers, stats.tiers[-1]._replace(at=ends_s)] if stats.tiers else []
    for mark, following in pairwise(marks):
        _spread(sums, (mark.ready, mark.asleep, mark.moving), mark.at, min(following.at, ends_s), width)
    return [
        ((number + 0.5) * width, (ready / width, asleep / width, moving / width))
        for number, (ready, asleep, moving) in enumerate(sums)
    ]


def _spread(sums: list[list[float]], counts: Sequence[int], start: float, end: float, width: float) -> None:
    """Add these counts to every bucket they reach into, for as long as they do."""
    for number in range(int(start / width), min(int(end / width) + 1, len(sums))):
        lasts_s = min(end, (number + 1) * width) - max(start, number * width)
        if lasts_s > 0:
            for tier, count in enumerate(counts):
                sums[number][tier] += count * lasts_s


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _details(result: Result) -> str:
    stats = result.stats
    groups: Sequence[tuple[str, Mapping[str, Waits]]] = (
        ("class", stats.by_class),
        ("tenant", stats.by_tenant),
        ("model", stats.by_model),
    )
    tables = "\n".join(_group(name, waits) for name, waits in groups)
    return f"<details><summary>{escape(result.case.label)}</summary>\n{tables}\n</details>"


def _group(name: str, groups: Mapping[str, Waits]) -> str:
    largest = sorted(groups.items(), key=lambda pair: (-pair[1].count, pair[0]))[:GROUPS_MAX]
    rows = [
        (
            key or "-",
            f"{waits.count:,}",
            *(seconds(value) for value in (waits.p50_s, waits.p95_s, waits.mean_s, waits.max_s)),
        )
        for key, waits in largest
    ]
    return _table((name, "served", "p50 wait", "p95 wait", "mean wait", "longest wait"), rows)
