"""Two gateways start on one state directory at the same moment, again and again. Prints one line of JSON a round.

    python state_dir_race.py CONFIG ROUNDS

Each contender is a fork of this process, so that reading the modules does not blur the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import uvloop

from greenroom.app import App
from greenroom.config import loader
from greenroom.config.schema import Config
from greenroom.errors import StateDirBusy


def main() -> None:
    config = loader.load(Path(sys.argv[1])).config
    for _ in range(int(sys.argv[2])):
        sys.stdout.write(json.dumps(race(config)) + "\n")


def race(config: Config) -> list[str]:
    """What each of the two says: `serving`, or why not. They leave when both have spoken."""
    go_read, go_write = os.pipe()
    end_read, end_write = os.pipe()
    contenders = [contender(config, go_read, go_write, end_read, end_write) for _ in range(2)]
    os.close(go_write)
    said = [os.read(report, 4096).decode() for _, report in contenders]
    os.close(end_write)
    for pid, report in contenders:
        os.waitpid(pid, 0)
        os.close(report)
    os.close(go_read)
    os.close(end_read)
    return said


def contender(config: Config, go_read: int, go_write: int, end_read: int, end_write: int) -> tuple[int, int]:
    report_read, report_write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(report_write)
        return pid, report_read
    status = 1
    try:
        os.close(go_write)
        os.close(end_write)
        # Both wake at the same end-of-file.
        os.read(go_read, 1)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(contend(config, report_write, end_read))
        status = 0
    finally:
        os._exit(status)


async def contend(config: Config, report: int, end: int) -> None:
    try:
        app = await App.start(config)
    except StateDirBusy as busy:
        os.write(report, busy.message.encode())
        return
    os.write(report, b"serving")
    await asyncio.to_thread(os.read, end, 1)
    app.shut_down()
    await app.closed.wait()


if __name__ == "__main__":
    main()
