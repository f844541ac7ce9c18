"""What is counted of clients, in bounds; and which of them cool down, for how long."""

from __future__ import annotations

import pytest

from greenroom.access.client_stats import IDLE_S, MISTAKES, MODELS_MAX, OTHER, ClientStats
from greenroom.config.schema import Clients
from greenroom.errors import CoolingDown

RULES = Clients(errors_max=2, window_s=60, cooldown_s=10, cooldown_max_s=35)


class World:
    """Statistics of clients by a clock that stands until it is set."""

    def __init__(self, rules: Clients = RULES, **bounds: int) -> None:
        self.now = 1_000.0
        self.table = ClientStats(lambda: self.now, **bounds)
        self.table.configure(rules)

    def fail(self, times: int = 1, *, status: int = 400, key: str = "k", client: str = "c") -> None:
        for _ in range(times):
            self.table.count(key, "t", client, "m", status, "invalid_request")

    def wait_s(self, key: str = "k", client: str = "c") -> float:
        """How long it has to cool down."""
        try:
            self.table.check(key, "t", client)
        except CoolingDown as cooling:
            assert cooling.status == 429 and cooling.retry_after_s is not None
            return cooling.retry_after_s
        return 0.0


def test_what_a_client_asks_is_counted() -> None:
    world = World()
    for model, status, code in (("a", 200, None), ("b", 200, None), ("a", 404, "model_not_found"), ("a", 502, "lost")):
        world.table.count("k", "t", "c", model, status, code)
    world.table.count("k", "t", "c", "", 400, None)
    (row,) = world.table.rows()
    assert (row.key, row.tenant, row.client, row.requests) == ("k", "t", "c", 5)
    assert row.models == {"a": 3, "b": 1}
    assert row.errors == {"model_not_found": 1, "lost": 1, "status_400": 1}
    assert (row.mistakes, row.failed) == (2, 1)


def test_the_rate_is_that_of_the_last_minute() -> None:
    world = World()
    world.now = 1_200.0
    world.fail(6, status=200)
    (row,) = world.table.rows()
    assert row.per_minute(1_230.0) == 6
    assert row.per_minute(1_260.0) == 6
    assert row.per_minute(1_290.0) == 3
    assert row.per_minute(1_320.0) == 0
    world.now = 1_290.0
    world.fail(2, status=200)
    assert row.per_minute(1_290.0) == 5


def test_those_that_asked_last_come_first() -> None:
    world = World()
    for client in ("first", "second", "first"):
        world.now += 1
        world.fail(status=200, client=client)
    assert [row.client for row in world.table.rows()] == ["first", "second"]


def test_one_mistake_too_many_cools_down_that_client_alone() -> None:
    world = World()
    world.fail(2)
    assert world.wait_s() == 0
    world.fail()
    assert world.wait_s() == 10
    assert (world.wait_s(client="other program"), world.wait_s(key="other key")) == (0, 0)
    world.now += 9.5
    assert world.wait_s() == pytest.approx(0.5)
    world.now += 0.5
    assert world.wait_s() == 0


def test_a_cooldown_that_begins_now_is_not_told_longer_than_it_is() -> None:
    world = World(Clients(errors_max=2, window_s=60, cooldown_s=600, cooldown_max_s=600))
    world.now = 1_000.4
    assert world.now + 600.0 - world.now > 600.0, "such is arithmetic"
    world.fail(3)
    assert world.wait_s() == 600.0


def test_mistakes_count_within_the_window() -> None:
    world = World()
    for _ in range(10):
        world.fail()
        # The third is made 62 s after the first.
        world.now += 31
    assert world.wait_s() == 0
    world.fail()
    world.now += 29
    world.fail()
    assert world.wait_s() == 10


@pytest.mark.parametrize("status", [200, 401, 408, 409, 429, 499, 500, 502, 503, 504, 507])
def test_what_is_no_mistake_of_the_caller_never_cools_down(status: int) -> None:
    world = World()
    world.fail(50, status=status)
    assert world.wait_s() == 0


@pytest.mark.parametrize("status", sorted(MISTAKES))
def test_mistakes_do(status: int) -> None:
    world = World()
    world.fail(3, status=status)
    assert world.wait_s() == 10


def test_each_cooldown_that_follows_soon_is_twice_as_long_up_to_the_longest() -> None:
    world, lasted = World(), []
    for _ in range(4):
        world.fail(3)
        lasted.append(world.wait_s())
        world.now += lasted[-1]
    assert lasted == [10, 20, 35, 35]
    (row,) = world.table.rows()
    assert row.cooldowns == 4


def test_a_client_that_behaved_for_a_while_begins_anew() -> None:
    world = World()
    for _ in range(2):
        world.fail(3)
        world.now += world.wait_s()
    # As long as the last cooldown and one window.
    world.now += 79
    world.fail(3)
    assert world.wait_s() == 35
    world.now += 35 + 60 + 35 + 1
    world.fail(3)
    assert world.wait_s() == 10


def test_requests_that_ran_when_the_cooldown_began_do_not_lengthen_it() -> None:
    world = World()
    world.fail(30)
    assert world.wait_s() == 10
    world.now += 10
    world.fail(2)
    assert world.wait_s() == 0


def test_nothing_cools_down_unless_it_is_configured() -> None:
    world = World(Clients())
    assert not world.table.are_cooled
    world.fail(1_000)
    world.table.configure(RULES)
    assert world.wait_s() == 0
    world.fail(3)
    assert world.wait_s() == 10


def test_fewer_mistakes_may_be_allowed_later() -> None:
    world = World(Clients(errors_max=10))
    world.fail(5)
    world.table.configure(RULES)
    world.fail()
    assert world.wait_s() == 10


def test_made_up_clients_of_a_key_share_one_row_and_its_cooldown() -> None:
    world = World(clients_max=3)
    for number in range(20):
        world.fail(status=200, client=f"c{number}")
    assert sorted(row.client for row in world.table.rows()) == ["c0", "c1", "c2", OTHER]
    for number in range(20, 23):
        world.fail(client=f"c{number}")
    assert (world.wait_s(client="c99"), world.wait_s(client="c0"), world.wait_s(key="k2", client="c99")) == (10, 0, 0)


def test_a_key_forgets_its_own_longest_quiet_client_for_a_new_one() -> None:
    world = World(clients_max=3)
    for number in range(3):
        world.fail(status=200, client=f"c{number}")
        world.now += 1
    world.fail(status=200, key="k2", client="quiet")
    world.now += 61
    world.fail(status=200, client="c0")
    for client in ("new", "newer"):
        world.fail(status=200, client=client)
    assert sorted(row.client for row in world.table.rows()) == ["c0", "new", "newer", "quiet"]
    world.fail(3, client="newest")
    assert world.wait_s(client="c1") == 10, "all others have just asked: it shares their row"
    world.now += 61
    assert world.wait_s(client="c1") == 0
    world.fail(status=200, client="c1")
    assert "c1" in [row.client for row in world.table.rows()]


def test_no_client_is_forgotten_while_it_cools_down_or_its_next_cooldown_would_be_longer() -> None:
    world = World(clients_max=1)
    world.fail(3)
    world.now += 10 + 60
    world.fail(status=200, client="new")
    assert sorted(row.client for row in world.table.rows()) == ["c", OTHER]
    world.now += 10 + 60
    world.fail(status=200, client="new")
    assert sorted(row.client for row in world.table.rows()) == ["new", OTHER]


def test_what_does_not_fit_is_counted_together_and_never_cools_down() -> None:
    world = World(rows_max=4, clients_max=2)
    for number in range(4):
        world.fail(status=200, key=f"k{number}")
    world.fail(10, key="late")
    assert len(world.table.rows()) == 5
    assert world.table.rows()[-1].requests == 10
    assert world.wait_s(key="late") == 0


def test_those_idle_for_long_make_room_unless_they_cool_down() -> None:
    world = World(Clients(errors_max=1, cooldown_s=IDLE_S * 10, cooldown_max_s=IDLE_S * 10), rows_max=2)
    world.fail(2, key="bad")
    world.fail(status=200, key="idle")
    world.now += IDLE_S + 1
    world.fail(status=200, key="new")
    assert [row.key for row in world.table.rows()] == ["new", "bad"]
    assert world.wait_s(key="bad") > 0


def test_models_of_a_client_are_bounded() -> None:
    world = World()
    for number in range(MODELS_MAX + 5):
        world.table.count("k", "t", "c", f"m{number}", 200, None)
    (row,) = world.table.rows()
    assert len(row.models) == MODELS_MAX + 1 and row.models[OTHER] == 5
