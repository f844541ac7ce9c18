"""Runs cases at the same time, each in a process of its own.

A case depends on nothing but its configuration, its workload and the seed, so its figures are the same however many run
at once. Processes are forked: they share the workload, which may be large, and policies of other packages.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

from greenroom.sim.cases import Case, CaseResult, OnProgress, play
from greenroom.sim.config import SimConfig
from greenroom.sim.workloads import Workload


class CaseFailed(RuntimeError):
    """A case could not be played. `why` is one line, such as what its policy raised; `details` is the traceback."""

    def __init__(self, case: Case, why: str, details: str | None = None) -> None:
        super().__init__(case, why, details)
        self.case = case
        self.why = why
        self.details = details


class CaseRuns:
    """Plays cases with the same callers, at most `jobs` at once. Its processes begin when it is entered, so that they
    are forked before the caller starts threads. They are gone when it is left, whatever happened. Each calls `on_fork`
    first, for what a process must do that may outlive its parent."""

    def __init__(
        self,
        compared: Sequence[Case],
        base: SimConfig,
        workload: Workload,
        seed: int,
        jobs: int | None = None,
        on_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self._compared = compared
        self._base = base
        self._workload = workload
        self._seed = seed
        self._jobs = min(jobs or len(os.sched_getaffinity(0)), len(compared))
        self._on_fork = on_fork
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> CaseRuns:
        if self._jobs > 1:
            try:
                self._fork_all()
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for pipe, process in self._workers.items():
            pipe.close()
            process.kill()
        for process in self._workers.values():
            process.join()

    def results(self, on_progress: Callable[[Case, float], None]) -> list[CaseResult]:
        """The results in the order of the cases. `on_progress` gets a case and the share of its time that has passed.
        Raises CaseFailed."""
        if not self._workers:
            return [self._result(case, partial(on_progress, case)) for case in self._compared]
        found: dict[int, CaseResult] = {}
        todo, playing = iter(range(len(self._compared))), dict[Connection, int]()
        for pipe in self._workers:
            _hand_out(pipe, todo, playing)
        while playing:
            ready = wait(list(playing))
            for pipe in [pipe for pipe in playing if pipe in ready]:
                number = playing[pipe]
                said = self._heard(pipe, self._compared[number])
                if isinstance(said, CaseResult):
                    found[number] = said
                    _hand_out(pipe, todo, playing)
                else:
                    on_progress(self._compared[number], said)
        return [found[number] for number in range(len(self._compared))]

    def _heard(self, pipe: Connection, case: Case) -> CaseResult | float:
        try:
            said: CaseResult | float | CaseFailed = pipe.recv()
        except (EOFError, OSError):
            process = self._workers[pipe]
            process.join()
            ended = f"its process was ended by signal {-(process.exitcode or 0)}; play fewer at once with --jobs"
            raise CaseFailed(case, ended) from None
        if isinstance(said, CaseFailed):
            raise said
        return said

    def _result(self, case: Case, on_progress: OnProgress) -> CaseResult:
        try:
            return play(case, self._base, self._workload, self._seed, on_progress)
        except Exception as error:
            raise CaseFailed(case, f"{type(error).__name__}: {error}", traceback.format_exc()) from error

    # --- in a process of its own --------------------------------------------------------------------------------------

    def _fork_all(self) -> None:
        # An interrupt in the middle of a fork would be lost: Python ignores exceptions in its hooks there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(self._jobs):
                self._fork()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._work, args=(theirs, [*self._workers, ours]), daemon=True)
        process.start()
        theirs.close()
        self._workers[ours] = process

    def _work(self, pipe: Connection, inherited: Sequence[Connection]) -> None:
        self._on_fork()
        # Ctrl-C reaches the whole group: the parent ends its children.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Otherwise a sibling would keep this pipe open when the parent dies.
        for other in inherited:
            other.close()
        try:
            while True:
                pipe.send(self._played(pipe.recv(), pipe))
        except (EOFError, OSError):
            # The parent has closed the pipe, or is gone.
            return

    def _played(self, number: int, pipe: Connection) -> CaseResult | CaseFailed:
        def tell(share: float) -> None:
            try:
                pipe.send(share)
            except OSError:
                # As in `_work`, but a policy may raise that, too.
                sys.exit()

        try:
            return self._result(self._compared[number], tell)
        except CaseFailed as failed:
            return failed


def _hand_out(pipe: Connection, todo: Iterator[int], playing: dict[Connection, int]) -> None:
    """Give the process its next case, if there is one."""
    playing.pop(pipe, None)
    number = next(todo, None)
    if number is not None:
        playing[pipe] = number
        pipe.send(number)
