"""The program that fetches one model: an order in, reports out.

    python launch.py fetching.main

Reads its order as a line of JSON from standard input, and reports as lines of JSON on standard output: `plan`,
`progress`, then `done` or `error`. Further lines of input change the rate. When its input ends, as it does with the
process that started it, this program ends at once: what it has fetched is resumed by the next one. HF_TOKEN and
HF_ENDPOINT come from its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from . import hub
from .disk import Disk, explained, try_lock
from .failures import FetchError
from .places import CachePlace, FetchTarget, FolderPlace
from .transfer import BACKOFF_S, FetchPatience, RateLimit, RemoteFile, Transfer
from .web import HubOrigin, Web

FILES_AT_ONCE: Final = 4
REPORT_EVERY_S: Final = 0.25
STALL_S: Final = 60.0
LOCK_POLL_S: Final = 0.2
# Of the order; a pipe carries more.
LINE_BYTES_MAX: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """`repo` or `url`; `cache` or `folder`."""

    repo: str | None = None
    revision: str | None = None
    url: str | None = None
    quantization: str | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    exact_name: bool = False
    cache: str | None = None
    folder: str | None = None
    root: str | None = None
    rate_bytes_s: float | None = None
    stall_s: float = STALL_S
    backoff_s: float = BACKOFF_S


class FetchStopped(Exception):
    """Another file of the download has failed."""


class Fetching(Transfer):
    """One download into a place. Files are fetched in several threads."""

    def __init__(self, web: Web, disk: Disk, rate: RateLimit, report: Reporter, patience: FetchPatience) -> None:
        super().__init__(web, disk, rate, patience)
        self._report = report
        self._stopped = threading.Event()

    def run(self, place: FetchTarget, files: Sequence[RemoteFile]) -> Path:
        """Returns the folder of the model, or its only file. Raises FetchError; then no file has its name."""
        with explained("Writing to the disk"):
            on_disk = place.prepare(files)
            with self._locked(place, None):
                missing = [file for file in files if not self._is_here(place, file)]
                self._expect_room_for(on_disk, place, missing)
                self._fetch_all(place, missing)
                return place.finish(files)

    def _is_here(self, place: FetchTarget, file: RemoteFile) -> bool:
        here = place.has(file)
        if here:
            self._report.tell_bytes(file, file.size or 0)
        return here

    def _expect_room_for(self, on_disk: Path, place: FetchTarget, missing: Sequence[RemoteFile]) -> None:
        """For all that is missing, before the first byte is asked for."""
        parts = (place.part(file) for file in missing)
        have = sum(part.stat().st_size for part in parts if part.exists())
        self._disk.expect_room(on_disk, max(0, sum(file.size or 0 for file in missing) - have))

    def _fetch_all(self, place: FetchTarget, files: Sequence[RemoteFile]) -> None:
        pool = ThreadPoolExecutor(FILES_AT_ONCE)
        try:
            futures = [pool.submit(self._fetch, place, file) for file in files]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            if failure := _failure(done):
                raise failure
        finally:
            # Files that wait for a server are not waited for.
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, place: FetchTarget, file: RemoteFile) -> None:
        with explained(f"Writing {file.path}"), self._locked(place, file):
            if not place.has(file):
                self.fetch(file, place.part(file))
                place.keep(file)
            self._report.tell_bytes(file, file.size)

    @contextlib.contextmanager
    def _locked(self, place: FetchTarget, file: RemoteFile | None) -> Iterator[None]:
        """Hold the lock of a file, or of the whole download. While another process holds it, tell what that has."""
        with contextlib.ExitStack() as held:
            if (path := place.lock_of(file)) is not None:
                while (lock := try_lock(path)) is None:
                    if file is not None:
                        part = place.part(file)
                        self._came(file, part.stat().st_size if part.exists() else 0)
                    self._report.tell_waiting(True)
                    time.sleep(LOCK_POLL_S)
                held.callback(os.close, lock)
            self._report.tell_waiting(False)
            yield

    def _came(self, file: RemoteFile, have: int) -> None:
        if self._stopped.is_set():
            raise FetchStopped
        self._report.tell_bytes(file, have)


def _failure(done: set[Future[None]]) -> BaseException | None:
    return next((error for future in done if (error := future.exception()) is not None), None)


# --- what to fetch --------------------------------------------------------------------------------------------------


def carry_out(order: FetchOrder, rate: RateLimit, report: Reporter) -> None:
    """Raises FetchError."""
    patience = FetchPatience(backoff_s=order.backoff_s, tell=report.tell_trouble)
    disk = Disk()
    if order.url is not None:
        place, files, token = _of_url(order.url, order, disk, report)
    else:
        place, files, token = _of_repository(order, disk, report, patience)
    web = Web(hub.endpoint(), token, order.stall_s, listed=order.url)
    report.tell_done(Fetching(web, disk, rate, report, patience).run(place, files))


def _of_url(
    url: str, order: FetchOrder, disk: Disk, report: Reporter
) -> tuple[FetchTarget, Sequence[RemoteFile], str | None]:
    """One file, without a token: it is of no repository."""
    name = unquote(urlsplit(url).path.rpartition("/")[2])
    if not hub.is_inside(name) or hub.is_hidden(name) or "/" in name:
        raise FetchError("bad_url", "The address does not end with the name of a file, which begins with no dot.")
    if HubOrigin.of(url).scheme != "https" and HubOrigin.of(hub.endpoint()).scheme != "http":
        raise FetchError("bad_url", "A file is fetched over https.")
    files = [RemoteFile(name, url)]
    report.tell_plan(None, None, files)
    return _folder(order, disk), files, None


def _of_repository(
    order: FetchOrder, disk: Disk, report: Reporter, patience: FetchPatience
) -> tuple[FetchTarget, Sequence[RemoteFile], str | None]:
    assert order.repo is not None, "an order names a repository or a URL"
    found = hub.look(order.repo, order.revision, order.stall_s, patience)
    if order.exact_name and found.new_name is not None:
        raise FetchError("repo_renamed", f"The hub has {order.repo} as {found.new_name!r:.200}: order it by that name.")
    files = hub.choose(found.files, order.quantization, order.include, order.exclude)
    report.tell_plan(found.id, found.commit, files)
    if order.folder is not None:
        return _folder(order, disk), files, hub.token()
    place = CachePlace(disk, Path(order.cache or ""), found.id, found.commit, order.revision)
    return place, files, hub.token()


def _folder(order: FetchOrder, disk: Disk) -> FolderPlace:
    return FolderPlace(disk, Path(order.folder or ""), None if order.root is None else Path(order.root))


# --- reports --------------------------------------------------------------------------------------------------------


class Reporter:
    """Lines on standard output; those about progress a few times a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed: dict[str, int] = {}
        self._is_waiting = False
        self._told_at = 0.0

    def tell_plan(self, repo: str | None, commit: str | None, files: Sequence[RemoteFile]) -> None:
        listed = [{"path": file.path, "bytes": file.size, "sha256": file.sha256} for file in files]
        self._say({"event": "plan", "repo": repo, "commit": commit, "files": listed})

    def tell_bytes(self, file: RemoteFile, have: int | None) -> None:
        with self._lock:
            if have is not None:
                self._changed[file.path] = have
        self._tell_progress()

    def tell_waiting(self, is_waiting: bool) -> None:
        """True: another process fetches what is wanted here."""
        with self._lock:
            self._is_waiting = is_waiting
        self._tell_progress()

    def _tell_progress(self, *, at_once: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            if not at_once and now - self._told_at < REPORT_EVERY_S:
                return
            self._told_at = now
            changed, self._changed = self._changed, {}
            is_waiting = self._is_waiting
        self._say({"event": "progress", "files": changed, "waiting": is_waiting})

    def tell_trouble(self, error: FetchError, wait_s: float) -> None:
        """It is tried again after so long."""
        self._say({"event": "trouble", "message": error.message, "wait_s": wait_s})

    def tell_done(self, path: Path) -> None:
        self._tell_progress(at_once=True)
        self._say({"event": "done", "path": str(path)})

    def tell_error(self, error: FetchError) -> None:
        self._tell_progress(at_once=True)
        self._say({"event": "error", "code": error.code, "message": error.message})

    def _say(self, line: dict[str, Any]) -> None:
        with self._lock:
            sys.stdout.buffer.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            sys.stdout.buffer.flush()


def main(argv: Sequence[str]) -> None:
    # The terminal's interrupt is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = FetchOrder(**json.loads(sys.stdin.buffer.readline(LINE_BYTES_MAX)))
    report, rate = Reporter(), RateLimit(order.rate_bytes_s)
    trust_bundle()
    threading.Thread(target=_heed, args=(rate,), daemon=True).start()
    try:
        carry_out(order, rate, report)
    except FetchError as error:
        report.tell_error(error)
    except Exception as bug:
        traceback.print_exc()
        report.tell_error(FetchError("fetch_bug", f"Something went wrong in the fetcher: {type(bug).__name__}."))
    # Threads that still wait for a server would be waited for.
    os._exit(0)


def trust_bundle() -> None:
    """The variable of many tools that are no OpenSSL; huggingface_hub and our own context read SSL_CERT_FILE."""
    bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if bundle and not os.environ.get("SSL_CERT_FILE"):
        os.environ["SSL_CERT_FILE"] = bundle


def _heed(rate: RateLimit) -> None:
    """Each further line is the new rate in bytes per second, or `null`."""
    for line in sys.stdin.buffer:
        rate.set(json.loads(line))
    os._exit(1)
