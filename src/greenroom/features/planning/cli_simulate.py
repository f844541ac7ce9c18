"""`greenroom simulate`: which GPUs, green room and concurrency would help? Runs the gateway's own scheduler."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greenroom.cli import screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus, WrongUsage
from greenroom.features.planning.cli_simulation_options import add_options, without_effect

if TYPE_CHECKING:
    from greenroom.core.events import Limits
    from greenroom.sim.cases import Case, CaseResult
    from greenroom.sim.results.stats import Stats, Waits
    from greenroom.sim.results.verdict import Advice
    from greenroom.sim.truth import Delays


def run(args: argparse.Namespace) -> None:
    from greenroom.config import loader
    from greenroom.config.limits import limits_of
    from greenroom.features.planning.cli_simulation import decides, prepare, sizeless, without_gpus
    from greenroom.sim.results.effect import counted
    from greenroom.sim.results.report import html
    from greenroom.sim.results.verdict import advice
    from greenroom.sim.runs import CaseFailed, CaseRuns

    path = loader.find(args.config)
    config = loader.load(path).config
    _require_scheduler(args.scheduler, config.scheduler.implementation)
    compared = _cases(args, limits_of(config))
    if args.out:
        _require_writable(args.out)
        _refuse_to_overwrite(args.out, {"the configuration": path, "the trace": args.trace})
    for options, why in without_effect(args).items():
        screen.note(f"warning: {options} without effect: {why}")
    if args.trace and _may_block(args.trace):
        screen.note(f"--trace {args.trace} is a pipe: waiting for a program that writes to it")
    prepared = prepare(config, args)
    if args.trace:
        screen.note(f"trace: {prepared.assumed[0]}")
    for sentence in decides(args.scheduler or config.scheduler.implementation):
        screen.note(sentence)
    if prepared.doubt:
        screen.note(f"warning: {args.trace}: {prepared.doubt}")
    if none_known := without_gpus(prepared.base, args):
        screen.note(f"warning: {none_known}")
    for name in sizeless(config, prepared.base):
        screen.note(f"warning: models.{name}: its size is not known, so it fits everywhere; give memory_mib")
    began = time.monotonic()
    ends = partial(_end_with, os.getpid())
    runs = CaseRuns(compared, prepared.base, prepared.workload, args.seed, args.jobs, ends)
    try:
        with runs, _progress(len(compared)) as tell:
            results = runs.results(tell)
    except CaseFailed as error:
        played = f"the case {error.case.label} could not be played with the policy {error.case.policy!r}"
        raise CommandFailed(f"{played}: {error.why}", error.details) from error
    said = advice(results, prepared.wait_max_s)
    if args.json:
        figures = [_figures(result) for result in results]
        screen.say_json({"assumed": prepared.assumed, "bottom_line": said.bottom_line, "cases": figures})
    else:
        _say(results, said)
        events = sum(result.stats.events for result in results)
        screen.note(f"{counted(events, 'event')} in {time.monotonic() - began:.1f} s")
    if args.out:
        # Only now: if it cannot be written, the figures are not lost.
        if _may_block(os.path.expanduser(args.out)):
            screen.note(f"--out {args.out} is a pipe: waiting for a program that reads from it")
        _write(args.out, html(results, prepared.assumed, prepared.wait_max_s))
    if not args.json:
        screen.hint(f"open {args.out}" if args.out else "plots: add --out report.html")


def _say(results: Sequence[CaseResult], said: Advice) -> None:
    screen.say_table(*_table(results))
    for sentences in (said.changes, said.bottom_line):
        if sentences:
            screen.say("")
        for sentence in sentences:
            screen.say(sentence)


COMMAND = Subcommand(
    "simulate",
    "Play a recorded or generated workload through the scheduler and say what other hardware would change.",
    add_options,
    run,
)


def _may_block(path: str) -> bool:
    """True for a named pipe, which opens when its other side does. Pipes that a shell gives are open already."""
    with contextlib.suppress(OSError):
        return stat.S_ISFIFO(os.stat(os.path.realpath(path)).st_mode)
    return False


def _require_scheduler(asked: str | None, configured: str) -> None:
    from greenroom.config.limits import scheduler_problems

    for problem in scheduler_problems(asked or configured):
        if asked:
            raise WrongUsage(f"--scheduler: {problem.message}")
        raise CommandFailed(f"{'.'.join(map(str, problem.where))}: {problem.message}")


def _cases(args: argparse.Namespace, limits: Limits) -> tuple[Case, ...]:
    """The cases that the options ask for. Raises CommandFailed, also for a policy that cannot be made."""
    from greenroom.config.limits import POLICIES, plugin_problems
    from greenroom.sim.cases import CASES_MAX, cases

    known = tuple(POLICIES)
    named = [limits.policy] if args.policy is None else [word.strip() for word in args.policy.split(",")]
    policies = list(dict.fromkeys(named))
    if "" in policies:
        raise WrongUsage(f"--policy {args.policy!r} lacks a name: write one, or several such as default,fifo")
    for policy in policies:
        if policy not in known:
            raise WrongUsage(f"there is no policy {policy!r}: {' or '.join(known)}")
    for policy in policies:
        for problem in plugin_problems(replace(limits, policy=policy)):
            where = ".".join(map(str, problem.where))
            is_option = args.policy is not None and where == "scheduler.policy"
            raise CommandFailed(f"{'--policy' if is_option else where}: {problem.message}")
    options = (args.gpus, args.green_room_mib, args.gpu_mib, args.concurrency)
    values = [[None] if given is None else given for given in options]
    count = math.prod(map(len, (policies, *values)))
    if count > CASES_MAX:
        raise WrongUsage(f"{count} cases are more than {CASES_MAX}: name fewer policies, GPUs, sizes or concurrencies")
    return cases(policies, *values)


def _end_with(parent: int) -> None:
    """Let this process end with its parent, however that ends. A case alone would notice much later."""
    from greenroom.process import keeper

    keeper.set_for_this_process(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before that.
    if os.getppid() != parent:
        os._exit(ExitStatus.FAILED)


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


def _table(results: Sequence[CaseResult]) -> tuple[list[str], list[list[str]]]:
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


def _figures(result: CaseResult) -> dict[str, Any]:
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
        "by_class": _groups(stats.by_class, stats.lost_by_class),
        "by_tenant": _groups(stats.by_tenant, stats.lost_by_tenant),
        "by_model": {model: _waits(waits) for model, waits in stats.by_model.items()},
    }


def _groups(served: Mapping[str, Waits], lost: Mapping[str, int]) -> dict[str, dict[str, float]]:
    from greenroom.sim.results.stats import with_lost

    return {key: {**_waits(waits), "lost": count} for key, (waits, count) in with_lost(served, lost).items()}


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
    """Seconds are means over requests that were served; loads are parts of those not there."""
    from greenroom.sim.results.bottleneck import bottleneck

    cause, means = bottleneck(delays), ("not_there_s", "first_load_s", "idle_load_s", "full_s", "slow_s")
    return {
        **{name: round(delays.mean_s(getattr(delays, name)), 3) for name in means},
        "lost_not_there": delays.lost_not_there,
        "lost_full": delays.lost_full,
        "lost_too_large": delays.lost_too_large,
        "lost_kept_out": delays.lost_kept_out,
        "lost_no_gpu": delays.lost_no_gpu,
        "bottleneck": None if cause is None else cause.value,
    }


def _write(path: str, page: str) -> None:
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
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        # A name that is too long, or a link to itself.
        raise CommandFailed(f"--out {out} cannot be written: {error.strerror}") from error
    # A slash at the end means a folder, and a path does not keep it.
    folder = path.resolve() if out.endswith("/") else path.resolve().parent
    if path.is_dir():
        raise CommandFailed(f"--out {out} cannot be written: it is a folder; name a file in it")
    if not folder.is_dir():
        why = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        raise CommandFailed(f"--out {out} cannot be written: {why}")
    # A file is replaced, for which its folder counts; a device or a pipe is written to.
    target = path if path.exists() and not path.is_file() else folder
    if not os.access(target, os.W_OK):
        raise CommandFailed(f"--out {out} cannot be written: no permission to write to {target}")
