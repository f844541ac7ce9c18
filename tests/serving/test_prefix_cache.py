"""What engines that keep a prefix cache are told of whose it is."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from msgspec import Raw

from greenroom.core.model import TenantId
from greenroom.errors import BadRequest
from greenroom.serving.prefix_cache import (
    FLUSHES_MAX,
    TAG_CHARS_MAX,
    PrefixSalts,
    PrefixScope,
    cache_scope,
    tenant_word,
)

LAB, SHOP, NO_ONE = TenantId("lab"), TenantId("shop"), TenantId("")


def test_tenant_tag_and_mode_are_told() -> None:
    said = {b"x-cache-tag": b"session 1", b"x-cache-mode": b"None", b"x-tenant-id": b"somebody else"}
    scope = cache_scope(LAB, said)
    assert scope == PrefixScope("lab", "session 1", is_used=False)
    assert scope.headers == [(b"x-tenant-id", b"lab"), (b"x-cache-tag", b"session 1"), (b"x-cache-mode", b"none")]


def test_without_a_tenant_nothing_is_told_of_one() -> None:
    scope = cache_scope(NO_ONE, {b"x-tenant-id": b"made-up", b"x-cache-tag": b"", b"x-cache-mode": b"Prefix"})
    assert scope == cache_scope(NO_ONE, {}) and scope.headers == []


@pytest.mark.parametrize("tag", [b"x" * (TAG_CHARS_MAX + 1), b"a\xfcb", b"a\tb", b" a", b"a "])
def test_a_bad_tag_is_refused(tag: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        cache_scope(LAB, {b"x-cache-tag": tag})
    assert refused.value.param == "X-Cache-Tag"


@pytest.mark.parametrize("mode", [b"always", b"", b"prefix,none"])
def test_a_bad_mode_is_refused(mode: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        cache_scope(LAB, {b"x-cache-mode": mode})
    assert refused.value.param == "X-Cache-Mode"


@pytest.mark.parametrize("tenant", ["lab", "Z\u00fcrich", "a b ", "50%", "%35", "\u6771\u4eac", "a/b?c"])
def test_a_tenants_word_is_ascii_and_stands_for_no_other_tenant(tenant: str) -> None:
    word = tenant_word(tenant)
    assert word.isascii() and " " not in word
    assert unquote(word) == tenant


def test_salt_is_the_same_for_one_tenant_and_tag_and_no_other() -> None:
    salts = PrefixSalts()
    # Joined without lengths, some of these would be one.
    scopes = [PrefixScope(*pair) for pair in (("lab", ""), ("shop", ""), ("", ""), ("lab", "a"), ("lab", "b"))]
    scopes += [PrefixScope("laba", ""), PrefixScope("", "lab"), PrefixScope("3:lab", "")]
    made = [salts.of(scope) for scope in scopes]
    assert len(set(made)) == len(made) and made == [salts.of(scope) for scope in scopes]
    assert PrefixSalts().of(scopes[0]) != made[0], "no one can know it"


def test_salt_of_a_caller_keeps_it_apart_and_leads_to_no_other() -> None:
    salts, lab, shop = PrefixSalts(), cache_scope(LAB, {}), cache_scope(SHOP, {})
    plain = salts.of(lab)
    assert salts.of(lab, Raw(b'"mine"')) not in (plain, salts.of(shop, Raw(b'"mine"')))
    assert salts.of(shop, Raw(plain)) != plain


def test_mode_none_has_a_new_salt_each_time() -> None:
    salts, scope = PrefixSalts(), cache_scope(LAB, {b"x-cache-mode": b"none"})
    assert salts.of(scope) != salts.of(scope)


def test_a_tenant_that_flushes_very_often_flushes_itself_and_no_other() -> None:
    salts, lab, shop = PrefixSalts(), cache_scope(LAB, {}), cache_scope(SHOP, {})
    of_shop, of_lab = salts.of(shop), {salts.of(lab)}
    for number in range(3 * FLUSHES_MAX):
        tag = f"t{number}"
        before = salts.of(PrefixScope("lab", tag))
        salts.flush(None, "lab", tag)
        assert salts.of(PrefixScope("lab", tag)) != before
        of_lab.add(salts.of(lab))
    assert salts.of(shop) == of_shop and len(of_lab) > 2
    salts.flush(None, "shop", None)
    assert salts.of(shop) != of_shop


def test_flushes_of_more_tenants_than_are_kept_flush_everything() -> None:
    salts, lab = PrefixSalts(), cache_scope(LAB, {})
    before = salts.of(lab)
    for number in range(FLUSHES_MAX + 1):
        salts.flush(None, f"tenant-{number}", None)
    assert salts.of(lab) != before
