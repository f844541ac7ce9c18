"""What a check reads, and what it leaves to the engine: its time is that of everyone's requests."""

from __future__ import annotations

import pytest
from msgspec import Raw

from greenroom.errors import BadRequest
from greenroom.server.inference.body.body_check import CHAT, READ_BYTES_MAX

HI = Raw(b'[{"role": "user", "content": "hi"}]')


def check(size: int, **fields: Raw) -> None:
    CHAT.check(fields, size, {}, frozenset())


def test_a_large_field_is_left_to_the_engine_and_small_ones_beside_it_are_read() -> None:
    large = Raw(b"[" + b"5," * READ_BYTES_MAX + b"5]")
    check(len(bytes(large)), messages=large)
    with pytest.raises(BadRequest, match="temperature"):
        check(len(bytes(large)), messages=large, temperature=Raw(b'"hot"'))
    with pytest.raises(BadRequest, match="messages"):
        check(100, messages=Raw(b"[5]"))


@pytest.mark.parametrize(
    "broken",
    [b'[{"role": "user"', b'[{"role": "\xff"}]', b"[" * 100_000, b'[{"role": "a", "content": tru}]', b"1" * 5_000],
)
def test_garbage_in_a_field_is_a_mistake_in_it(broken: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^(messages|n)\b"):
        check(len(broken), messages=Raw(broken))
    with pytest.raises(BadRequest, match=r"^n\b"):
        check(len(broken), messages=HI, n=Raw(broken))
