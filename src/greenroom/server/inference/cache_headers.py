"""Whose prefix cache a request uses, as an engine that keeps one is told: `X-Tenant-ID`, `X-Cache-Tag`, `X-Cache-Mode`.

Owns the rules for these words. The tenant is the one the request is counted for, never what a caller with a key says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from greenroom.core.model import TenantId
from greenroom.errors import BadRequest
from greenroom.http.head import Headers

TAG_CHARS_MAX: Final = 64
# Everything printable but the space, which may be lost at the ends, and the mark that stands for what is written so.
_PLAIN: Final = "".join(chr(code) for code in range(0x21, 0x7F) if code != ord("%"))
_TAG: Final = re.compile(rb"[!-~]([ -~]*[!-~])?")
_MODES: Final = frozenset((b"prefix", b"none", b"auto"))


def cache_headers(is_kept: bool, tenant: TenantId, said: Mapping[bytes, bytes]) -> Headers | None:
    """What goes to an engine that keeps such a cache (`is_kept`); None for others. Raises BadRequest, for all alike."""
    tag, mode = said.get(b"x-cache-tag"), said.get(b"x-cache-mode")
    if tag:
        check_tag(tag, "X-Cache-Tag")
    if mode is not None and mode.lower() not in _MODES:
        raise BadRequest("X-Cache-Mode is prefix, none or auto.", param="X-Cache-Mode")
    if not is_kept:
        return None
    headers: Headers = [(b"x-tenant-id", tenant_word(tenant).encode())] if tenant else []
    if tag:
        headers.append((b"x-cache-tag", tag))
    if mode is not None:
        headers.append((b"x-cache-mode", mode.lower()))
    return headers


def tenant_word(tenant: str) -> str:
    """A tenant as a header can carry it: other characters than those of a plain word are percent-encoded."""
    return quote(tenant, safe=_PLAIN)


def check_tag(tag: bytes, param: str) -> None:
    """Raises BadRequest for what cannot be a tag."""
    if len(tag) > TAG_CHARS_MAX or _TAG.fullmatch(tag) is None:
        raise BadRequest(f"{param} has 1 to {TAG_CHARS_MAX} printable ASCII characters.", param=param)
