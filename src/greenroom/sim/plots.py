"""Line plots as SVG text: axes, grid, legend. Nothing in them is fetched or run.

Owns drawing only. Text and axes take the colour of the page, so that a plot is readable on light and on dark; lines
differ by colour and by dashes, so that it is readable without colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

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
