"""`greenroom pull`: fetches a model from the hub, by the gateway that runs here or, without one, by itself.

Owns which of the two it is, and how progress looks: bars for each file and in total at a terminal, a line now and then
elsewhere. An interrupt stops the download; what was fetched stays, and the same command goes on with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, ExitStatus, NoGateway

if TYPE_CHECKING:
    from rich.progress import TaskID

    from greenroom.cli.client import Client
    from greenroom.library.orders import FetchPlace

DOWNLOADS: Final = "/v1/models/download"
OVER: Final = ("completed", "failed", "cancelled")
LOOK_EVERY_S: Final = 0.5
# Bars of files at the same time; the others are in the total.
BARS_MAX: Final = 8
# In a pipe, a line for each of so many parts of the whole.
PARTS: Final = 10
# After so long without a word from the hub it is said that it is asked.
QUIET_S: Final = 2.0
STOPPED: Final = "stopped; what was fetched stays, and the same command goes on with it"

View = Mapping[str, Any]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="ID|URL", help="a model of the hub (org/name), its page, or a file's address")
    parser.add_argument("--quantization", metavar="Q", help="only the GGUF files of this quantization, such as Q4_K_M")
    parser.add_argument("--revision", metavar="R", help="a branch, tag or commit (default: main)")
    parser.add_argument("--include", metavar="P", action="append", default=[], help="only files like this; may repeat")
    parser.add_argument("--exclude", metavar="P", action="append", default=[], help="no files like this; may repeat")
    parser.add_argument(
        "--to", metavar="DIR", help="a plain folder (default: the hub's cache if it is set, else the first root)"
    )
    address.add_token_option(parser)
    address.add_options(parser, json_help="print the finished download as JSON")


def _run(args: argparse.Namespace) -> int:
    import asyncio

    from greenroom.cli.client import Client

    order = {
        "model": args.model,
        "quantization": args.quantization,
        "revision": args.revision,
        "include": args.include,
        "exclude": args.exclude,
    }
    client = Client(address.address_of(args))
    try:
        done = _by_gateway(client, order, args.to, address.token_of(args))
        if done is None:
            if args.url or os.environ.get(address.URL_NAME):
                client.get(DOWNLOADS)
            done = asyncio.run(_directly(order, args.to))
    except KeyboardInterrupt:
        screen.note(STOPPED)
        return ExitStatus.INTERRUPTED
    if done["error"] is not None:
        raise CommandFailed(f"{args.model} was not fetched: {done['error']['message']}")
    if done["status"] == "cancelled":
        raise CommandFailed(f"{args.model} was not fetched: the download was cancelled")
    if args.json:
        screen.say_json(done)
    else:
        screen.say(done["destination"])
    return ExitStatus.OK


COMMAND = Subcommand(
    "pull", "Fetch a model from the hub: resumed after an interrupt, checked by its hash.", _add_options, _run
)


# --- by a gateway, or without one -------------------------------------------------------------------------------------


def _by_gateway(client: Client, order: Mapping[str, Any], to: str | None, token: str | None = None) -> View | None:
    """The download when it is over; None if there is no gateway."""
    try:
        # Only what is said: this is the body that a token is signed for.
        body = {key: value for key, value in {**order, "destination": to}.items() if value}
        taken = client.post(DOWNLOADS, body, token=token)
    except NoGateway:
        return None
    path = f"{DOWNLOADS}/{quote(taken['job_id'], safe='')}"
    quiet_until: float | None = time.monotonic() + QUIET_S
    try:
        with _progress(order["model"]) as show:
            while True:
                seen: View = client.get(path)
                show(seen)
                if seen["status"] in OVER:
                    return seen
                if quiet_until is not None and (seen["files"] or time.monotonic() > quiet_until):
                    if not seen["files"]:
                        _say_asking(order["model"])
                    quiet_until = None
                time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        with contextlib.suppress(CommandFailed):
            client.delete(path)
        raise


async def _directly(order: Mapping[str, Any], to: str | None) -> View:
    """Fetch in a program of our own. The user may write wherever they may."""
    import asyncio

    from greenroom.features.library.downloads import LiveDownload
    from greenroom.library.download_locks import disown
    from greenroom.library.fetcher import Done, Failed, Trouble, fetched_paths, start_fetch
    from greenroom.library.orders import OrderRules, read_order

    began = time.monotonic()
    # What is typed by hand needs no list of hosts.
    typed = urlsplit(order["model"]).netloc if "://" in order["model"] else ""
    asked = read_order(OrderRules.of((typed,) if typed else (), os.environ), **order)
    place = _place(to, is_file=asked.repo is None)
    live = LiveDownload("pull")
    live.place = place.path
    end: Done | Failed | None = None
    process = await start_fetch(asked, place, None)
    quiet = asyncio.get_running_loop().call_later(QUIET_S, _say_asking, asked.name)
    try:
        with _progress(asked.name) as show:
            async for report in process.reports():
                quiet.cancel()
                if isinstance(report, Trouble):
                    screen.note(f"{report.message} It is tried again in {screen.seconds(report.wait_s)}.")
                    continue
                live.hear(report)
                if isinstance(report, Done | Failed):
                    end = report
                    break
                show(live_view(live))
            if isinstance(end, Done):
                show(live_view(live, is_done=True))
    finally:
        quiet.cancel()
        printed = await process.close()
    if end is None:
        raise CommandFailed("the program that fetches ended without a word; the same command goes on", printed or None)
    if isinstance(end, Done):
        disown(fetched_paths(live.plan, end))
    error = {"code": end.code, "message": end.message} if isinstance(end, Failed) else None
    told = live_view(live, is_done=error is None)
    return {**told, "model": asked.name, "error": error, "duration_seconds": round(time.monotonic() - began, 3)}


def _say_asking(name: str) -> None:
    hub = os.environ.get("HF_ENDPOINT") or "the hub"
    screen.note(f"asking {hub} for {name}; it has not answered yet")


def _place(to: str | None, *, is_file: bool) -> FetchPlace:
    from greenroom.config import environment, loader
    from greenroom.config.hub import hub_folder
    from greenroom.library.orders import FetchPlace

    if to is not None or is_file:
        return FetchPlace(folder=os.path.abspath(os.path.expanduser(to or ".")))
    # The roots of the configuration that a gateway would be started with here, and of the environment.
    roots = loader.load(loader.find_any(None)).config.roots
    named = (environment.hub_cache(os.environ), *roots)
    usual = os.path.dirname(hub_folder("any", os.environ))
    return FetchPlace(cache=next((folder for folder in named if folder), usual))


def live_view(live: Any, *, is_done: bool = False) -> View:
    """A download of our own in the shape in which a gateway tells of its own."""
    import msgspec

    facts = live.facts_when_done() if is_done else live.facts()
    return {
        **msgspec.to_builtins(facts),
        "status": "completed" if is_done else "downloading",
        "progress": 1.0 if is_done else facts.progress,
        "eta": facts.eta_s,
        "error": None,
    }


# --- how it looks -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(name: str) -> Iterator[PlainProgress | DrawnProgress]:
    if not sys.stderr.isatty():
        yield PlainProgress(name)
        return
    with DrawnProgress(name) as drawn:
        yield drawn


class PlainProgress:
    """A line when the download is planned, when a file is there, and for each tenth of the whole."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_planned = False
        self._is_waiting = False
        self._there: set[str] = set()
        self._part = 0

    def __call__(self, view: View) -> None:
        files = view["files"]
        if files and not self._is_planned:
            self._is_planned = True
            count = f"{view['files_total']} file{'s' if view['files_total'] != 1 else ''}"
            screen.note(f"fetching {self._name}: {count}, {size(view['total_bytes'])}")
        if view["waiting"] and not self._is_waiting:
            screen.note("another process fetches the same files; waiting for it")
        self._is_waiting = view["waiting"]
        for file in files:
            if file["path"] not in self._there and file["total_bytes"] and file["bytes"] >= file["total_bytes"]:
                self._there.add(file["path"])
                screen.note(f"{file['path']}: {size(file['total_bytes'])}")
        part = int((view["progress"] or 0.0) * PARTS)
        if part > self._part and view["status"] == "downloading":
            screen.note(f"{view['progress']:.0%} of {size(view['total_bytes'])}{_left(view)}")
        self._part = max(self._part, part)


class DrawnProgress:
    """Bars on standard error: one in total, and one for each file that is under way."""

    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
        self._name = name
        self._total = self._bars.add_task(screen.harmless(name), total=None)
        self._files: dict[str, TaskID] = {}

    def __enter__(self) -> DrawnProgress:
        self._bars.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._bars.stop()

    def __call__(self, view: View) -> None:
        what = "waiting for another process" if view["waiting"] else self._name + _left(view)
        self._bars.update(
            self._total, description=screen.harmless(what), total=view["total_bytes"], completed=view["bytes"]
        )
        running = [file for file in view["files"] if 0 < file["bytes"] < (file["total_bytes"] or float("inf"))]
        shown = {file["path"]: file for file in running[:BARS_MAX]}
        for path in set(self._files) - set(shown):
            self._bars.remove_task(self._files.pop(path))
        for path, file in shown.items():
            if path not in self._files:
                self._files[path] = self._bars.add_task(screen.harmless(f"  {path}"), total=file["total_bytes"])
            self._bars.update(self._files[path], completed=file["bytes"])


def _left(view: View) -> str:
    return "" if view["eta"] is None else f", {screen.seconds(view['eta'])} left"


def size(count: int | None) -> str:
    """`900 B`, `1.5 MB`, `42 GB`."""
    if count is None:
        return "size not known"
    number, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 999.5:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} {unit}" if unit == "B" or number >= 9.95 else f"{number:.1f} {unit}"
