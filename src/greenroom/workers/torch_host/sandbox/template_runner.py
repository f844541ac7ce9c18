"""Runs one model's chat template in the sandbox processes of the worker.

Owns what a rendering order and its answer look like on this side, and which Jinja is used. `template_job.py` renders.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .pool import JobKind, SandboxError, SandboxPool, Unavailable

# Every character is at most so many bytes. Error messages are shorter than this.
CHAR_BYTES_MAX: Final = 4
COMPLAINT_BYTES_MAX: Final = 4_096
# The sandboxes of earlier versions have known holes.
JINJA_MIN: Final = (3, 1, 6)

Order = Mapping[str, Any]


class Complaint(SandboxError):
    """The template refused the conversation, or has a mistake."""


class RenderedTooLong(SandboxError):
    def __init__(self, chars: int) -> None:
        super().__init__(f"{chars:,} characters")
        self.chars = chars


class TemplateRunner:
    """One model's share of the processes for chat templates."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._turns = pool.model_turns()

    async def render(self, order: Order, chars_max: int, deadline_s: float) -> str:
        """The prompt of an order: `template`, `messages`, `tools`, and other `names` that the template sees.

        Raises SandboxError. The deadline counts from when a process begins; waiting for one is bounded too.
        """
        written = json.dumps({**order, "chars_max": chars_max}, ensure_ascii=False, separators=(",", ":"))
        raw = written.encode(errors="surrogatepass")
        bytes_max = CHAR_BYTES_MAX * chars_max + COMPLAINT_BYTES_MAX
        try:
            async with asyncio.timeout(self._pool.kind.wait_s) as waiting, self._turns, self._pool.place() as place:
                waiting.reschedule(None)
                word, content = await place.run(raw, bytes_max, deadline_s)
        except TimeoutError:
            raise Unavailable("Chat templates that take too long keep others waiting. Try again.") from None
        return _prompt(word, content)


def _prompt(word: bytes, content: bytes) -> str:
    if word == b"long":
        raise RenderedTooLong(int(content))
    text = content.decode(errors="replace")
    if word == b"fail":
        raise Complaint(text)
    return text


@functools.cache
def jinja_folders() -> tuple[str, ...]:
    """Where this Python keeps Jinja. Raises Unavailable if it has none, or one that is too old."""
    found = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    places = [str(Path(spec.origin).parent.parent) for spec in found if spec is not None and spec.origin]
    if len(places) < len(found) or _version("jinja2") < JINJA_MIN:
        wanted = ".".join(map(str, JINJA_MIN))
        raise Unavailable(f"Chat templates need Jinja: {sys.executable} -m pip install 'jinja2>={wanted}'.")
    return tuple(sorted(set(places)))


def _version(package: str) -> tuple[int, ...]:
    try:
        parts = importlib.metadata.version(package).split(".")[: len(JINJA_MIN)]
    except importlib.metadata.PackageNotFoundError:
        # It is installed without a record of its version.
        return ()
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


TEMPLATES: Final = JobKind(
    purpose="chat templates",
    module=Path(__file__).with_name("template_job.py"),
    folders=jinja_folders,
    # Far more than any conversation takes, and no danger to the machine.
    memory_bytes=2**30,
    processes_max=4,
    processes_a_model=2,
    # Six callers of a template that does not end, one after the other.
    wait_s=30.0,
    is_reused=True,
    kept_bytes=2**26,
)
