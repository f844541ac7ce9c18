"""The scribe: a small program that runs chat templates for a worker, in a process that can be ended and may be small.

Owns the world a template sees, which is the one Transformers 5 gives it, and the bounds of this process. Never imports
torch, Transformers or anything of ours, so that it starts in a tenth of a second. `scribes.py` is the side that asks.

    python -I -S template_program.py WORKER_PID FOLDER…   (stdin is a socket, both ways; FOLDERs hold Jinja)

One letter says that it is ready. Then orders come and are answered, one after the other: an order is 8 bytes of length
and JSON, an answer is a word, 8 bytes of length and bytes. The words: `text` and the prompt, `fail` and what the
template complained about, `long` and how many characters it would have been, `full` if memory ran out.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, BinaryIO, Final

if __name__ == "__main__":
    sys.path += sys.argv[2:]

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# What a template may take beyond what this process needs by itself: far more than any conversation, and no danger.
MEMORY_BYTES: Final = 2**30
# A process that has grown by this much without need ends after its answer, and another begins small.
KEPT_BYTES: Final = 2**26
# Programs that are kept ready. A worker seldom hosts more models that chat, and one more costs some milliseconds.
COMPILED_MAX: Final = 16
# What a template says about itself when it refuses is told, but not a whole conversation.
COMPLAINT_CHARS_MAX: Final = 500
# The kernel ends this process before any other when memory runs out.
FIRST_TO_GO: Final = "1000"
PR_SET_PDEATHSIG: Final = 1

ORDER_HEAD: Final = struct.Struct("!Q")
ANSWER_HEAD: Final = struct.Struct("!4sQ")
READY: Final = b"r"

Order = Mapping[str, Any]


# --- what a template sees -------------------------------------------------------------------------------------------


def render(order: Order) -> str:
    """The prompt of this order. Raises whatever its template does."""
    given = {
        **order["names"],
        "messages": [thoughtful(message) for message in order["messages"]],
        "tools": order["tools"],
        "documents": None,
        "add_generation_prompt": True,
    }
    return str(compiled(order["template"]).render(given))


def thoughtful(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning goes by three names. Whichever a message has, templates find it by the two that they read."""
    names = ("reasoning_content", "thinking", "reasoning")
    thought = next((message[name] for name in names if message.get(name) is not None), None)
    if thought is None:
        return message
    # The order of the keys shows where a template writes a message as JSON.
    return {"thinking": thought, **message, "reasoning_content": thought}


@functools.lru_cache(COMPILED_MAX)
def compiled(source: str) -> Any:
    """Each program has a world of its own, so that none leaves anything behind for another."""
    world = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
    )
    world.filters["tojson"] = to_json
    world.globals.update(raise_exception=complain, strftime_now=now_as, dict=DictMaker(), namespace=PlainNamespace)
    return world.from_string(source)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what is special in HTML, and models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def complain(message: Any) -> None:
    raise TemplateError(message)


def now_as(format: str) -> str:
    return datetime.now().strftime(format)


class GenerationBlock(Extension):  # type: ignore[misc, unused-ignore]
    """`{% generation %}…{% endgeneration %}` marks for training what a model said. Here it is written like the rest."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call, because what is set within such a block is not seen after it.
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Callable[[], str]) -> str:
        return caller()


class DictMaker:
    """`dict` for templates: makes dictionaries, and has nothing else of the type."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class PlainNamespace(Namespace):  # type: ignore[misc, unused-ignore]
    """Keeps what a template sets, except under the names that Python itself looks for."""

    def __init__(*args: Any, **fields: Any) -> None:
        # Without a parameter called self, a field may have that name.
        own, *given = args
        kept = dict(*given, **fields)
        for name in kept:
            check_plain(name)
        Namespace.__init__(own, kept)

    def __setitem__(self, name: str, value: Any) -> None:
        check_plain(name)
        Namespace.__setitem__(self, name, value)


def check_plain(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace cannot keep {name[:40]!r}: names in it must not begin with an underscore.")


# --- orders and answers ---------------------------------------------------------------------------------------------


def answer(raw: bytes) -> tuple[bytes, bytes]:
    """The word and the bytes that answer this order, whatever its template does."""
    try:
        order = json.loads(raw)
        text = render(order)
        if len(text) > order["chars_max"]:
            return b"long", str(len(text)).encode()
        return b"text", text.encode()
    except MemoryError:
        return b"full", b""
    except Exception as error:
        return b"fail", str(error)[:COMPLAINT_CHARS_MAX].encode(errors="replace")


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer orders until the worker hangs up, or too much is left of one."""
    sink.write(READY)
    sink.flush()
    kept_max = own_bytes() + KEPT_BYTES
    while own_bytes() <= kept_max and len(head := source.read(ORDER_HEAD.size)) == ORDER_HEAD.size:
        word, content = answer(source.read(*ORDER_HEAD.unpack(head)))
        sink.write(ANSWER_HEAD.pack(word, len(content)))
        sink.write(content)
        sink.flush()


# --- the bounds of this process -------------------------------------------------------------------------------------


def end_with(worker: int) -> None:
    """Make the kernel end this process with the thread that started it, the worker's first: also in mid-render."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != worker:
        # It went before this was said.
        os._exit(1)


def stay_small() -> None:
    limit(resource.RLIMIT_AS, own_bytes() + MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(FIRST_TO_GO)


def own_bytes() -> int:
    """What RLIMIT_AS counts."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit(kind: int, most: int) -> None:
    """For good: what is lowered here nobody raises again."""
    _, hard = resource.getrlimit(kind)
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (least, least))


def main() -> None:
    end_with(worker=int(sys.argv[1]))
    stay_small()
    with open(0, "rb", closefd=False) as source, open(0, "wb", closefd=False) as sink:
        serve(source, sink)


if __name__ == "__main__":
    main()
