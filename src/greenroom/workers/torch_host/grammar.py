"""Holds an answer to a JSON schema: which tokens may come next, by the llguidance library.

Owns how a schema becomes a constraint. The library is an engine package: where it is missing, requests that need it are
refused and all others served. Building takes a second once for each tokenizer and milliseconds for each schema, in a
thread; one that was not seen before is tried first where it can do no harm (`schema_trials.py`).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from .refusals import Refused, unsupported
from .schema_trial import COMPILE_STACK_BYTES
from .schema_trials import SchemaTrials
from .text import Text

if TYPE_CHECKING:
    import torch

SCHEMA_BYTES_MAX = 256 * 1024
# One space after commas and colons, as models write. Free whitespace lets a small model write nothing else.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Twice what a trial has: what passed there cannot fall here.
STACK_BYTES: Final = 2 * COMPILE_STACK_BYTES
_stacks = threading.Lock()


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
    """Constraints for one model's tokenizer."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: Any = None
        self._building = threading.Lock()
        self._trials = SchemaTrials()

    async def constraint(self, schema: Mapping[str, Any], strict: bool, param: str) -> JsonConstraint:
        """Hold an answer to this schema. Raises Refused for one that is wrong, too complex or not supported.

        Not strict: keywords that cannot be held to are passed over.
        """
        written = json.dumps(schema)
        if len(written) > SCHEMA_BYTES_MAX:
            raise Refused(f"{param}: a schema may have at most {SCHEMA_BYTES_MAX} bytes.", param=param)
        await asyncio.to_thread(_require_library, param)
        overrides = {**_LAYOUT, "lenient": not strict}
        await self._trials.check(written, overrides, param)
        return await asyncio.to_thread(_in_deep_thread, lambda: self._built(written, overrides, param))

    def _built(self, schema: str, overrides: Mapping[str, Any], param: str) -> JsonConstraint:
        import llguidance

        tokens = self._library_tokens()
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=overrides)
        except ValueError as error:
            raise Refused(f"{param}: {error}", param=param) from None
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            why = str(matcher.get_error()).partition("\n")[0]
            raise Refused(f"{param}: this schema cannot be held to: {why}", param=param)
        return JsonConstraint(matcher, (tokens.vocab_size + 31) // 32 * 4, param)

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


def _require_library(param: str) -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise unsupported(
            f"{param} needs the package llguidance, which this engine's Python does not have. "
            "Type: python -m pip install llguidance",
            param,
        ) from None


def _in_deep_thread(work: Callable[[], JsonConstraint]) -> JsonConstraint:
    """Do this in a thread that is known to have stack enough; others have what the system gives them."""
    done: Future[JsonConstraint] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="compile", daemon=True)
    with _stacks:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()
