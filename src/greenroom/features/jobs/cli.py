"""`greenroom jobs`: lists jobs, shows one, waits for it with a bar, cancels it, or writes its result to a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus, WrongUsage

if TYPE_CHECKING:
    from greenroom.cli.client import Client

JOBS: Final = "/v1/jobs"
TITLES: Final = ("job", "status", "model", "route", "progress", "left", "age", "note")
STATUSES: Final = ("queued", "running", "done", "failed", "cancelled")
OVER: Final = ("done", "failed", "cancelled")
LOOK_EVERY_S: Final = 1.0
LISTED: Final = 20
BAR_CHARS: Final = 10


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", default="list", choices=(*ACTIONS, "list"), help="what to do (default: list)"
    )
    parser.add_argument("job", nargs="?", metavar="ID", help="the job; not for list")
    parser.add_argument("-o", "--output", metavar="FILE", help="result: where to write it (default: standard output)")
    parser.add_argument("--wait", action="store_true", help="result: wait until the job is over")
    parser.add_argument("--status", choices=STATUSES, help="list: only jobs with this status")
    parser.add_argument("--limit", type=int, default=LISTED, metavar="N", help=f"list: this many (default: {LISTED})")
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _run(args: argparse.Namespace) -> int | None:
    from greenroom.cli.client import Client

    if (args.job is None) == (args.action in ACTIONS):
        raise WrongUsage(f"`greenroom jobs {args.action}` takes {'one id' if args.action in ACTIONS else 'no id'}")
    client = Client(address.address_of(args))
    return _list(args, client) if args.action == "list" else ACTIONS[args.action](args, client)


COMMAND = Subcommand(
    "jobs", "Show requests that are answered later; wait for one, fetch or cancel it.", _add_options, _run
)


# --- actions ----------------------------------------------------------------------------------------------------------


def _list(args: argparse.Namespace, client: Client) -> int:
    answer = client.get(JOBS, {"limit": args.limit} | ({} if args.status is None else {"status": args.status}))
    if args.json:
        screen.say_json(answer)
        return ExitStatus.OK
    screen.say_table(TITLES, [row(job, time.time()) for job in answer["data"]])
    if not answer["data"]:
        screen.hint("send a request with the header `Prefer: respond-async`, and it is a job")
    return ExitStatus.OK


def _show(args: argparse.Namespace, client: Client) -> None:
    _say(args, client.get(_path(args)))


def _wait(args: argparse.Namespace, client: Client) -> int:
    job = _waited(client, _path(args))
    _say(args, job)
    return ExitStatus.OK if job["status"] == "done" else ExitStatus.FAILED


def _cancel(args: argparse.Namespace, client: Client) -> None:
    _say(args, client.delete(_path(args)))


def _result(args: argparse.Namespace, client: Client) -> None:
    if args.wait:
        _waited(client, _path(args))
    pieces = client.download(f"{_path(args)}/result")
    if args.output is None:
        for piece in pieces:
            if sys.stdout.isatty() and b"\0" in piece:
                raise WrongUsage("the result is no text; say where to write it with -o FILE")
            screen.write(piece)
    else:
        screen.note(f"{_written(Path(args.output), pieces):,} bytes in {args.output}")


def _written(file: Path, pieces: Iterator[bytes]) -> int:
    """Its size. The file has its name only once it is whole."""
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as opened:
            opened.writelines(pieces)
            size = opened.tell()
        part.replace(file)
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return size


ACTIONS: Final[Mapping[str, Callable[[argparse.Namespace, Client], int | None]]] = {
    "show": _show,
    "wait": _wait,
    "cancel": _cancel,
    "result": _result,
}


def _path(args: argparse.Namespace) -> str:
    from greenroom.cli.client import segment

    return f"{JOBS}/{segment(args.job)}"


def _waited(client: Client, path: str) -> Mapping[str, Any]:
    """The job once it is over."""
    job: Mapping[str, Any] = client.get(path)
    if job["status"] in OVER:
        return job
    with screen.progress_bar(f"{job['model']} {job['status']}") as tell:
        while job["status"] not in OVER:
            where = f", place {job['position']}" if job["position"] else ""
            left = f", {screen.seconds(job['eta_s'])} left" if job["eta_s"] is not None else ""
            tell(f"{job['model']} {job['status']}{where}{left}", job["progress"])
            time.sleep(LOOK_EVERY_S)
            job = client.get(path)
    return job


# --- how they look ----------------------------------------------------------------------------------------------------


def _say(args: argparse.Namespace, job: Mapping[str, Any]) -> None:
    if args.json:
        screen.say_json(job)
    else:
        screen.say_table(TITLES, [row(job, time.time())])
        if job["status"] == "done":
            screen.hint(f"its answer: greenroom jobs result {job['id']} -o FILE")


def row(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    return (
        job["id"],
        job["status"],
        job["model"].replace(" ", "_"),
        job["route"],
        bar(job["progress"]) if job["status"] == "running" else "-",
        screen.seconds(job["eta_s"]),
        screen.seconds(now - job["created"]),
        note(job),
    )


def bar(progress: float | None) -> str:
    """`######----_60%`; without a space, which ends a column in a pipe."""
    if progress is None:
        return "-"
    full = round(progress * BAR_CHARS)
    return f"{'#' * full}{'-' * (BAR_CHARS - full)}_{progress:.0%}"


def note(job: Mapping[str, Any]) -> str:
    if job["error"] is not None:
        return f"{job['error']['code']}: {job['error']['message']}"
    if job["status"] == "queued" and job["position"]:
        return f"place {job['position']}"
    return f"{job['result_bytes']:,} bytes" if job["result_bytes"] else ""
