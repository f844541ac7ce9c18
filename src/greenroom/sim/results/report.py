"""The report: one HTML file. The bottom line first, then one table of all cases, then plots of the chosen ones.

Owns the page. Nothing in it is fetched or run. The sentences come from `verdict.py`, the figures from `stats.py`, the
drawing from `plots.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from greenroom.sim.cases import Case, CaseResult, short_labels
from greenroom.sim.results.bottleneck import bottleneck
from greenroom.sim.results.effect import seconds
from greenroom.sim.results.plots import Bar, Line, bars, linear, logarithmic, plot
from greenroom.sim.results.stats import CLASS_NAMES, NO_WAITS, Moment, Stats, Waits, with_lost
from greenroom.sim.results.verdict import Advice, advice
from greenroom.sim.truth import Delays

# Where a logarithmic axis shows requests that did not wait.
AT_ONCE_S = 0.01
# Groups in one table of details; the largest are shown.
GROUPS_MAX = 50
# Bars of one plot; with more cases only the chosen ones have bars.
BARS_MAX = 24

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5d6770; --page: #fff; --card: #f4f6f8; --rule: #d9dee3;
  --mark: #17795e; --c0: #2f78bd; --c1: #d0691f; --c2: #268a60; --c3: #b8433f; --c4: #7d61b5; --c5: #8a6c22; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5af; --page: #14181c;
  --card: #1d2329; --rule: #343c44; --mark: #5cc9a3; --c0: #6cb0ef; --c1: #f0974f; --c2: #56c596; --c3: #ef7f79;
  --c4: #b39ceb; --c5: #cdb060; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 82rem;
  margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.5rem 0 0.5rem; }
.source, .note { color: var(--soft); margin: 0.25rem 0 1.25rem; max-width: 46rem; }
.bottom { background: var(--card); border-left: 4px solid var(--mark); border-radius: 4px; padding: 1rem 1.25rem; }
.bottom p { margin: 0.4rem 0; max-width: 56rem; } .bottom b { font-size: 1.2rem; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; margin: 0.75rem 0; }
th, td { padding: 0.3rem 0.55rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; } th span { display: block; color: var(--soft); font-weight: 400; }
th[title] { cursor: help; }
th.name, td.name { text-align: left; } tr.chosen td { font-weight: 600; } tbody tr:hover { background: var(--card); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.5rem; }
figure { margin: 0.5rem 0; } figcaption { font-weight: 600; font-size: 0.95rem; margin-bottom: 0.25rem; }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; fill: var(--ink); }
.legend { display: flex; flex-wrap: wrap; gap: 0.1rem 1.25rem; list-style: none; margin: 0.25rem 0; padding: 0;
  font-size: 0.85rem; } .legend svg { width: 26px; margin-right: 0.4rem; vertical-align: middle; }
.legend i { display: inline-block; width: 0.75rem; height: 0.75rem; border-radius: 2px; margin-right: 0.4rem; }
.bars { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 0.75rem; font-size: 0.9rem; }
.bars span { text-align: right; } .bars div { display: flex; align-items: center; white-space: nowrap; }
.bars i { height: 1.1rem; flex-shrink: 0; } .bars i:last-of-type { margin-right: 0.5rem; }
@media (max-width: 40rem) { .plots svg { font-size: 18px; }
  .bars { grid-template-columns: 1fr; gap: 0; } .bars span { text-align: left; } }
.axis { stroke: var(--soft); fill: none; } .grid { stroke: var(--rule); fill: none; }
.line { fill: none; stroke-width: 2; } .mark { fill: transparent; } .mark:hover { fill: var(--ink); fill-opacity: 0.5; }
details { margin: 0.5rem 0; } summary { cursor: pointer; }
@media print { :root { color-scheme: light; font-size: 9pt; } body { font-size: 9pt; padding: 0; max-width: none; }
  table { font-size: 6.5pt; } th, td { padding: 0.1rem 0.25rem; } svg { font-size: 14px; } h2 { margin-top: 1.25rem; }
  .plots { grid-template-columns: 1fr 1fr; gap: 0.5rem; } figure, .bottom { break-inside: avoid; }
  h2, .note { break-after: avoid; } .scroll { overflow: visible; } details, .folded { display: none; }
  .bars i, .legend i { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
"""


def html(results: Sequence[CaseResult], assumed: Sequence[str], wait_max_s: float | None = None) -> str:
    """The whole page. `assumed` are sentences about where the numbers come from; the first names the requests. Callers
    that do not stream are refused after `wait_max_s`, if that is given."""
    said = advice(results, wait_max_s)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/><title>Greenroom simulation</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<style>{_STYLE}</style></head><body>",
            "<h1>Simulation</h1>",
            *(f'<p class="source">{escape(sentence)}</p>' for sentence in assumed[:1]),
            *_bottom_line(said),
            "<h2>All cases</h2>",
            comparison(results, said.chosen),
            *_on_chosen("Bold: the first case, and the best ones.", results, said.chosen),
            *_changes(said),
            "<h2>What requests wait for</h2>",
            delay_bars(results if len(results) <= BARS_MAX else said.chosen),
            "<h2>Waits</h2>",
            *_on_chosen("Shown from here on: the cases in bold.", results, said.chosen),
            '<div class="plots">',
            *over_time_plots(said.chosen),
            *wait_plots(said.chosen),
            "</div>",
            "<h2>Where models are</h2>",
            '<div class="plots">',
            *(tiers_plot(result) for result in said.chosen),
            "</div>",
            # On paper there is nothing below it.
            '<h2 class="folded">By model, class and tenant</h2>',
            *(_details(result) for result in said.chosen),
            "<h2>What was assumed</h2><ul>",
            *(f"<li>{escape(sentence)}</li>" for sentence in assumed[1:]),
            "</ul></body></html>",
        ]
    )


def _bottom_line(said: Advice) -> list[str]:
    """The best change stands out; it comes first, where there is one."""
    best = [sentence for sentence in said.bottom_line if said.best and sentence.startswith(said.best)]
    others = [sentence for sentence in said.bottom_line if sentence not in best]
    first = [f"<p><b>{escape(said.best or '')}</b>{escape(one.removeprefix(said.best or ''))}</p>" for one in best]
    return ['<section class="bottom">', *first, *(f"<p>{escape(sentence)}</p>" for sentence in others), "</section>"]


def _changes(said: Advice) -> list[str]:
    if not said.changes:
        return []
    sentences = [f"<li>{escape(sentence)}</li>" for sentence in said.changes]
    return ["<details><summary>Each change by itself, in words</summary><ul>", *sentences, "</ul></details>"]


def _on_chosen(words: str, results: Sequence[CaseResult], chosen: Sequence[CaseResult]) -> list[str]:
    """A note, unless all cases are chosen."""
    return [] if len(chosen) == len(results) else [f'<p class="note">{words}</p>']


# --- tables -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One unit per column: the unit is in the head, and cells are plain numbers."""

    title: str
    unit: str
    tip: str
    cell: Callable[[CaseResult], str]


def _wait(name: str) -> Callable[[CaseResult], str]:
    """`-` if no request was served, which is not the same as 0."""
    return lambda result: f"{getattr(result.stats.waits, name):,.1f}" if result.stats.served else "-"


def _mean(name: str) -> Callable[[CaseResult], str]:
    return lambda result: _mean_of(result.stats.all_delays, name)


def _mean_of(delays: Delays, name: str) -> str:
    return f"{delays.mean_s(getattr(delays, name)):,.1f}" if delays.served else "-"


_OPTIONS = {
    "policy": Column("policy", "", "How the scheduler decides", lambda result: result.case.policy),
    "gpus": Column("GPUs", "", "Number of GPUs", lambda result: f"{result.case.gpus}"),
    "gpu_mib": Column("GPU", "MiB", "Memory of each GPU", lambda result: f"{result.case.gpu_mib:,}"),
    "green_room_mib": Column(
        "green room", "MiB", "Host memory where models sleep", lambda result: f"{result.case.green_room_mib:,}"
    ),
    "concurrency": Column(
        "at once", "", "Requests a model answers at once", lambda result: f"{result.case.concurrency}"
    ),
}
_FIGURES = (
    Column("served", "", "Requests that were served", lambda result: f"{result.stats.served:,}"),
    Column("lost", "", "Requests that were refused or given up", lambda result: f"{result.stats.lost:,}"),
    Column("p50 wait", "s", "Half of the served requests waited at most so long", _wait("p50_s")),
    Column("p95 wait", "s", "95 of 100 served requests waited at most so long", _wait("p95_s")),
    Column("p99 wait", "s", "99 of 100 served requests waited at most so long", _wait("p99_s")),
    Column("longest", "s", "The longest wait of a served request", _wait("max_s")),
    Column("not there", "s", "Mean wait until the model was ready: loading, or no room", _mean("not_there_s")),
    Column("full", "s", "Mean wait for a ready model that served as many as it can", _mean("full_s")),
    Column("slow", "s", "How much longer the answer took than alone on its GPU, on average", _mean("slow_s")),
    Column("swaps", "", "Loads and wakes", lambda result: f"{result.stats.swaps:,}"),
    Column("busy", "%", "Share of GPU memory and time that served", lambda result: f"{100 * result.stats.busy:.0f}"),
    Column("fairness", "", "Jain's index over tenants: 1 if all fare alike", lambda result: f"{result.stats.jain:.2f}"),
)


def columns(results: Sequence[CaseResult]) -> list[Column]:
    """Those that say something here."""
    values = {column: {getattr(result.case, name) for result in results} for name, column in _OPTIONS.items()}
    # What all cases have in common is said above the table. One case alone has its options here.
    options = [column for column, there in values.items() if len(there) > 1]
    if len(results) == 1:
        options = [column for column, there in values.items() if there != {None}]
    one_tenant = all(len(result.stats.by_tenant) <= 1 for result in results)
    nothing_lost = not any(result.stats.lost for result in results)
    left_out = {*(("fairness",) if one_tenant else ()), *(("lost",) if nothing_lost else ())}
    return [*options, *(column for column in _FIGURES if column.title not in left_out)]


def comparison(results: Sequence[CaseResult], chosen: Sequence[CaseResult]) -> str:
    """One row for each case."""
    shown = columns(results)
    head = "".join(
        f'<th{_name(number)} title="{escape(column.tip)}">{escape(column.title)}<span>{column.unit}</span></th>'
        for number, column in enumerate(shown)
    )
    marked = {result.case for result in chosen} if len(chosen) < len(results) else set()
    return _table_of(head, [_row(result, shown, result.case in marked) for result in results])


def _row(result: CaseResult, shown: Sequence[Column], is_marked: bool) -> str:
    cells = (f"<td{_name(number)}>{escape(column.cell(result))}</td>" for number, column in enumerate(shown))
    mark = ' class="chosen"' if is_marked else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def _name(number: int) -> str:
    """The first column has words."""
    return "" if number else ' class="name"'


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{_name(number)}>{escape(title)}</th>" for number, title in enumerate(titles))
    cells = ["".join(f"<td{_name(number)}>{escape(cell)}</td>" for number, cell in enumerate(row)) for row in rows]
    return _table_of(head, [f"<tr>{row}</tr>" for row in cells])


def _table_of(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _details(result: CaseResult) -> str:
    stats = result.stats
    by_class, by_tenant = (
        with_lost(stats.by_class, stats.lost_by_class),
        with_lost(stats.by_tenant, stats.lost_by_tenant),
    )
    tables = "\n".join((_models(stats), _group("class", by_class), _group("tenant", by_tenant)))
    return f"<details><summary>{escape(result.case.label)}</summary>\n{tables}\n</details>"


def _models(stats: Stats) -> str:
    """By model also what requests wait for."""
    largest = sorted(stats.delays.items(), key=lambda pair: (-pair[1].served - pair[1].lost, pair[0]))[:GROUPS_MAX]
    rows = []
    for model, delays in largest:
        waits, cause = stats.by_model.get(model), bottleneck(delays)
        p50, p95 = ("-", "-") if waits is None else (f"{waits.p50_s:,.1f}", f"{waits.p95_s:,.1f}")
        means = (_mean_of(delays, name) for name in ("not_there_s", "full_s", "slow_s"))
        rows.append((model, f"{delays.served:,}", f"{delays.lost:,}", p50, p95, *means, cause.value if cause else "-"))
    waits_and_means = ("p50 wait, s", "p95 wait, s", "not there, s", "full, s", "slow, s")
    return _table(("model", "served", "lost", *waits_and_means, "bottleneck"), rows)


def _group(name: str, groups: Mapping[str, tuple[Waits, int]]) -> str:
    """Waits of requests that were served, and how many were not."""
    largest = sorted(groups.items(), key=lambda pair: (-pair[1][0].count - pair[1][1], pair[0]))[:GROUPS_MAX]
    rows = []
    for key, (waits, lost) in largest:
        values = (waits.p50_s, waits.p95_s, waits.mean_s, waits.max_s)
        cells = (f"{value:,.1f}" if waits.count else "-" for value in values)
        rows.append((key or "-", f"{waits.count:,}", f"{lost:,}", *cells))
    return _table((name, "served", "lost", "p50 wait, s", "p95 wait, s", "mean wait, s", "longest, s"), rows)


# --- plots ------------------------------------------------------------------------------------------------------------


def _labels(results: Sequence[CaseResult]) -> dict[Case, str]:
    return short_labels(result.case for result in results)


def delay_bars(results: Sequence[CaseResult]) -> str:
    """The mean delay of a request, by cause, one bar a case."""
    rows, labels = [], _labels(results)
    for result in results:
        delays = result.stats.all_delays
        parts = [delays.mean_s(value) for value in (delays.not_there_s, delays.full_s, delays.slow_s)]
        lost = f", {result.stats.lost_share:.0%} lost" if result.stats.lost else ""
        rows.append(Bar(labels[result.case], parts, seconds(sum(parts)) + lost))
    return bars("Mean delay of a served request, by cause", ("not there", "full", "slow"), rows)


def over_time_plots(results: Sequence[CaseResult]) -> list[str]:
    """By the time of arrival, one line a case: the p95 wait; and the share of requests that were lost, if some were."""
    plots = [_over_time("Waits over time", results, "p95 wait, s", _p95_s, lambda wait: f"p95 wait {seconds(wait)}")]
    if any(result.stats.lost for result in results):
        plots.append(_over_time("Requests lost over time", results, "%", _lost, lambda share: f"{share:.0f} % lost"))
    return plots


def _p95_s(moment: Moment) -> float | None:
    return moment.p95_s if moment.served else None


def _lost(moment: Moment) -> float | None:
    """In percent."""
    requests = moment.served + moment.lost
    return 100 * moment.lost / requests if requests else None


def _over_time(
    title: str,
    results: Sequence[CaseResult],
    unit: str,
    value: Callable[[Moment], float | None],
    say: Callable[[float], str],
) -> str:
    """`value` is None where there is nothing to say."""
    ends_s = max((moment.at for result in results for moment in result.stats.over_time), default=0.0)
    labels = _labels(results)
    unit_s, time_unit = _unit(ends_s)
    lines = [
        Line(
            labels[result.case],
            [(one.at / unit_s, up) for one in result.stats.over_time if (up := value(one)) is not None],
        )
        for result in results
    ]
    x, y = linear(f"arrival, {time_unit}", [ends_s / unit_s]), linear(unit, _heights(lines))
    return plot(title, x, y, lines, lambda at, up: f"at {at:.3g} {time_unit}, {say(up)}")


def wait_plots(results: Sequence[CaseResult]) -> list[str]:
    """For each class the share of all its requests that were served within so long, one line a case."""
    names = {name for result in results for name in (*result.stats.by_class, *result.stats.lost_by_class)}
    # Classes by their rank, then other priorities.
    ranked = [name for name in CLASS_NAMES.values() if name in names]
    return [_wait_plot(name, results) for name in (*ranked, *sorted(names.difference(ranked)))]


def _wait_plot(name: str, results: Sequence[CaseResult]) -> str:
    """Requests that are lost count: a line ends at the share that was served."""
    lines, longest, labels = [], [], _labels(results)
    for result in results:
        waits, lost = with_lost(result.stats.by_class, result.stats.lost_by_class).get(name, (NO_WAITS, 0))
        served_share = 100 * waits.count / max(1, waits.count + lost)
        lines.append(Line(labels[result.case], [(wait, served_share * share) for wait, share in waits.curve]))
        longest.append(waits.max_s)
    x = logarithmic("wait, s", longest, AT_ONCE_S)
    title = f"Share of requests of class {name} served within"
    return plot(title, x, linear("%", [100.0]), lines, lambda wait, share: f"{share:.0f} % within {seconds(wait)}")


def tiers_plot(result: CaseResult) -> str:
    """How many slots were ready, asleep and moving, as means over short stretches of time."""
    ends_s = max(result.stats.ends_s, 1e-9)
    unit_s, unit = _unit(ends_s)
    lines = [
        Line(name, [(mark.at / unit_s, getattr(mark, name)) for mark in result.stats.tiers])
        for name in ("ready", "asleep", "moving")
    ]
    x, y = linear(f"time, {unit}", [ends_s / unit_s]), linear("models", _heights(lines), step_min=1.0)
    return plot(result.case.label, x, y, lines, lambda at, count: f"{count:.1f} at {at:.3g} {unit}")


def _heights(lines: Sequence[Line]) -> list[float]:
    return [up for line in lines for _, up in line.points]


def _unit(span_s: float) -> tuple[float, str]:
    """The unit for a span of time: its seconds and its name."""
    if span_s < 300:
        return 1.0, "s"
    return (60.0, "min") if span_s < 4 * 3_600 else (3_600.0, "h")
