"""The worker program: listens for its gateway, imports what takes long, then serves until the gateway hangs up.

Owns the start and the end of the process, and which thread does what: the main thread runs the loop of all HTTP
sockets, another the control line, one more each slot. Exit codes: 0 the gateway hung up, 1 it was stuck, 2 an option
was not understood, 3 a package is missing, 70 the device was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from .control.line import ControlLine, bound, listen

NOT_INSTALLED: Final = 3
# Threads that compute hand the interpreter over after this long: a wake must not wait for another model's steps.
SWITCH_INTERVAL_S: Final = 0.001
# Foreign code can keep the interpreter to itself: one number raised to another may take hours. Where the loop does not
# turn for this long the process ends, and its models wake in another. Nothing honest takes a tenth of it.
STUCK_S: Final = 60.0
BEATS_A_TIMEOUT: Final = 10
# What nearly every model needs, imported before anyone waits for it.
FIRST_IMPORTS: Final = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
)

log = logging.getLogger("torch_host")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torch_worker", description="Host torch models for a Greenroom gateway.")
    parser.add_argument("--control", required=True, help="path of the Unix socket the gateway speaks to")
    asked = parser.parse_args(arguments)
    _settle()
    listener = listen(asked.control)
    try:
        for name in FIRST_IMPORTS:
            importlib.import_module(name)
        importlib.import_module(".control.slots", __package__)
    except ImportError as reason:
        os.unlink(asked.control)
        if _is_ours(reason.name):
            raise
        log.error("%s is missing in %s: pip install torch transformers h11", reason.name or reason, sys.executable)
        return NOT_INSTALLED
    # Modules stay for good: looking through them again and again for garbage would only hold up those who compute.
    gc.collect()
    gc.freeze()
    asyncio.run(_serve(listener))
    # Threads may be deep in the device: they end with the process, and memory with them.
    with suppress(OSError):
        os.unlink(asked.control)
    logging.shutdown()
    os._exit(0)


def _is_ours(module: str | None) -> bool:
    """A module of this package: that it cannot be imported is our mistake, and nothing to be installed helps."""
    return f"{module}.".startswith(f"{__package__}.")


async def _serve(listener: socket.socket) -> None:
    """Run the loop of all sockets until the gateway has hung up."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    threading.Thread(target=_control, args=(listener, loop, ended), name="control", daemon=True).start()
    while not ended.is_set():
        # A thread of C waits for it, which needs no interpreter. It says on stderr where every thread stands.
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK_S / BEATS_A_TIMEOUT):
                await ended.wait()
    faulthandler.cancel_dump_traceback_later()


def _control(listener: socket.socket, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    from .control.hosted_slot import WorkerResources
    from .control.slots import SlotTable

    try:
        connection, _ = listener.accept()
        # There is one gateway. Whoever else comes is not heard.
        listener.close()
        bound(connection)
        resources = WorkerResources(loop, on_fatal=lambda error, say: slots.lost(error, say))
        slots = SlotTable(resources)
        ControlLine(connection, slots).serve()
        resources.run(resources.templates.close())
    finally:
        loop.call_soon_threadsafe(ended.set)


def _settle() -> None:
    """Plain lines to stderr, signals as they come by default, and no model fetched from anywhere."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    # Threads that wait for one another would else keep processors busy for it, and beside any other busy process wait
    # for each other's turn. Read when torch is imported; whoever knows better says so in the model's `env`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Whether there is a GPU is asked without touching CUDA: which ones it may see is only told with the first slot.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
