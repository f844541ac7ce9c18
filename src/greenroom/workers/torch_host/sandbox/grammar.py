"""Holds an answer to a JSON schema: which tokens may come next, by the llguidance library.

Owns how a schema becomes a constraint. The library is an engine package: where it is missing, requests that need it are
refused and all others served. Building takes a second once for each tokenizer and milliseconds to seconds for each
schema, in threads of its own; the last few are kept and copied. A schema that was not seen before is tried first where
it can do no harm (`schema_trials.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..api.errors import ApiError, unavailable, unsupported
from ..text.tokens import Text
from .schema_job import COMPILE_STACK_BYTES
from .schema_trials import SchemaChecker, SchemaTrials

if TYPE_CHECKING:
    import torch

SCHEMA_BYTES_MAX = 256 * 1024
# One space after commas and colons, as models write. Free whitespace lets a small model write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Twice what a trial has: what passed there cannot fall here.
STACK_BYTES: Final = 2 * COMPILE_STACK_BYTES
# Two, so that a schema that takes seconds does not hold up those that take none.
COMPILING_THREADS: Final = 2
# Who leaves does not end a compilation. Whoever comes when so many are waiting is refused.
COMPILING_MAX: Final = 64
# Compiled ones that are kept. Most take less than a MiB, the heaviest that pass their trial some dozens.
COMPILED_MAX: Final = 16
_stacks = threading.Lock()
_Made = TypeVar("_Made")


class _Unfit(Exception):
    """The library refuses a schema. The text says why."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher that nobody steps: it is copied for each answer, which takes no time."""

    matcher: Any
    mask_bytes: int


class JsonConstraint:
    """An `asks.Constraint`: a library's matcher for one sequence."""

    def __init__(self, matcher: Any, mask_bytes: int, param: str) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self.param = param
        """The field of the request that has the schema."""

    def fill(self, row: torch.Tensor) -> None:
        size = row.numel() * row.element_size()
        if size == self._mask_bytes:
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), size)
            return
        # A model's head is often wider than its tokenizer, for speed; what is beyond may never come.
        mask = self._matcher.compute_bitmask()
        row.zero_()
        ctypes.memmove(row.data_ptr(), mask, min(size, len(mask)))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def is_done(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def problem(self) -> str | None:
        """Why the library gave up in the middle of an answer, if it did."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else None

    def again(self) -> JsonConstraint:
        """The same for another sequence, from the start. To be asked before the first token."""
        return JsonConstraint(self._matcher.deep_copy(), self._mask_bytes, self.param)


class Grammars:
    """Constraints for one model's tokenizer. To be used on one loop, and closed."""

    def __init__(self, text: Text, trials: SchemaTrials) -> None:
        self._text = text
        self._tokens: Any = None
        self._building = threading.Lock()
        self._trials = SchemaChecker(trials)
        self._threads = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="compile")
        self._has_library = False
        self._compiling: dict[bytes, asyncio.Future[_Compiled]] = {}
        self._kept: OrderedDict[bytes, _Compiled] = OrderedDict()

    async def constraint(self, schema: Mapping[str, Any], strict: bool, param: str) -> JsonConstraint:
        """Hold an answer to this schema. Raises Refused for one that is wrong, too complex or not supported.

        Not strict: keywords that cannot be held to are passed over.
        """
        written = json.dumps(schema)
        if len(written) > SCHEMA_BYTES_MAX:
            raise ApiError(f"{param}: a schema may have at most {SCHEMA_BYTES_MAX} bytes.", param=param)
        overrides = {**_LAYOUT, "lenient": not strict}
        order = json.dumps({"schema": written, "overrides": overrides}).encode()
        key = hashlib.sha256(order).digest()
        compiled = self._kept.get(key)
        if compiled is None:
            await self._require_library(param)
            await self._trials.check(order, param)
            compiled = await self._compiled(key, lambda: self._compile(written, overrides), param)
        else:
            self._kept.move_to_end(key)
        return JsonConstraint(compiled.matcher.deep_copy(), compiled.mask_bytes, param)

    def close(self) -> None:
        """Let its threads go, and what was compiled. To be called when nobody asks any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()

    async def _require_library(self, param: str) -> None:
        if not self._has_library:
            await self._in_deep_thread(lambda: _import_library(param))
            self._has_library = True

    async def _compiled(self, key: bytes, compile: Callable[[], _Compiled], param: str) -> _Compiled:
        """What comes of the one compilation of this schema, which all wait for who ask for it meanwhile."""
        making = self._compiling.get(key)
        if making is None:
            if len(self._compiling) >= COMPILING_MAX:
                raise unavailable(f"{param}: too many schemas are being compiled. Try again.")
            making = self._compiling[key] = self._in_deep_thread(compile)
            making.add_done_callback(lambda made: self._keep(key, made))
        try:
            return await asyncio.shield(making)
        except _Unfit as error:
            raise ApiError(f"{param}: this schema cannot be held to: {error}", param=param) from None

    def _keep(self, key: bytes, made: asyncio.Future[_Compiled]) -> None:
        del self._compiling[key]
        if made.cancelled() or made.exception() is not None:
            return
        self._kept[key] = made.result()
        if len(self._kept) > COMPILED_MAX:
            self._kept.popitem(last=False)

    def _in_deep_thread(self, work: Callable[[], _Made]) -> asyncio.Future[_Made]:
        """Do this in a thread that is known to have stack enough; others have what the system gives them."""
        with _stacks:
            before = threading.stack_size(STACK_BYTES)
            try:
                # If this needs another thread, it is started here.
                return asyncio.wrap_future(self._threads.submit(work))
            finally:
                threading.stack_size(before)

    def _compile(self, schema: str, overrides: Mapping[str, Any]) -> _Compiled:
        import llguidance

        tokens = self._library_tokens()
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        except ValueError as error:
            raise _Unfit(str(error)) from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _Unfit(str(matcher.get_error()).partition("\n")[0])
        return _Compiled(matcher, (tokens.vocab_size + 31) // 32 * 4)

    def _library_tokens(self) -> Any:
        """The tokenizer as the library wants it; built by the first who needs it while others wait."""
        import llguidance.hf

        with self._building:
            if self._tokens is None:
                try:
                    ends = sorted(self._text.stop_tokens)
                    self._tokens = llguidance.hf.from_tokenizer(self._text.tokenizer, eos_token=ends or None)
                except ValueError as error:
                    raise unsupported(f"This model's tokenizer cannot be constrained: {error}") from None
            return self._tokens


def _import_library(param: str) -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise unsupported(
            f"{param} needs the package llguidance, which this engine's Python does not have. "
            "Type: python -m pip install llguidance",
            param,
        ) from None
