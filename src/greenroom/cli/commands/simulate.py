"""`greenroom simulate`: which GPUs, green room and concurrency would help? Runs the gateway's own scheduler."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus, WrongUsage

if TYPE_CHECKING:
    from greenroom.sim.cases import Case, Result
    from greenroom.sim.stats import Stats, Waits
    from greenroom.sim.truth import Delays

WORKLOADS = ("poisson", "bursty", "agents")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    _add_trace_options(parser)
    parser.add_argument("--workload", choices=WORKLOADS, default="poisson", help="without a trace: how requests arrive")
    parser.add_argument("--rate", type=_above_zero, default=1.0, help="requests a second (poisson, bursty)")
    parser.add_argument("--agents", type=_count, default=8, help="number of loops that alternate models (agents)")
    parser.add_argument("--seconds", type=_above_zero, default=3600.0, help="how long requests arrive")
    parser.add_argument("--policy", metavar="NAMES", help="one, or several such as default,fifo (default: the file's)")
    _add_case_options(parser)
    _add_timing_options(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--jobs", type=_count, metavar="N", help="cases played at once (default: one per core)")
    parser.add_argument("--out", metavar="HTML", help="write a report with plots")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", metavar="FILE", help="requests to play, as CSV or lines of JSON")
    parser.add_argument("--stretch", type=_above_zero, default=1.0, help="multiply the trace's times by this")
    parser.add_argument(
        "--time-unit", choices=("s", "ms", "us", "ns"), help="of the trace's times (default: found from the trace)"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--skip-unknown", action="store_true", help="leave out rows for models that are not in the configuration"
    )
    others.add_argument(
        "--spread", action="store_true", help="draw each row's model from the configuration, whatever the trace says"
    )


def _add_case_options(parser: argparse.ArgumentParser) -> None:
    """What is compared: every combination of these. The first value of each is what the others are compared with."""
    parser.add_argument("--gpus", type=_gpus, metavar="COUNTS", help="such as 2, 1..4 or 1,2,4 (default: the file's)")
    parser.add_argument(
        "--gpu-mib",
        type=_counts,
        metavar="SIZES",
        help="memory of each GPU, such as 24576,81920; 24576..98304 doubles (default: the file's)",
    )
    parser.add_argument(
        "--green-room-mib", type=_sizes, metavar="SIZES", help="host memory where models may sleep, such as 0,65536"
    )
    parser.add_argument(
        "--concurrency",
        type=_counts,
        metavar="COUNTS",
        help="requests a model answers at once, such as 4,16; 1..16 doubles (default: the file's)",
    )


def _add_timing_options(parser: argparse.ArgumentParser) -> None:
    """Options for how long things take, where the estimate from a model's size is not good enough."""
    parser.add_argument("--load-s", type=_from_zero, help="seconds a load takes (default: by the model's size)")
    parser.add_argument("--wake-s", type=_from_zero, help="seconds a wake takes (default: by the model's size)")
    parser.add_argument(
        "--tokens-per-s", type=_above_zero, help="decoding speed of an answer alone (default: as recorded, or 60)"
    )
    parser.add_argument(
        "--prefill-tokens-per-s", type=_above_zero, default=2_000.0, help="prefill speed of one prompt (default: 2000)"
    )
    parser.add_argument(
        "--constant-speed", action="store_true", help="answers on the same GPU do not slow each other down"
    )
    parser.add_argument("--loads-at-once", type=_count, help="loads that read from disk at once (default: all)")
    parser.add_argument("--patience-s", type=_above_zero, help="seconds until callers give up (default: never)")
    parser.add_argument(
        "--jitter", type=_share, default=0.1, help="how much move times vary, as a share (default: 0.1)"
    )


def run(args: argparse.Namespace) -> int:
    from greenroom.cli.simulation import prepare, sizeless
    from greenroom.config import loader
    from greenroom.sim.runs import CaseFailed, CaseRuns
    from greenroom.sim.verdict import advice

    path = loader.find(args.config)
    config = loader.load(path).config
    compared = _cases(args, config.scheduler.policy)
    if args.out:
        _refuse_to_overwrite(args.out, {"the configuration": path, "the trace": args.trace})
        _require_writable(args.out)
    prepared = prepare(config, args)
    if args.trace:
        screen.note(f"trace: {prepared.assumed[0]}")
    for name in sizeless(config, prepared.base):
        screen.note(f"warning: models.{name}: its size is not known, so it fits everywhere; give memory_mib")
    began = time.monotonic()
    runs = CaseRuns(compared, prepared.base, prepared.workload, args.seed, args.jobs)
    try:
        with runs, _progress(len(compared)) as tell:
            results = runs.results(tell)
    except CaseFailed as error:
        case, _, why = str(error).partition(":")
        raise CommandFailed(f"the case {case} could not be played", why.strip()) from error
    if args.out:
        _write(args.out, results, prepared.assumed)
    said = advice(results)
    if args.json:
        figures = [_figures(result) for result in results]
        screen.say_json({"assumed": prepared.assumed, "bottom_line": said.bottom_line, "cases": figures})
        return ExitStatus.OK
    screen.say_table(*_table(results))
    for sentences in (said.changes, said.bottom_line):
        if sentences:
            screen.say("")
        for sentence in sentences:
            screen.say(sentence)
    events = sum(result.stats.events for result in results)
    screen.note(f"{events:,} events in {time.monotonic() - began:.1f} s")
    screen.hint(f"open {args.out}" if args.out else "plots: add --out report.html")
    return ExitStatus.OK


COMMAND = Subcommand(
    "simulate",
    "Play a recorded or generated workload through the scheduler and say what other hardware would change.",
    add_options,
    run,
)


def _cases(args: argparse.Namespace, usual_policy: str) -> tuple[Case, ...]:
    from greenroom.config.limits import POLICIES
    from greenroom.sim.cases import CASES_MAX, cases

    known = tuple(POLICIES)
    named = [usual_policy] if args.policy is None else args.policy.split(",")
    policies = list(dict.fromkeys(word.strip() for word in named))
    for policy in policies:
        if policy not in known:
            raise WrongUsage(f"there is no policy {policy!r}: {' or '.join(known)}")
    options = (args.gpus, args.green_room_mib, args.gpu_mib, args.concurrency)
    values = [[None] if given is None else given for given in options]
    count = math.prod(map(len, (policies, *values)))
    if count > CASES_MAX:
        raise WrongUsage(f"{count} cases are more than {CASES_MAX}: name fewer policies, GPUs, sizes or concurrencies")
    return cases(policies, *values)


@contextlib.contextmanager
def _progress(count: int) -> Iterator[Callable[[Case, float], None]]:
    """A progress bar per case on standard error; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda case, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[Case, Any] = {}

        def tell(case: Case, share: float) -> None:
            if case not in bars:
                bars[case] = progress.add_task(f"{len(bars) + 1}/{count} {case.label}", total=1.0)
            progress.update(bars[case], completed=share)

        yield tell


CASE_COLUMNS = (
    ("policy", "policy"),
    ("gpus", "gpus"),
    ("gpu MiB", "gpu_mib"),
    ("room MiB", "green_room_mib"),
    ("at once", "concurrency"),
)


def _table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows; columns without information are left out."""
    shown: list[tuple[str, list[str]]] = []
    for title, name in CASE_COLUMNS:
        if getattr(results[0].case, name) is not None:
            shown.append((title, [str(getattr(result.case, name)) for result in results]))
    shown.append(("served", [str(result.stats.served) for result in results]))
    if any(result.stats.lost for result in results):
        shown.append(("lost", [str(result.stats.lost) for result in results]))
    for title, name in (("p50", "p50_s"), ("p95", "p95_s"), ("max", "max_s")):
        shown.append((title, [_waited(result.stats.waits, name) for result in results]))
    for title, name in (("not there", "not_there_s"), ("full", "full_s"), ("slow", "slow_s")):
        shown.append((title, [_delayed(result.stats.all_delays, name) for result in results]))
    shown.append(("swaps", [str(result.stats.swaps) for result in results]))
    shown.append(("busy", [f"{result.stats.busy:.0%}" for result in results]))
    if any(len(result.stats.by_tenant) > 1 for result in results):
        shown.append(("fair", [f"{result.stats.jain:.2f}" for result in results]))
    return [title for title, _ in shown], [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]


def _waited(waits: Waits, name: str) -> str:
    """A wait; `-` if no request was served, which is not the same as 0."""
    return f"{getattr(waits, name):.1f}s" if waits.count else "-"


def _delayed(delays: Delays, name: str) -> str:
    """The mean over requests that were served."""
    return f"{delays.mean_s(getattr(delays, name)):.1f}s" if delays.served else "-"


# --- JSON and HTML ----------------------------------------------------------------------------------------------------


def _figures(result: Result) -> dict[str, Any]:
    case, stats = result.case, result.stats
    return {
        "policy": case.policy,
        "gpus": case.gpus,
        "gpu_mib": case.gpu_mib,
        "green_room_mib": case.green_room_mib,
        "concurrency": case.concurrency,
        **_counts_of(stats),
        "waits": _waits(stats.waits),
        "delays": _delays(stats.all_delays),
        "delays_by_model": {model: _delays(delays) for model, delays in stats.delays.items()},
        **{
            name: {key: _waits(waits) for key, waits in groups.items()}
            for name, groups in (
                ("by_class", stats.by_class),
                ("by_tenant", stats.by_tenant),
                ("by_model", stats.by_model),
            )
        },
    }


def _counts_of(stats: Stats) -> dict[str, Any]:
    plain = ("requests", "served", "lost", "gone", "loads", "wakes", "sleeps", "unloads", "swaps", "events")
    rounded = ("swaps_per_request", "jain", "busy", "makespan_s", "served_per_s", "tokens_per_s")
    return {
        **{name: getattr(stats, name) for name in plain},
        **{name: round(getattr(stats, name), 4) for name in rounded},
        "rejected": dict(stats.rejected),
        "devices": {
            name: {"busy": round(use.busy, 4), "moving": round(use.moving, 4)} for name, use in stats.devices.items()
        },
    }


def _waits(waits: Waits) -> dict[str, float]:
    names = ("mean_s", "p50_s", "p95_s", "p99_s", "max_s")
    return {"count": waits.count, **{name: round(getattr(waits, name), 3) for name in names}}


def _delays(delays: Delays) -> dict[str, Any]:
    """Seconds are means over requests that were served."""
    from greenroom.sim.verdict import bottleneck

    cause = bottleneck(delays)
    return {
        **{name: round(delays.mean_s(getattr(delays, name)), 3) for name in ("not_there_s", "full_s", "slow_s")},
        "lost_not_there": delays.lost_not_there,
        "lost_full": delays.lost_full,
        "bottleneck": None if cause is None else cause.value,
    }


def _write(path: str, results: Sequence[Result], assumed: Sequence[str]) -> None:
    from greenroom.sim.report import html

    page = html(results, assumed)
    try:
        _replace(Path(os.path.expanduser(path)), page)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error


def _replace(path: Path, page: str) -> None:
    """Write the whole page or nothing: an existing file stays until the new one is complete."""
    if path.exists() and not path.is_file():
        # A device or a pipe must not become a file. A folder raises here.
        path.write_text(page, encoding="utf-8")
        return
    # A link stays a link: its target is replaced.
    target = path.resolve()
    draft = target.with_name(f".greenroom-{os.getpid()}.draft")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _refuse_to_overwrite(out: str, inputs: Mapping[str, str | Path | None]) -> None:
    """Raises WrongUsage if the report would overwrite an input, by whatever name."""
    path = Path(os.path.expanduser(out))
    for what, file in inputs.items():
        if file is not None and path.exists() and Path(file).exists() and path.samefile(file):
            raise WrongUsage(f"--out {out} is {what}: name another file")


def _require_writable(out: str) -> None:
    """Raises CommandFailed if the report could not be written there, before a simulation that may take long."""
    path = Path(os.path.expanduser(out))
    folder = path.resolve().parent
    if path.is_dir():
        raise CommandFailed(f"--out {out} cannot be written: it is a folder; name a file in it")
    if not folder.is_dir():
        raise CommandFailed(f"--out {out} cannot be written: there is no folder {folder}")
    # A file is replaced, for which its folder counts; a device or a pipe is written to.
    target = path if path.exists() and not path.is_file() else folder
    if not os.access(target, os.W_OK):
        raise CommandFailed(f"--out {out} cannot be written: no permission to write to {target}")


# --- options ----------------------------------------------------------------------------------------------------------


def _from_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def _above_zero(text: str) -> float:
    value = _from_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too little")
    return value


def _share(text: str) -> float:
    value = _from_zero(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share below 1")
    return value


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    value = _whole(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is too few")
    return value


def _gpus(text: str) -> list[int]:
    """`2`, `1,2,4` or `1..4`."""
    from greenroom.sim.cases import GPUS_MAX

    first, dots, last = text.partition("..")
    ends = [_count(first), _count(last)] if dots else _list(text, _count)
    if max(ends) > GPUS_MAX or (dots and ends[0] > ends[1]):
        raise argparse.ArgumentTypeError(f"{text} is not 1 to {GPUS_MAX} GPUs, such as 2, 1..4 or 1,2,4")
    return list(range(ends[0], ends[1] + 1)) if dots else ends


def _counts(text: str) -> list[int]:
    """`16`, `4,16`, or `1..16`, which doubles: 1, 2, 4, 8, 16."""
    first, dots, last = text.partition("..")
    if not dots:
        return _list(text, _count)
    value, end = _count(first), _count(last)
    if value > end:
        raise argparse.ArgumentTypeError(f"{text} goes down: write it as a list")
    found = []
    while value < end:
        found.append(value)
        value *= 2
    return [*found, end]


def _sizes(text: str) -> list[int]:
    """As `_counts`; a list may hold 0."""
    return _counts(text) if ".." in text else _list(text, _whole)


def _list(text: str, read: Callable[[str], int]) -> list[int]:
    """In the order given, each value once."""
    return list(dict.fromkeys(read(word) for word in text.split(",")))
