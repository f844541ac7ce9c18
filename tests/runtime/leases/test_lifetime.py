"""How long a lease of an earlier run lasts."""

from __future__ import annotations

import pytest

from greenroom.runtime.leases.entry import GRACE_MIN_S, lasts_s, must_journal_renewal, restart_grace_s
from greenroom.runtime.leases.journal import Kept

HEARD_AT = 5_000.0


def kept(ttl_s: float, heard_at: float | None = HEARD_AT) -> Kept:
    return Kept("a", "train", 1, {"gpu0": 1}, 1, False, 30.0, ttl_s, heard_at=heard_at)


@pytest.mark.parametrize(
    ("away_s", "lasts"),
    [
        (0, 600),  # Nothing was lost of its time.
        (100, 600),  # What is left and the grace are more than a whole TTL.
        (400, 500),
        (700, 300),  # Its time was over while no renewal could be received: only the grace is left.
        (10_000_000, 300),
        (-3_000, 600),  # A clock that was set back gives no more than a TTL.
    ],
)
def test_a_lease_has_what_was_left_of_its_time_and_a_grace(away_s: float, lasts: float) -> None:
    assert lasts_s(kept(600), HEARD_AT + away_s) == lasts


def test_a_short_lease_and_one_of_unknown_age_have_their_whole_time() -> None:
    assert lasts_s(kept(GRACE_MIN_S), HEARD_AT + 1_000) == GRACE_MIN_S
    assert lasts_s(kept(600, heard_at=None), HEARD_AT + 1_000_000) == 600


@pytest.mark.parametrize("ttl_s", [1, 10, 12, 19, 30, 3_600])
def test_no_lease_loses_time_by_renewals_that_were_not_written(ttl_s: float) -> None:
    # The oldest that the last written sign of life can be, when there was a newer one that is not written.
    stale_s = restart_grace_s(ttl_s)
    assert not must_journal_renewal(ttl_s, stale_s * 0.999)
    for away_s in (0.0, ttl_s / 3, ttl_s):
        really_left_s = ttl_s - away_s
        assert lasts_s(kept(ttl_s), HEARD_AT + stale_s + away_s) >= really_left_s - 1e-9


def test_renewals_are_written_as_rarely_as_the_grace_allows() -> None:
    assert must_journal_renewal(600, 300) and not must_journal_renewal(600, 299)
    assert not must_journal_renewal(GRACE_MIN_S, 1_000_000), "it has its whole time after a restart anyway"
