"""Text to tokens and back, and which tokens end an answer.

Owns the tokenizer of one model. Long prompts are encoded in a thread, so that other streams go on meanwhile. Never
renders a chat: `templates.py` does, with the tokenizer kept here.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ...serving.errors import ApiError, too_long
from ..failures import BadModel

# Encoding this many characters takes about a millisecond; longer texts go to a thread.
INLINE_CHARS_MAX = 4_096
ENCODING_THREADS = 2
# Configuration files are small; a larger one is not read.
CONFIG_BYTES_MAX = 4 * 1024 * 1024


class TextCodec:
    def __init__(self, tokenizer: Any, folder: Path) -> None:
        """`tokenizer` is one of Transformers'."""
        self.tokenizer = tokenizer
        self.folder = folder
        # The file of a chat template that is used instead of the model's own.
        self.template_file: str | None = None
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Tokenizers of embedding models truncate and pad by default; here no text is cut silently.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.speller = Speller(tokenizer)
        self.special = self._special_tokens()
        self.stop_tokens = frozenset(_end_tokens(folder, tokenizer))
        self._threads = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="encode")
        self._token_chars_max = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: Path, trust_remote_code: bool = False, gguf_file: str | None = None) -> TextCodec:
        """Read the tokenizer of a model's folder, or of a GGUF file in it. Takes about a second; raises what
        Transformers raises."""
        from transformers import AutoTokenizer

        inside = {"gguf_file": gguf_file} if gguf_file else {}
        tokenizer = AutoTokenizer.from_pretrained(  # type: ignore[no-untyped-call, unused-ignore]
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True, **inside
        )
        return cls(tokenizer, folder)

    @property
    def size(self) -> int:
        return len(self.tokenizer)

    def chars_max(self, context: int) -> int:
        """A text with more characters does not fit, however it is encoded."""
        return context * self._token_chars_max

    def use_template(self, file: Path) -> None:
        """Chat by this template instead of the model's own. Raises BadModel if that is not possible."""
        if renders_itself(self.tokenizer):
            raise BadModel(f"{type(self.tokenizer).__name__} writes prompts itself: remove chat_template.")
        try:
            self.tokenizer.chat_template = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise BadModel(f"its chat_template {file} cannot be read ({error}).") from None
        self.template_file = file.name

    def prepare_to_embed(self, lowers_case: bool) -> None:
        """Encode texts as sentence-transformers does. Raises BadModel for a tokenizer with several token types."""
        if any(self.tokenizer("a").get("token_type_ids") or ()):
            raise BadModel(f"{type(self.tokenizer).__name__} gives tokens types, which embeddings cannot be made with.")
        if not lowers_case:
            return
        if self._backend is None:
            raise BadModel(f"{type(self.tokenizer).__name__} cannot be told to lower the case of texts.")
        from tokenizers.normalizers import Lowercase, Sequence

        own = self._backend.normalizer
        self._backend.normalizer = Sequence([Lowercase()] if own is None else [Lowercase(), own])

    async def encode(
        self, text: str, adds_special: bool, context: int, param: str, *, truncates: bool = False
    ) -> list[int]:
        """The tokens of this text, cut to `context` with `truncates`. Raises ApiError if it is so long that no encoding
        of it fits into `context`."""
        if len(text) > self.chars_max(context) and not truncates:
            raise too_long(f"{param} has {len(text):,} characters; at most {context:,} tokens fit. Send less.")
        encode = partial(self._encode_cut, text, context) if truncates else partial(self.tokens_of, text, adds_special)
        try:
            if len(text) <= INLINE_CHARS_MAX:
                return encode()
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        except (UnicodeError, TypeError, ValueError) as error:
            raise ApiError(f"{param} cannot be encoded: {error}.", param=param) from error

    def detokeniser(
        self, before: Sequence[int] = (), spoken: Collection[int] = (), marks: Mapping[int, str] | None = None
    ) -> Detokeniser:
        """Special tokens have no text, except those in `spoken` and in `marks`, which gives theirs."""
        return Detokeniser(self.decode, self.special.difference(spoken), before, marks)

    def tokens_of(self, text: str, adds_special: bool) -> list[int]:
        """The tokens of a text, in this thread, however long that takes."""
        if self._backend is not None:
            # A batch of one: batches are encoded without the GIL, so that the model's thread goes on.
            return list(self._backend.encode_batch([text], add_special_tokens=adds_special)[0].ids)
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=adds_special)]

    def decode(self, tokens: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=False))
        # A head may be wider than its tokenizer; its other tokens have no text.
        known = [token for token in tokens if token < self.size]
        return str(self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def specials_spelled(self, spellings: Collection[str]) -> frozenset[int]:
        """The special tokens with one of these spellings."""
        return frozenset(token for token in self.special if self.speller.spell(token)[0] in spellings)

    def close(self) -> None:
        """End its threads. To be called by its owner, after the last encoding."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode_cut(self, text: str, room: int) -> list[int]:
        """Encode with special tokens, which are not cut off."""
        if self._backend is None:
            return [int(token) for token in self.tokenizer.encode(text, truncation=True, max_length=room)]
        # The backend could truncate by itself, but that setting would apply to all concurrent calls.
        found = self._backend.encode_batch([text], add_special_tokens=False)[0]
        left = max(room - self._backend.num_special_tokens_to_add(False), 0)
        found.truncate(left, direction=self.tokenizer.truncation_side)
        return list(self._backend.post_process(found, None, True).ids)

    def _special_tokens(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def _end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Every end token that its files name: chat models often name a second one in generation_config.json only."""
    found = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        said = read_config(folder / name).get("eos_token_id")
        found += said if isinstance(said, list) else [said]
    return [token for token in found if isinstance(token, int) and not isinstance(token, bool)]


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder; empty if there is none."""
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            return {}
        said = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


# A character has at most four bytes. Tokens that never become one are released after this many.
HELD_TOKENS_MAX = 16
# Tokens before the first that are decoded with it, so that a continuation keeps its leading space.
BEFORE_TOKENS = 6
_BROKEN = "\ufffd"


class Detokeniser:
    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        unspoken: Collection[int],
        before: Sequence[int] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`unspoken` tokens have no text; `marks` gives some their text. `before` are the tokens that are continued."""
        self._decode = decode
        self._marks = marks or {}
        self._unspoken = unspoken
        self._said = [token for token in before[-BEFORE_TOKENS:] if token not in unspoken]
        self._held: list[int] = []

    def add(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        if token in self._marks:
            text = self.end() + self._marks[token]
            self._said = []
            return text
        if token in self._unspoken:
            return ""
        self._held.append(token)
        text = self._new_text()
        if text.endswith(_BROKEN) and len(self._held) < HELD_TOKENS_MAX:
            return ""
        return self._say(text)

    def end(self) -> str:
        """The text that was held back, with a replacement for an incomplete character."""
        return self._say(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._decode(self._said) if self._said else ""
        return self._decode(self._said + self._held)[len(before) :]

    def _say(self, text: str) -> str:
        # The last tokens are company enough for the next. A token without text is no company: it keeps the old.
        if text:
            self._said, self._held = self._held[-BEFORE_TOKENS:], []
        else:
            self._said, self._held = (self._said + self._held)[-BEFORE_TOKENS:], []
        return text


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Speller:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._size = len(tokenizer)
        self._added = set(getattr(tokenizer, "added_tokens_decoder", {}))
        decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._is_byte_level = "ByteLevel" in decoder
        # One entry for each token ever asked for, so at most the vocabulary.
        self._known: dict[int, tuple[str, bytes]] = {}

    def spell(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of this token; both empty for an unknown one."""
        known = self._known.get(token)
        if known is None:
            raw = self._bytes(token)
            known = self._known[token] = raw.decode(errors="replace"), raw
        return known

    def _bytes(self, token: int) -> bytes:
        # A head may be wider than its tokenizer.
        piece = self._tokenizer.convert_ids_to_tokens(token) if token < self._size else None
        if not isinstance(piece, str):
            return b""
        if token in self._added:
            return piece.encode()
        if self._is_byte_level:
            return b"".join(_BYTES.get(letter, letter.encode()) for letter in piece)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace(_SPACE, " ").encode()


def _byte_letters() -> dict[str, bytes]:
    """Byte-level tokenizers write each byte as a character: itself if printable, else one from 256 onwards."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): bytes([byte]) for byte in seen}
    hidden = [byte for byte in range(256) if byte not in seen]
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(hidden)}


_BYTES = _byte_letters()


def renders_itself(tokenizer: Any) -> bool:
    """True if it does not write prompts by a template, as those of Mistral."""
    from transformers import PreTrainedTokenizerBase

    method = getattr(tokenizer.apply_chat_template, "__func__", None)
    return method is not PreTrainedTokenizerBase.apply_chat_template
