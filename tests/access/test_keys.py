"""Which keys are accepted, and that a key is never kept."""

from __future__ import annotations

import gc
import hashlib
from datetime import UTC, datetime

import pytest

from greenroom.access import keys as keys_module
from greenroom.access.key_file import FileKey
from greenroom.access.keys import ANYONE, Caller, Keys, Permission, cap, new_key, presented_key
from greenroom.config.sections.keys import ApiKey, Verb
from greenroom.errors import InvalidKey, KeyExpired, KeyRevoked


def test_without_keys_every_caller_is_admitted_and_names_its_tenant() -> None:
    keys = Keys()
    assert not keys.enabled
    assert keys.check(None) is keys.check(b"whatever") is ANYONE
    assert ANYONE.admin
    assert ANYONE.tenant is None
    assert cap(-100, ANYONE.priority_max) == -100


def test_a_right_key_identifies_its_caller() -> None:
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
    may = [{one for one in Permission if caller.may(one)} for caller in (plain, leasing, admin, ANYONE)]
    assert may == [{Permission.ASK}, {Permission.ASK, Permission.LEASE}, set(Permission), set(Permission)]


def test_verbs_are_permissions_one_by_one() -> None:
    caller = Keys([ApiKey(name="ops", key="k", verbs=(Verb.LOAD, Verb.READ))]).check(b"k")
    assert {one for one in Permission if caller.may(one)} == {Permission.ASK, Permission.LOAD, Permission.READ}
    assert {verb.value for verb in Verb} < {one.value for one in Permission}


@pytest.mark.parametrize(
    ("patterns", "model", "sees"),
    [
        (("llama-*",), "llama-3", True),
        (("llama-*",), "my-llama-3", False),
        (("llama-*",), "llama-3\nqwen", True),
        (("org/*",), "org/a/b", True),
        (("a.b",), "axb", False),
        (("a", "b*c"), "bc", True),
        (("a", "b*c"), "bcd", False),
        (("[a]",), "a", False),
        (("*",), "", True),
        ((), "a", False),
    ],
)
def test_models_are_named_by_patterns(patterns: tuple[str, ...], model: str, sees: bool) -> None:
    assert Keys([ApiKey(name="lab", key="k", models=patterns)]).check(b"k").sees(model) is sees


def test_a_key_without_models_sees_all() -> None:
    assert Keys([ApiKey(name="lab", key="k")]).check(b"k").sees("anything")


def test_an_expired_key_says_so_and_the_clock_decides() -> None:
    now = [0.0]
    expires = datetime(2027, 1, 31, 12, tzinfo=UTC)
    keys = Keys([ApiKey(name="lab", key="k", expires=expires)], wall=lambda: now[0])
    for now[0] in (expires.timestamp() - 1, expires.timestamp() - 366 * 86_400):
        assert keys.check(b"k") is keys.named("lab")
    for now[0] in (expires.timestamp(), expires.timestamp() + 366 * 86_400):
        for look in (lambda: keys.check(b"k"), lambda: keys.named("lab")):
            with pytest.raises(KeyExpired, match="lab expired at 2027-01-31T12:00:00"):
                look()
    # What has expired is told to the holder of the key only.
    with pytest.raises(InvalidKey, match="not one of this server's"):
        keys.check(b"K")


@pytest.mark.parametrize(
    ("said", "moment"),
    [
        ("2027-01-31", "2027-01-31T00:00:00+00:00"),
        ("2027-01-31T18:00:00", "2027-01-31T18:00:00+00:00"),
        ("2027-01-31T18:00:00+01:00", "2027-01-31T17:00:00+00:00"),
        ("2027-01-31T18:00:00Z", "2027-01-31T18:00:00+00:00"),
    ],
)
def test_a_moment_without_a_zone_is_in_utc(said: str, moment: str) -> None:
    key = ApiKey.model_validate({"name": "lab", "key": "k", "expires": said})
    assert key.expires is not None and key.expires.isoformat() == moment


@pytest.mark.parametrize(
    "also", [{"admin": True}, {"leases": True}, {"verbs": ["read"]}, {"verbs": ["load", "delete"]}]
)
def test_what_concerns_all_models_is_not_for_a_key_of_some(also: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="concerns every model"):
        ApiKey.model_validate({"name": "lab", "key": "k", "models": ["a"], **also})


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


class Uncomparable(bytes):
    """Bytes whose comparison would tell by its time how much is right."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a presented key is hashed, and never compared")

    __hash__ = bytes.__hash__


def test_a_presented_key_is_hashed_before_anything_is_looked_up() -> None:
    revoked = FileKey(name="old", sha256=hashlib.sha256(b"old-key").hexdigest(), revoked=datetime.now(UTC))
    keys = Keys([ApiKey(name="lab", key="s3cret"), revoked])
    assert keys.check(Uncomparable(b"s3cret")).name == "lab"
    with pytest.raises(KeyRevoked):
        keys.check(Uncomparable(b"old-key"))
    for wrong in (b"s3creT", b"S3cret", b"s3cret" * 999):
        with pytest.raises(InvalidKey):
            keys.check(Uncomparable(wrong))


def test_with_revoked_keys_only_a_key_is_needed() -> None:
    revoked = FileKey(name="old", sha256="0" * 64, admin=True, revoked=datetime.now(UTC))
    for keys in (Keys([revoked]), Keys(is_required=True)):
        assert keys.enabled and list(keys) == [] and keys.named("old") is None
        for presented in (None, b"", b"any"):
            with pytest.raises(InvalidKey):
                keys.check(presented)


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
