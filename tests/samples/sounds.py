"""Sounds, and the forms that carry them."""

from __future__ import annotations

import io
import random
import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOUNDARY = "b0undary"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def noise(seconds: float, *, rate: int = 16_000) -> bytes:
    """A wav file of noise, the same every time."""
    return _wav(random.Random(4).randbytes(2 * int(seconds * rate)), rate, width=2)


def silence(seconds: float, *, rate: int = 200) -> bytes:
    """A wav file in which nothing is heard, with one byte for each sample: small, however long it is."""
    return _wav(b"\x80" * int(seconds * rate), rate, width=1)


def _wav(samples: bytes, rate: int, width: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(width)
        written.setframerate(rate)
        written.writeframes(samples)
    return file.getvalue()


def form(fields: Sequence[tuple[str, str]], *files: bytes, kind: str = "audio/wav", name: str = "file") -> bytes:
    """The body of a form with these fields and files."""
    parts = [f'Content-Disposition: form-data; name="{key}"\r\n\r\n{value}'.encode() for key, value in fields]
    head = f'Content-Disposition: form-data; name="{name}"; filename="a.wav"\r\nContent-Type: {kind}\r\n\r\n'
    parts += [head.encode() + file for file in files]
    delimiter = f"--{BOUNDARY}\r\n".encode()
    return b"".join(delimiter + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


def heard(path: Path, **keys: Any) -> dict[str, Any]:
    """A model on faster-whisper, in the Python that runs the tests. One beam and one thread are quick."""
    common = {"engine": "whisper", "python": sys.executable, "threads": 1, "beam_size": 1}
    return {"path": str(path), **common, "memory_mib": 100, **keys}
