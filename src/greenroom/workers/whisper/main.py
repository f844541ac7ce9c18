"""The process: reads its options, loads one model with faster-whisper and serves it on a Unix socket until it ends.

Owns the start and the exit codes: 1 the model cannot be loaded, 2 an option was not understood, 3 a package is missing.
The last line on stderr says why.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

LOAD_FAILED, NOT_INSTALLED = 1, 3
# Two hours of 16 kHz wav, and days of anything compressed. A body is held in memory while it is heard.
BODY_BYTES_MAX: Final = 256 * 1024 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="whisper", description="Serve one Whisper model of CTranslate2.")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to listen on")
    parser.add_argument("--model", required=True, help="folder with model.bin")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--compute-type", default="default")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--beam-size", type=int, default=5)
    asked = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # Never download anything, and never let waiting threads spin beside other processes.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import av  # noqa: F401
        import faster_whisper
        import h11  # noqa: F401
    except ImportError as reason:
        say(f"{reason.name or reason} is missing in {sys.executable}: pip install faster-whisper h11")
        return NOT_INSTALLED
    try:
        model = _loaded(faster_whisper, asked)
    except Exception as reason:
        # The library raises plain errors of many kinds, and all of them mean the same.
        say(f"cannot load {asked.model}: {reason}")
        return LOAD_FAILED
    asyncio.run(_serve(model, asked))
    return 0


def _loaded(faster_whisper: Any, asked: argparse.Namespace) -> Any:
    if not os.path.isfile(os.path.join(asked.model, "tokenizer.json")):
        raise ValueError("there is no tokenizer.json in the folder; copy it from the original model")
    return faster_whisper.WhisperModel(
        asked.model,
        device=asked.device,
        compute_type=asked.compute_type,
        cpu_threads=asked.threads,
        num_workers=asked.concurrency,
        local_files_only=True,
    )


async def _serve(model: Any, asked: argparse.Namespace) -> None:
    from ..serving.http import HttpServer
    from .api import AudioApi
    from .transcribing import Transcriber

    api = AudioApi(Transcriber(model, beam_size=asked.beam_size, at_once=asked.concurrency))
    server = HttpServer(api.handle, body_bytes_max=BODY_BYTES_MAX)
    await server.open(Path(asked.socket))
    say(f"serving {asked.model} on {model.model.device}, {model.model.compute_type}")
    await asyncio.Event().wait()


def say(message: str) -> None:
    sys.stderr.write(f"whisper: {message}\n")
    sys.stderr.flush()
