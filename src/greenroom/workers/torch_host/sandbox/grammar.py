"""Constrains an answer to a JSON schema: which tokens may come next, by the llguidance library.

Owns how a schema becomes a constraint. The library is optional: without it, requests that need it are refused and all
others served. Building takes a second for each tokenizer, once, and milliseconds to seconds for each schema, in threads
of its own; the last few are kept and copied. A new schema is first tried in a sandbox (`schema_trials.py`).
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

from ...serving.errors import ApiError, unavailable, unsupported
from ..text.tokens import TextCodec
from .schema_job import COMPILE_STACK_BYTES
from .schema_trials import SchemaChecker, SchemaTrials

if TYPE_CHECKING:
    import torch

SCHEMA_BYTES_MAX = 256 * 1024
# One space after commas and colons, as models write. Free whitespace lets a small model write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Twice what a trial has: a schema that passed there cannot overrun the stack here.
STACK_BYTES: Final = 2 * COMPILE_STACK_BYTES
# Two, so that a schema that takes seconds does not delay quick ones.
COMPILING_THREADS: Final = 2
# A caller that leaves does not end a compilation. With this many under way, more requests are refused.
COMPILING_MAX: Final = 64
# Compiled schemas that are kept. Most take less than a MiB, the heaviest that pass their trial some dozens.
COMPILED_MAX: Final = 16
_stacks = threading.Lock()
_Made = TypeVar("_Made")


class _Unfit(Exception):
    """The library refuses a schema. The text says why."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher that is never stepped, only copied for each answer, which takes no time."""

    matcher: Any
    mask_bytes: int


class JsonConstraint:
    """A `Constraint`: the library's matcher for one sequence."""

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
        # A model's head is often padded beyond its tokenizer; the padding is never allowed.
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
        """Why the library gave up in the middle of an answer; None if it did not."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else None

    def again(self) -> JsonConstraint:
        """A copy for another sequence. To be called before the first token."""
        return JsonConstraint(self._matcher.deep_copy(), self._mask_bytes, self.param)


class Grammars:
    """Constraints for one model's tokenizer. To be used on one loop, and closed after."""

    def __init__(
        self,
        text: TextCodec,
        trials: SchemaTrials,
        *,
        compiling_max: int = COMPILING_MAX,
        compiled_max: int = COMPILED_MAX,
    ) -> None:
        self._compiling_max = compiling_max
        self._compiled_max = compiled_max
        self._text = text
        self._tokens: Any = None
        self._building = threading.Lock()
        self._trials = SchemaChecker(trials)
        self._threads = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="compile")
        self._has_library = False
        self._compiling: dict[bytes, asyncio.Future[_Compiled]] = {}
        self._kept: OrderedDict[bytes, _Compiled] = OrderedDict()

    async def constraint(self, schema: Mapping[str, Any], strict: bool, param: str) -> JsonConstraint:
        """A constraint to this schema. Raises ApiError for one that is wrong, too complex or not supported. If not
        strict, keywords that cannot be enforced are ignored."""
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
            compiled = await self._compiled(key, written, overrides, param)
        else:
            self._kept.move_to_end(key)
        return JsonConstraint(compiled.matcher.deep_copy(), compiled.mask_bytes, param)

    def close(self) -> None:
        """End its threads and drop what was compiled. To be called after the last request."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._kept.clear()

    async def _require_library(self, param: str) -> None:
        if not self._has_library:
            await self._in_deep_thread(lambda: _import_library(param))
            self._has_library = True

    async def _compiled(self, key: bytes, schema: str, overrides: Mapping[str, Any], param: str) -> _Compiled:
        """The result of compiling this schema. Callers that ask for it meanwhile share one compilation."""
        making = self._compiling.get(key)
        if making is None:
            if len(self._compiling) >= self._compiling_max:
                raise unavailable(f"{param}: too many schemas are being compiled. Try again.")
            making = self._compiling[key] = self._in_deep_thread(lambda: self._compile(schema, overrides))
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
        if len(self._kept) > self._compiled_max:
            self._kept.popitem(last=False)

    def _in_deep_thread(self, work: Callable[[], _Made]) -> asyncio.Future[_Made]:
        """Run this in a thread with a large enough stack; the default depends on the system."""
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
        """The tokenizer in the library's form. The first caller builds it while others wait."""
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
