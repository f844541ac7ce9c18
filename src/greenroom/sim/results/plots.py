"""Line plots and bars as SVG text, for pages that fetch and run nothing.

Owns the drawing. Colours are variables of the page (`--c0` …) and text has the page's colour, so that a plot is
readable on light and on dark; lines differ by dashes too, so that it is readable without colours. Marks tell their
values in a `<title>`, which browsers show beside the pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from greenroom.sim.results.effect import seconds

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 314
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 30, 52
COLOURS = 6
DASHES = ("", "7 3", "2 3", "9 3 2 3")
TICKS = 5
POINTS_MAX = 400
# Of a line, for the longest bar: on a phone what is written at its end takes the rest.
LONGEST_PERCENT = 60
# Marks with a title of their own; more would make a page heavy.
MARKS_MAX = 60


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
    # Of whole things, ticks are not closer than one.
    step_min: float = 0.0

    def share(self, value: float) -> float:
        """Where on the axis, from 0 to 1."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.is_log:
            return [10.0**power for power in range(floor(log10(self.low)), ceil(log10(self.high)) + 1)]
        step = max(self.step_min, _round_step((self.high - self.low) / TICKS))
        first, last = ceil(self.low / step), floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def linear(label: str, values: Sequence[float], step_min: float = 0.0) -> Axis:
    """From zero to the largest, which is one step at least."""
    high = max(values, default=0.0)
    return Axis(label, 0.0, max(high, step_min) or 1.0, step_min=step_min)


def logarithmic(label: str, values: Sequence[float], low: float) -> Axis:
    """Whole powers of ten from `low` on."""
    high = max(max(values, default=low), low * 10)
    return Axis(label, low, 10.0 ** ceil(log10(high)), is_log=True)


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line], say: Callable[[float, float], str]) -> str:
    """One plot with its legend below, as a `<figure>`. `say` puts a point into words."""
    drawn = [
        _svg(title),
        *_x_axis(x),
        *_y_axis(y),
        *(_line(line, x, y, number) for number, line in enumerate(lines)),
        *(mark for line in lines for mark in _marks(line, x, y, say)),
        "</svg>",
        '<ul class="legend">',
        *(_legend(line, number) for number, line in enumerate(lines)),
        "</ul>",
    ]
    return _figure_of(title, drawn)


def _svg(title: str) -> str:
    names = f'role="img" aria-label="{escape(title)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {names}>'


def _figure_of(title: str, drawn: Sequence[str]) -> str:
    return "\n".join([f"<figure><figcaption>{escape(title)}</figcaption>", *drawn, "</figure>"])


def _across(axis: Axis, value: float) -> float:
    return round(LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT), 1)


def _up(axis: Axis, value: float) -> float:
    return round(HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM), 1)


def _x_axis(axis: Axis) -> list[str]:
    low, high = TOP, HEIGHT - BOTTOM
    parts = [f'<path class="axis" d="M{LEFT} {high}H{WIDTH - RIGHT}"/>']
    for tick in axis.ticks():
        across = _across(axis, tick)
        parts.append(f'<path class="grid" d="M{across} {low}V{high}"/>')
        parts.append(f'<text x="{across}" y="{high + 22}" text-anchor="middle">{_figure(tick)}</text>')
    middle = (LEFT + WIDTH - RIGHT) // 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(axis.label)}</text>']


def _y_axis(axis: Axis) -> list[str]:
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}"/>']
    for tick in axis.ticks():
        up = _up(axis, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {up}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up + 4}" text-anchor="end">{_figure(tick)}</text>')
    # Above the axis, where no number is in its way.
    return [*parts, f'<text x="4" y="16">{escape(axis.label)}</text>']


def _line(line: Line, x: Axis, y: Axis, number: int) -> str:
    points = " ".join(f"{_across(x, across)},{_up(y, up)}" for across, up in thinned(line.points))
    return f'<polyline points="{points}" {_stroke(number)}/>'


def _marks(line: Line, x: Axis, y: Axis, say: Callable[[float, float], str]) -> list[str]:
    """Invisible until the pointer is there."""
    return [
        f'<circle class="mark" cx="{_across(x, across)}" cy="{_up(y, up)}" r="6">'
        f"<title>{escape(f'{line.label}: {say(across, up)}')}</title></circle>"
        for across, up in thinned(line.points, MARKS_MAX)
    ]


def _legend(line: Line, number: int) -> str:
    key = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 26 8"><path d="M0 4h26" {_stroke(number)}/></svg>'
    return f"<li>{key}{escape(line.label)}</li>"


def _stroke(number: int) -> str:
    dash = DASHES[(number + number // COLOURS) % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'class="line" style="stroke: var(--c{number % COLOURS})"{dashes}'


# --- bars -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts that are drawn one after the other; what is written at its end."""

    label: str
    parts: Sequence[float]
    end: str


def bars(title: str, names: Sequence[str], rows: Sequence[Bar]) -> str:
    """Horizontal bars of seconds on one scale, each of parts with these names, as a `<figure>`."""
    longest = max((sum(row.parts) for row in rows), default=0.0) or 1.0
    keys = (f'<li><i style="background: var(--c{number})"></i>{escape(name)}</li>' for number, name in enumerate(names))
    drawn = [f'<ul class="legend">{"".join(keys)}</ul>', '<div class="bars">']
    for row in rows:
        drawn.append(f"<span>{escape(row.label)}</span><div>{_parts(row, names, longest)}{escape(row.end)}</div>")
    return _figure_of(title, [*drawn, "</div>"])


def _parts(row: Bar, names: Sequence[str], longest: float) -> str:
    """The rest of the line is for what is written at the end."""
    return "".join(
        f'<i style="width: {LONGEST_PERCENT * value / longest:.2f}%; background: var(--c{number})" '
        f'title="{escape(f"{row.label}: {name} {seconds(value)}")}"></i>'
        for number, (name, value) in enumerate(zip(names, row.parts, strict=True))
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


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
