"""A stand-in for the gateway: starts one engine, prints the pids as JSON, and stays until it is killed.

python gateway_program.py IDENTITY PROCESSES MODE…
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

# Run as a program: the folder that holds `tests` must be found.
sys.path.insert(0, str(Path(__file__).parents[2]))

from greenroom.process.logs import LogRing
from greenroom.process.spawn import spawn
from tests.process.trees import engine_command, keeper_of, pids_of


async def main() -> None:
    identity, processes, *mode = sys.argv[1:]
    child = await spawn(engine_command(*mode), identity=identity, log=LogRing())
    pids = await pids_of(child, int(processes))
    sys.stdout.write(json.dumps({"keeper": keeper_of(child), "tree": sorted(pids)}) + "\n")
    sys.stdout.flush()
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
