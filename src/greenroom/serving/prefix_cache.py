"""What an engine is told of whose prompt prefixes it keeps: by headers, or by a salt in the body.

Owns the checks of tag and mode, and the salts. A prefix is found only by requests of the same tenant and tag; nothing
that a caller sends can name the prefixes of another.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import msgspec

from greenroom.core.model import TenantId
from greenroom.errors import BadRequest, NotAllowed
from greenroom.http.headers import Headers
from greenroom.runtime.prompt_slots import Owner, PromptCacheSlots

TAG_CHARS_MAX: Final = 64
# Flushes that are kept apart.
FLUSHES_MAX: Final = 1_000
# All printable characters but the space, which may be stripped, and the percent sign, which escapes.
_PLAIN: Final = "".join(chr(code) for code in range(0x21, 0x7F) if code != ord("%"))
_TAG: Final = re.compile(rb"[!-~]([ -~]*[!-~])?")
_MODES: Final = frozenset((b"prefix", b"none", b"auto"))


@dataclass(slots=True, init=False)
class PrefixScope:
    """Whose prefixes a request may reuse, and may leave: those of its tenant and tag; none unless `is_used`."""

    tenant: str
    tag: str
    is_used: bool

    def __init__(self, tenant: str, tag: str, is_used: bool = True) -> None:
        self.tenant = tenant
        self.tag = tag
        self.is_used = is_used

    @property
    def owner(self) -> Owner:
        """For an engine whose slots are named."""
        return (self.tenant, self.tag) if self.is_used else None

    @property
    def headers(self) -> Headers:
        """For an engine that is told by headers."""
        headers: Headers = [(b"x-tenant-id", tenant_word(self.tenant).encode())] if self.tenant else []
        if self.tag:
            headers.append((b"x-cache-tag", self.tag.encode()))
        if not self.is_used:
            headers.append((b"x-cache-mode", b"none"))
        return headers


# Paths of llama.cpp to post to that take no prompt for a slot.
PROMPTLESS_PATHS: Final = ("/tokenize", "/detokenize", "/apply-template", "/lora-adapters", "/props")


def expect_sole(prompts: PromptCacheSlots, owner: Owner, model: str) -> None:
    """Raises NotAllowed where a prompt that is not pinned could meet those of others."""
    if not prompts.is_sole(owner):
        raise NotAllowed(
            f"{model} serves several tenants or tags, whose prompts are kept apart, and this path cannot be. "
            "Use /v1/…, or load the model anew."
        )


# Of a request that has no tenant and names neither tag nor mode.
ONLY_SCOPE: Final = PrefixScope("", "")


def cache_scope(tenant: TenantId, said: dict[bytes, bytes]) -> PrefixScope:
    """The scope that these headers name. Raises BadRequest, whatever the engine."""
    tag, mode = said.get(b"x-cache-tag"), said.get(b"x-cache-mode")
    if not tenant and not tag and mode is None:
        return ONLY_SCOPE
    if tag:
        check_tag(tag, "X-Cache-Tag")
    if mode is not None and mode.lower() not in _MODES:
        raise BadRequest("X-Cache-Mode is prefix, none or auto.", param="X-Cache-Mode")
    return PrefixScope(tenant, (tag or b"").decode(), mode is None or mode.lower() != b"none")


def tenant_word(tenant: str) -> str:
    """A tenant's name for a header: characters that a header cannot carry are percent-encoded."""
    return quote(tenant, safe=_PLAIN)


def check_tag(tag: bytes, param: str) -> None:
    """Raises BadRequest for what cannot be a tag."""
    if len(tag) > TAG_CHARS_MAX or _TAG.fullmatch(tag) is None:
        raise BadRequest(f"{param} has 1 to {TAG_CHARS_MAX} printable ASCII characters.", param=param)


class PrefixSalts:
    """Salts for engines that keep prefixes apart by a word in the body. Unlike a tenant's name, none can be guessed."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        # How often each was flushed: a model, tenant and tag, None for all of them.
        self._flushes: dict[tuple[str | None, str | None, str | None], int] = {}

    def flush(self, model: str | None, tenant: str | None, tag: str | None) -> None:
        """From now on no request finds what was left by these; None: by all. Engines drop it when they need room."""
        key = (model, tenant, tag)
        if len(self._flushes) >= FLUSHES_MAX and key not in self._flushes:
            self._make_room()
        self._flushes[key] = self._flushes.get(key, 0) + 1

    def _make_room(self) -> None:
        """Flush all of the tenant that has flushed most, so that it costs no other; all tenants if each did so once."""
        times = Counter(tenant for _, tenant, _ in self._flushes if tenant is not None)
        tenant, most = max(times.items(), key=lambda one: one[1], default=("", 0))
        if most < 2:
            self._secret, self._flushes = secrets.token_bytes(32), {}
            return
        whole = (None, tenant, None)
        count = self._flushes.get(whole, 0) + 1
        self._flushes = {key: number for key, number in self._flushes.items() if key[1] != tenant} | {whole: count}

    def _epochs(self, model: str, scope: PrefixScope) -> bytes:
        """Changes with every flush of this model, tenant or tag."""
        if not self._flushes:
            return b""
        keys = itertools.product((None, model), (None, scope.tenant), (None, scope.tag))
        counts = [self._flushes.get(key, 0) for key in keys]
        return b",".join(b"%d" % count for count in counts) if any(counts) else b""

    def of(self, scope: PrefixScope, own: msgspec.Raw | None = None, model: str = "") -> bytes:
        """The salt for this scope, as JSON. `own` is the caller's, which keeps prefixes further apart.

        A scope that is not used gets one for this request only, so that no other finds this prompt, nor it theirs.
        """
        if not scope.is_used:
            return msgspec.json.encode(secrets.token_hex())
        parts = [scope.tenant.encode(), scope.tag.encode(), self._epochs(model, scope)]
        parts += [] if own is None else [bytes(own)]
        # Lengths come first, so that no two lists are joined to the same bytes.
        text = b"".join(b"%d:%b" % (len(part), part) for part in parts)
        return msgspec.json.encode(hmac.new(self._secret, text, hashlib.sha256).hexdigest())
