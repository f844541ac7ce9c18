"""What `estimates` found, as records, as tables, and as figures against goals."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory.gateway import Answer, Figure
from benchmarks.memory.models import Configuration, parameters
from benchmarks.memory.nvml import Card, Return
from benchmarks.rig.result import Run

CONFIGURATIONS_MIN = 8
# An estimate meets its goal if one of these holds.
ESTIMATE_ERROR_MAX, ESTIMATE_ERROR_MIB_MAX = 0.05, 300
REMEMBERED_ERROR_MAX = 0.01
GOALS = {
    "configurations_min": CONFIGURATIONS_MIN,
    "estimates_close": f"all: {ESTIMATE_ERROR_MAX:.0%} or {ESTIMATE_ERROR_MIB_MAX} MiB",
    "remembered_error_max": REMEMBERED_ERROR_MAX,
    "told_before_back": 0,
    "stranger_changes_decisions": True,
}


@dataclass(frozen=True, slots=True)
class Load:
    """One load of a model: what was known, what it was given, what its process took at most, what torch held."""

    figure: Figure
    claim_mib: int
    peak_mib: float
    host_mib: float
    answer: Answer

    @property
    def error_mib(self) -> float:
        return self.claim_mib - self.peak_mib

    @property
    def error(self) -> float:
        return self.error_mib / self.peak_mib

    @property
    def is_close(self) -> bool:
        return abs(self.error) <= ESTIMATE_ERROR_MAX or abs(self.error_mib) <= ESTIMATE_ERROR_MIB_MAX


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: its first load, how its memory came back, and its load by another gateway."""

    served: Configuration
    first: Load
    gone: Return
    second: Load


@dataclass(frozen=True, slots=True)
class Encounter:
    """What a load of the newcomer would evict before, while and after an undeclared process held memory (None: the
    newcomer could not be loaded)."""

    before: list[str] | None
    during: list[str] | None
    after: list[str] | None
    foreign_mib: int
    noticed_s: float
    is_named: bool
    """The gateway named the process."""
    ready: list[str]
    """The models that were ready once the newcomer was, while the process held its memory."""
    used_mib: float

    @property
    def changes_decisions(self) -> bool:
        return self.before == [] and self.after == [] and bool(self.during) and self.is_named


# --- tables ---------------------------------------------------------------------------------------------------------


def versions(python: str) -> str:
    """Of the interpreter that runs the models."""
    script = "import sys, torch, transformers as t; print(*sys.version_info[:2], torch.__version__, t.__version__)"
    found = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    return f"Python {found[0]}.{found[1]}, PyTorch {found[2]}, Transformers {found[3]}"


def show_card(card: Card, gpus: dict[str, Any]) -> None:
    gpu, probe = gpus["gpus"][0], gpus["probe"]
    same = "the same UUID" if gpu["id"] == card.uuid else f"UUID {gpu['id']}"
    print(f"NVML     {card.name}, driver {card.driver}, {card.total_mib:,.0f} MiB", end="")
    print(f", {card.reserved_mib:,.0f} of them reserved by the driver, {card.used_mib:,.0f} used")
    print(
        f"gateway  {same}, probe {probe['kind']}, {gpu['total_mib']:,} MiB, {gpu['free_mib']:,} to plan with",
        flush=True,
    )


def show_rows(rows: Sequence[Row], folders: Path) -> None:
    _show_errors(rows, folders)
    _show_parts(rows)
    _show_returns(rows)


def _show_errors(rows: Sequence[Row], folders: Path) -> None:
    print("\nplanned and taken, in MiB of GPU memory (taken: the most that NVML showed for the process, context full)")
    taken = f"{'taken':>8}{'error':>15}"
    print(f"{'model and context':24}{'weights':>9} | {'first':>7}{taken} | {'then':>7}{taken}  from")
    for row in rows:
        first, second = row.first, row.second
        count = parameters(folders / row.served.shape) / 1e9
        print(
            f"{row.served.id:24}{count:>7.2f} B | {first.claim_mib:>7,}{first.peak_mib:>8,.0f}{first.error_mib:>+7,.0f}"
            f"{first.error:>+8.1%} | {second.claim_mib:>7,}{second.peak_mib:>8,.0f}{second.error_mib:>+7,.0f}"
            f"{second.error:>+8.2%}  {first.figure.source}, {second.figure.source}"
        )


def _show_parts(rows: Sequence[Row]) -> None:
    print("\nby part, estimated / held by torch (its workspace counts as cache); the rest is the process's context")
    print(f"{'model and context':24}{'weights':>17}{'cache':>14}{'work':>12}{'context':>12}{'of the host':>15}")
    for row in rows:
        parts, held = row.first.figure.parts, row.first.answer.memory_mib
        work = parts.get("compute buffers", 0) + parts.get("allocator", 0)
        context = row.first.peak_mib - sum(held.values())
        print(
            f"{row.served.id:24}{parts['weights']:>8,} /{held['weights']:>7,.0f}{parts['KV cache']:>6,} /"
            f"{held['cache']:>6,.0f}{work:>5,} /{held['work']:>5,.0f}{parts['context']:>5,} /{context:>5,.0f}"
            f"{row.first.figure.host_mib:>7,} /{row.first.host_mib:>6,.0f}"
        )


def _show_returns(rows: Sequence[Row]) -> None:
    print("\nmemory back after a stop, seconds since it was ordered (looked at every 2 ms)")
    print(
        f"{'model and context':24}{'MiB':>8}{'process gone':>15}{'memory back':>13}{'answered':>9}{'missing then':>14}"
    )
    for row in rows:
        gone = row.gone
        print(
            f"{row.served.id:24}{row.first.peak_mib:>8,.0f}{gone.ended_s:>15.3f}{gone.back_s:>13.3f}{gone.told_s:>9.3f}"
            f"{gone.missing_mib:>10,.0f} MiB"
        )


def show_encounter(met: Encounter) -> None:
    def shown(leaving: list[str] | None) -> str:
        return "it could not be loaded" if leaving is None else f"{', '.join(leaving) or 'nothing'} would be evicted"

    print("\nan undeclared process takes 20 GB; what is evicted for a newcomer?")
    print(f"before      {shown(met.before)}")
    print(
        f"with it     {shown(met.during)}; {met.foreign_mib:,} MiB were counted as foreign after {met.noticed_s:.2f} s"
    )
    print(f"            the newcomer was served; ready then: {', '.join(met.ready)}; {met.used_mib:,.0f} MiB used")
    print(f"after it    {shown(met.after)}")


# --- goals ----------------------------------------------------------------------------------------------------------


def report_goals(run: Run, rows: Sequence[Row], met: Encounter) -> None:
    figures = _figures(rows, met)
    run.report(figures, GOALS, _is_met(figures))


def _figures(rows: Sequence[Row], met: Encounter) -> dict[str, Any]:
    errors = [abs(row.first.error) for row in rows]
    return {
        "configurations": len(rows),
        "estimates_close": sum(row.first.is_close for row in rows),
        "estimate_error_median": round(median(errors), 4),
        "estimate_error_max": round(max(errors), 4),
        "estimate_error_mib_max": round(max(abs(row.first.error_mib) for row in rows)),
        "remembered_error_max": round(max(abs(row.second.error) for row in rows), 5),
        "remembered_from": sorted({row.second.figure.source for row in rows}),
        "memory_back_s_median": round(median(row.gone.back_s for row in rows), 3),
        "memory_back_s_max": round(max(row.gone.back_s for row in rows), 3),
        "told_before_back": sum(row.gone.missing_mib > 0 for row in rows),
        "stranger_noticed_s": round(met.noticed_s, 2),
        "stranger_changes_decisions": met.changes_decisions,
    }


def _is_met(figures: dict[str, Any]) -> bool:
    return all(
        (
            figures["configurations"] >= CONFIGURATIONS_MIN,
            figures["estimates_close"] == figures["configurations"],
            figures["remembered_error_max"] <= REMEMBERED_ERROR_MAX,
            figures["remembered_from"] == ["measured"],
            figures["told_before_back"] == 0,
            figures["stranger_changes_decisions"],
        )
    )
