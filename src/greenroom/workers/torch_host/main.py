"""The worker program: listens for its gateway, imports the heavy packages, then serves until the gateway hangs up.

Owns the start and the end of the process, and which thread does what: the main thread runs the event loop of all HTTP
sockets, another the control line, and each slot has one more. Exit codes: 0 the gateway hung up, 1 the loop was stuck,
2 an option was not understood, 3 a package is missing, 70 the device was lost.
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
from typing import Any, Final

from .control.line import ControlLine, bound, listen

NOT_INSTALLED: Final = 3
# A computing thread yields the interpreter after this long: a wake must not wait for another model's steps.
SWITCH_INTERVAL_S: Final = 0.001
# Foreign code can hold the interpreter: raising one number to another may take hours. If the loop does not turn for
# this long, the process ends and its models wake in another. Nothing legitimate takes a tenth of it.
STUCK_S: Final = 60.0
BEATS_A_TIMEOUT: Final = 10
# For each program: the module that prepares its models, and what nearly every model needs, which is imported before the
# first slot opens.
PROGRAMS: Final = {
    "transformers": (
        ".control.preparing",
        (
            "torch",
            "transformers",
            "transformers.modeling_utils",
            "transformers.models.llama.modeling_llama",
        ),
    ),
    "diffusers": (".images.preparing", ("torch", "transformers", "diffusers.pipelines.auto_pipeline", "PIL.Image")),
}

log = logging.getLogger("torch_host")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="torch_host", description="Host torch models for a Greenroom gateway.")
    parser.add_argument("--control", required=True, help="path of the Unix socket the gateway speaks to")
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="transformers", help="what its models are")
    asked = parser.parse_args(arguments)
    preparing, first_imports = PROGRAMS[asked.program]
    _settle()
    listener = listen(asked.control)
    try:
        for name in first_imports:
            importlib.import_module(name)
        importlib.import_module(".control.slots", __package__)
        prepare = importlib.import_module(preparing, __package__).prepare
    except ImportError as reason:
        os.unlink(asked.control)
        if _is_ours(reason.name):
            raise
        packages = " ".join(dict.fromkeys(name.partition(".")[0] for name in (*first_imports, "h11")))
        log.error("%s is missing in %s: pip install %s", reason.name or reason, sys.executable, packages)
        return NOT_INSTALLED
    # Modules stay for good. Collecting garbage among them again and again would only delay computations.
    gc.collect()
    gc.freeze()
    asyncio.run(_serve(listener, prepare))
    # Threads may be inside the driver. They end with the process, and their memory with them.
    with suppress(OSError):
        os.unlink(asked.control)
    logging.shutdown()
    os._exit(0)


def _is_ours(module: str | None) -> bool:
    """True for a module of ours: if it cannot be imported, that is a bug, which no installation mends."""
    return f"{module}.".startswith(f"{str(__package__).partition('.')[0]}.")


async def _serve(listener: socket.socket, prepare: Any) -> None:
    """Run the event loop until the gateway has hung up."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    threading.Thread(target=_control, args=(listener, prepare, loop, ended), name="control", daemon=True).start()
    while not ended.is_set():
        # The timer is a C thread, which needs no interpreter. It prints the stack of every thread to stderr.
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(STUCK_S / BEATS_A_TIMEOUT):
                await ended.wait()
    faulthandler.cancel_dump_traceback_later()


def _control(listener: socket.socket, prepare: Any, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    from .control.resources import WorkerResources
    from .control.slots import SlotTable

    try:
        connection, _ = listener.accept()
        # There is one gateway. No other connection is accepted.
        listener.close()
        bound(connection)
        resources = WorkerResources(loop, on_fatal=lambda error, say: slots.lost(error, say), prepare=prepare)
        slots = SlotTable(resources)
        ControlLine(connection, slots).serve()
        resources.run(resources.templates.close())
    finally:
        loop.call_soon_threadsafe(ended.set)


def _settle() -> None:
    """Log plain lines to stderr, take signals as by default, and never download a model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    # By default, OpenMP threads that wait for each other spin. Beside any other busy process they then wait for each
    # other's time slice. Read when torch is imported; a model's `env` may say otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Look for GPUs without initialising CUDA: which ones this process may see comes with the first slot only.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
