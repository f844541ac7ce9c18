"""`greenroom replicas`: several gateways with one configuration on this machine, each a supervised process.

Owns what is different for each of them (port, state directory, metrics port), and the lease store by which they share
GPUs. `serve` runs each one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from greenroom.cli import failures, screen
from greenroom.cli.commands import Subcommand, serve
from greenroom.cli.failures import CommandFailed, ExitStatus

if TYPE_CHECKING:
    from greenroom.config.schema import Config
    from greenroom.process.supervisor import Program, Supervisor

COUNT_MAX: Final = 64
FIRST_PORT: Final = 8001
STORE_SOCKET: Final = "leases.sock"
STORE_STOP_S: Final = 10.0


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("count", type=_count, help="how many")
    parser.add_argument(
        "--first-port",
        type=serve.port,
        default=FIRST_PORT,
        help=f"of the first; the others follow (default: {FIRST_PORT})",
    )
    serve.add_options(parser, has_port=False)
    parser.set_defaults(port=None)


def _run(args: argparse.Namespace) -> int:
    import asyncio

    with failures.end_at_once():
        config = serve.plan(args).config
        _refuse_shared_files(config)
        if args.first_port + args.count - 1 > 65_535 or args.first_port == 0:
            raise CommandFailed(f"there are no {args.count} ports from {args.first_port} on")
        folder = os.path.abspath(os.path.expanduser(args.state_dir or f"{config.state_dir}-replicas"))
        return asyncio.run(_supervise(args, config, folder))


COMMAND = Subcommand(
    "replicas",
    "Serve the same models by several gateways on this machine, until Ctrl-C or SIGTERM.",
    _add_options,
    _run,
)


async def _supervise(args: argparse.Namespace, config: Config, folder: str) -> int:
    import asyncio
    import signal

    from greenroom.process.supervisor import NotStarted, Supervisor
    from greenroom.runtime.timeouts import STOP_MAX_S

    store = None if await _needs_no_store(config) else os.path.join(folder, STORE_SOCKET)
    replicas = [_replica(args, config, folder, store, number) for number in range(args.count)]
    supervisor = Supervisor(replicas, config.server.drain_s + STOP_MAX_S, screen.note)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.end)
    loop.add_signal_handler(signal.SIGHUP, supervisor.signal, signal.SIGHUP)
    try:
        async with contextlib.nullcontext() if store is None else _lease_store(store, supervisor):
            await supervisor.run()
    except NotStarted as error:
        raise CommandFailed(f"{error}; all replicas were ended") from None
    return ExitStatus.OK


def _replica(args: argparse.Namespace, config: Config, folder: str, store: str | None, number: int) -> Program:
    from greenroom.process.supervisor import Program

    name = f"replica-{number + 1}"
    options = _passed_on(args) + ([] if store is None else ["--lease-store", f"unix://{store}"])
    options += ["--port", str(args.first_port + number), "--state-dir", os.path.join(folder, name)]
    return Program(name, (sys.executable, "-P", "-m", "greenroom", "serve", *options), _environment(config, number))


def _passed_on(args: argparse.Namespace) -> list[str]:
    said = {"--config": args.config, "--host": args.host, "--log-level": args.log_level}
    said |= {"--lease-store": args.lease_store}
    words = [word for name, value in said.items() if value is not None for word in (name, value)]
    words += [word for folder in args.models for word in ("--models", folder)]
    return words + (["--insecure"] if args.insecure else [])


def _environment(config: Config, number: int) -> dict[str, str]:
    metrics_port = config.server.metrics_port
    return {**os.environ} | ({"METRICS_PORT": str(metrics_port + number)} if metrics_port else {})


def _refuse_shared_files(config: Config) -> None:
    """Raises CommandFailed if the configuration names a file that all of them would write."""
    files = {
        "server.record_activity": config.server.record_activity,
        "server.record_events": config.server.record_events,
        "governance.audit_path": config.governance.audit_path,
    }
    if named := [key for key, path in files.items() if path is not None]:
        raise CommandFailed(f"{', '.join(named)}: replicas cannot write one file together; leave it out")


# --- GPUs that they share -------------------------------------------------------------------------------------------


async def _needs_no_store(config: Config) -> bool:
    """True if no GPU is shared, or the configuration has a lease store. Simulated GPUs are each gateway's own."""
    from greenroom.runtime.memory.probes import first_look

    if config.leases.store is not None or config.gpus:
        return True
    probe, seen = await first_look(config)
    probe.close()
    return not seen.gpus


@contextlib.asynccontextmanager
async def _lease_store(socket: str, replicas: Supervisor) -> AsyncIterator[None]:
    """A Redis of their own, which keeps nothing on disk and outlives them. Raises CommandFailed if there is none, and
    NotStarted."""
    import asyncio
    from importlib.util import find_spec

    from greenroom.process.state_dir import UNIX_PATH_BYTES_MAX
    from greenroom.process.supervisor import Program, Supervisor

    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None or find_spec("redis") is None:
        raise CommandFailed(
            "the replicas share GPUs, so each must know what the others use: install redis-server and "
            "greenroom[redis], or name a lease store in the configuration (leases.store)"
        )
    if len(os.fsencode(socket)) > UNIX_PATH_BYTES_MAX:
        raise CommandFailed(f"{socket} is too long for a Unix socket; choose a shorter --state-dir")
    os.makedirs(os.path.dirname(socket), mode=0o700, exist_ok=True)
    private = ("--port", "0", "--unixsocket", socket, "--unixsocketperm", "700", "--save", "", "--appendonly", "no")
    supervisor = Supervisor([Program("lease-store", (server, *private), os.environ)], STORE_STOP_S, screen.note)
    running = asyncio.create_task(supervisor.run())
    # Replicas that wait for a store that cannot start are of no use.
    running.add_done_callback(lambda _: replicas.end())
    try:
        yield
    finally:
        supervisor.end()
        await running


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= COUNT_MAX):
        raise argparse.ArgumentTypeError(f"{text} is no number of replicas: 1 to {COUNT_MAX}")
    return int(text)
