"""Which keys are accepted, and that a key is never kept."""

from __future__ import annotations

import gc
import hashlib
import hmac

import pytest

from greenroom.config.schema import ApiKey
from greenroom.errors import InvalidKey
from greenroom.tenancy import keys as keys_module
from greenroom.tenancy.keys import ANYONE, Caller, Keys, Permission, new_key, presented_key
from greenroom.tenancy.tenants import cap


def test_without_keys_anyone_may_come_and_name_his_tenant() -> None:
    keys = Keys()
    assert not keys.enabled
    assert keys.check(None) is keys.check(b"whatever") is ANYONE
    assert ANYONE.admin
    assert ANYONE.tenant is None
    assert cap(-100, ANYONE.priority_max) == -100


def test_right_key_says_who_calls() -> None:
    keys = Keys([ApiKey(name="lab", key="s3cret", tenant="physics", priority_max="normal", admin=False)])
    assert keys.enabled
    assert keys.check(b"s3cret") == Caller(name="lab", tenant="physics", priority_max=1, admin=False)  # type: ignore[arg-type]


def test_a_caller_is_found_by_the_name_of_its_key() -> None:
    keys = Keys([ApiKey(name="lab", key="s3cret", tenant="physics")])
    assert keys.named("lab") == keys.check(b"s3cret")
    assert keys.named("physics") is None
    # A key that is called so is none for callers that came without one.
    assert keys.named(ANYONE.name) is None
    assert Keys().named(ANYONE.name) is ANYONE
    assert Keys().named("lab") is None


def test_a_key_may_only_ask_models_unless_it_says_more() -> None:
    entries = [ApiKey(name="a", key="a"), ApiKey(name="b", key="b", leases=True), ApiKey(name="c", key="c", admin=True)]
    plain, leasing, admin = (Keys(entries).check(key) for key in (b"a", b"b", b"c"))
    assert not plain.admin
    may = [[caller.may(one) for one in Permission] for caller in (plain, leasing, admin, ANYONE)]
    assert may == [[True, False, False], [True, True, False], [True, True, True], [True, True, True]]


def test_key_given_as_digest_works_the_same() -> None:
    key, digest = new_key()
    assert Keys([ApiKey(name="lab", sha256=digest)]).check(key.encode()).name == "lab"


def test_tenant_is_the_keys_name_when_not_given() -> None:
    assert Keys([ApiKey(name="lab", key="k")]).check(b"k").tenant == "lab"


@pytest.mark.parametrize(
    "presented", [None, b"", b"S3cret", b"s3cre", b"s3cret ", b"\xff\xfe", b"s3cret" + b"x" * 9_999]
)
def test_wrong_or_missing_key_is_refused_without_being_repeated(presented: bytes | None) -> None:
    with pytest.raises(InvalidKey) as refused:
        Keys([ApiKey(name="lab", key="s3cret")]).check(presented)
    assert "s3cre" not in refused.value.message.lower()


def test_key_longer_than_any_is_refused_even_if_its_beginning_is_right() -> None:
    longest = "k" * keys_module.KEY_BYTES_MAX
    keys = Keys([ApiKey(name="lab", key=longest)])
    assert keys.check(longest.encode()).name == "lab"
    with pytest.raises(InvalidKey):
        keys.check(longest.encode() + b"more")


@pytest.mark.parametrize("right", [b"first", b"second", b"third"])
def test_every_key_is_compared_whichever_is_right(right: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counting(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return compare(known, given)

    keys = Keys([ApiKey(name=name, key=name) for name in ("first", "second", "third")])
    monkeypatch.setattr(hmac, "compare_digest", counting)
    assert keys.check(right).name == right.decode()
    assert len(compared) == 3


def test_the_key_itself_is_not_kept() -> None:
    secret = "-".join(["a", "very", "long", "secret"])
    keys = Keys([ApiKey(name="lab", key=secret)])
    keys.check(secret.encode())
    held: list[object] = []
    level: list[object] = [keys]
    while level := [one for one in gc.get_referents(*level) if isinstance(one, bytes | str | tuple | list | dict)]:
        held += level
    assert hashlib.sha256(secret.encode()).digest() in held
    assert secret not in repr(held)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({b"authorization": b"Bearer abc"}, b"abc"),
        ({b"authorization": b"bearer  abc "}, b"abc"),
        ({b"authorization": b"Basic abc"}, None),
        ({b"authorization": b"Bearer"}, None),
        ({b"authorization": b"Bearer "}, None),
        ({b"x-api-key": b"abc"}, b"abc"),
        ({b"authorization": b"Basic abc", b"x-api-key": b"def"}, b"def"),
        ({b"authorization": b"Bearer abc", b"x-api-key": b"def"}, b"abc"),
    ],
)
def test_key_is_read_from_either_header(headers: dict[bytes, bytes], key: bytes | None) -> None:
    assert presented_key(headers.get(b"authorization"), headers.get(b"x-api-key")) == key


def test_new_keys_differ_and_fit_the_configuration() -> None:
    (one, digest), (other, _) = new_key(), new_key()
    assert one != other
    assert len(one) >= 40
    assert hashlib.sha256(one.encode()).hexdigest() == digest
    assert ApiKey(name="lab", sha256=digest).sha256 == digest
    assert ApiKey(name="lab", key=one).key == one
