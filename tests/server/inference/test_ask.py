"""What engines that keep a prefix cache are told of whose it is."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from greenroom.core.model import TenantId
from greenroom.errors import BadRequest
from greenroom.server.inference.ask import TAG_CHARS_MAX, cache_headers, tenant_word

LAB = TenantId("lab")


def test_tenant_tag_and_mode_are_told() -> None:
    said = {b"x-cache-tag": b"session 1", b"x-cache-mode": b"Prefix", b"x-tenant-id": b"somebody else"}
    assert cache_headers(True, LAB, said) == [
        (b"x-tenant-id", b"lab"),
        (b"x-cache-tag", b"session 1"),
        (b"x-cache-mode", b"prefix"),
    ]


def test_without_a_tenant_nothing_is_told_of_one() -> None:
    assert cache_headers(True, TenantId(""), {b"x-tenant-id": b"made-up", b"x-cache-tag": b""}) == []


def test_engines_without_such_a_cache_are_told_nothing() -> None:
    assert cache_headers(False, LAB, {b"x-cache-tag": b"t"}) is None


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("tag", [b"x" * (TAG_CHARS_MAX + 1), b"a\xfcb", b"a\tb", b" a", b"a "])
def test_a_bad_tag_is_refused_whatever_the_engine(tag: bytes, is_kept: bool) -> None:
    with pytest.raises(BadRequest) as refused:
        cache_headers(is_kept, LAB, {b"x-cache-tag": tag})
    assert refused.value.param == "X-Cache-Tag"


@pytest.mark.parametrize("mode", [b"always", b"", b"prefix,none"])
def test_a_bad_mode_is_refused(mode: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        cache_headers(True, LAB, {b"x-cache-mode": mode})
    assert refused.value.param == "X-Cache-Mode"


@pytest.mark.parametrize("tenant", ["lab", "Z\u00fcrich", "a b ", "50%", "%35", "\u6771\u4eac", "a/b?c"])
def test_a_tenants_word_is_ascii_and_stands_for_no_other_tenant(tenant: str) -> None:
    word = tenant_word(tenant)
    assert word.isascii() and " " not in word
    assert unquote(word) == tenant
