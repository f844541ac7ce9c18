"""The ladder: which candidate a request gets, by position, warmth, load, failures, pin, budget and last resort."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from greenroom.core.decide.arrival import TRY_AGAIN_S
from greenroom.core.decide.plan import Refuse
from greenroom.core.effects import RejectCode
from greenroom.core.events import Choice, Learned
from greenroom.core.model import ModelId, MoveKind, Need, Outcome, RequestId, Tier
from tests.core.test_others import store
from tests.core.world import Engine, Fate, World, gpu, host, model

from .test_candidates import served_by

LOAD_S = {"a": 20.0, "b": 10.0, "c": 10.0}
WAKE_S, ANSWER_S = 1.0, 4.0
STATES = ("cold", "asleep", "ready", "full", "coming", "failing", "too_large")
REMOTE = Choice(prefer_first_s=5.0, last_resort=(ModelId("r"),))


def world_with(states: dict[str, str]) -> World:
    """Each model in its state; `r` takes no memory and is ready. How long loads and answers take is known."""
    specs = [
        model(name, 90_000 if state == "too_large" else 2_000, asleep=Need(0, 2_000)) for name, state in states.items()
    ]
    world = World([*specs, model("r", 0, concurrency=9)], devices=(gpu(0, 24_000), host(24_000)))
    failing = [name for name, state in states.items() if state == "failing"]
    world.engines |= {name: Engine(load_s=0.1 if name in failing else LOAD_S[name], wake_s=WAKE_S) for name in states}
    world.outcome_of = lambda move: Outcome.FAILED if move.model in failing else Outcome.DONE
    times = {ModelId(name): Learned({MoveKind.LOAD: LOAD_S[name], MoveKind.WAKE: WAKE_S}, ANSWER_S) for name in states}
    world.config(learned=times)
    for name in [*(name for name, state in states.items() if state in ("asleep", "ready", "full")), "r"]:
        world.arrive(f"first {name}", name, takes_s=ANSWER_S)
        world.run(30.0)
    for name, state in states.items():
        if state == "asleep":
            world.ask(f"sleep {name}", MoveKind.SLEEP, name)
            world.run(2.0)
            assert world.tier(name) is Tier.ASLEEP
        elif state == "full":
            world.arrive(f"on {name}", name)
    for name in failing:
        world.arrive(f"on {name}", name)
    world.run(0.2)
    for name in [name for name, state in states.items() if state == "coming"]:
        world.arrive(f"on {name}", name)
    return world


def chosen(world: World, *ladder: str, choice: Choice, budget_s: float | None = None) -> str:
    """The model that a request gets or waits for; empty if it is refused. What is explained is what happens."""
    options, place = world.scheduler.view.weigh(world.asking("r?", *ladder, budget_s=budget_s, choice=choice))
    told = "" if isinstance(options[place].plan, Refuse) else str(options[place].model)
    call = world.arrive("r!", *ladder, budget_s=budget_s, choice=choice)
    if call.fate is Fate.REJECTED:
        return ""
    got = served_by(world, "r!") if call.fate is Fate.GRANTED else world.scheduler.state.waitlist["r!"].model
    assert got == told
    return str(got)


FIRST_S = Choice(prefer_first_s=5.0)
PINNED = Choice(prefer_first_s=5.0, pin_primary=True)

# State of a, state of b, choice, and which of the two is got.
TABLE = [
    ("ready", "ready", FIRST_S, "a"),
    ("ready", "cold", FIRST_S, "a"),
    ("cold", "cold", FIRST_S, "a"),
    ("cold", "ready", FIRST_S, "b"),
    ("cold", "asleep", FIRST_S, "b"),
    ("cold", "full", FIRST_S, "b"),
    ("cold", "coming", FIRST_S, "b"),
    ("cold", "failing", FIRST_S, "a"),
    ("asleep", "ready", FIRST_S, "a"),
    ("asleep", "asleep", FIRST_S, "a"),
    ("full", "ready", FIRST_S, "a"),
    ("full", "ready", Choice(prefer_first_s=3.0), "b"),
    ("full", "cold", Choice(), "a"),
    ("full", "full", Choice(), "a"),
    ("coming", "ready", FIRST_S, "b"),
    ("coming", "ready", Choice(prefer_first_s=30.0), "a"),
    ("coming", "asleep", FIRST_S, "b"),
    ("cold", "ready", Choice(prefer_first_s=30.0), "a"),
    ("failing", "ready", FIRST_S, "b"),
    ("failing", "full", FIRST_S, "b"),
    ("failing", "cold", FIRST_S, "b"),
    ("failing", "cold", PINNED, "b"),
    ("failing", "failing", FIRST_S, ""),
    ("too_large", "cold", PINNED, "b"),
    ("too_large", "failing", FIRST_S, ""),
    ("cold", "ready", PINNED, "a"),
    ("asleep", "ready", PINNED, "a"),
    ("full", "ready", PINNED, "a"),
    ("coming", "ready", PINNED, "a"),
]


@pytest.mark.parametrize(("a", "b", "choice", "expected"), TABLE)
def test_position_against_warmth(a: str, b: str, choice: Choice, expected: str) -> None:
    assert chosen(world_with({"a": a, "b": b}), "a", "b", choice=choice) == expected


# With r of last resort, and a budget.
RESORT = [
    ("cold", "cold", None, REMOTE, "a"),
    ("full", "cold", None, REMOTE, "a"),
    ("failing", "cold", None, REMOTE, "b"),
    ("failing", "full", None, REMOTE, "b"),
    ("failing", "too_large", None, REMOTE, "r"),
    ("cold", "cold", 60.0, REMOTE, "a"),
    ("cold", "cold", 16.0, REMOTE, "b"),
    ("cold", "cold", 8.0, REMOTE, "r"),
    ("full", "cold", 8.5, REMOTE, "a"),
    ("full", "cold", 5.0, REMOTE, "r"),
    ("cold", "ready", 5.0, REMOTE, "b"),
    ("failing", "full", 5.0, REMOTE, "r"),
    ("failing", "full", None, REMOTE, "b"),
    ("failing", "failing", 60.0, REMOTE, "r"),
    ("cold", "cold", 60.0, Choice(5.0, pin_primary=True, last_resort=(ModelId("r"),)), "a"),
    ("failing", "failing", None, Choice(5.0, pin_primary=True, last_resort=(ModelId("r"),)), "r"),
    ("failing", "cold", None, Choice(5.0, pin_primary=True, last_resort=(ModelId("r"),)), "b"),
]


@pytest.mark.parametrize(("a", "b", "budget_s", "choice", "expected"), RESORT)
def test_the_last_resort_is_for_what_no_other_can_do(
    a: str, b: str, budget_s: float | None, choice: Choice, expected: str
) -> None:
    # The remote one stands between the others: its position does not matter.
    assert chosen(world_with({"a": a, "b": b}), "a", "r", "b", choice=choice, budget_s=budget_s) == expected


def test_a_pinned_primary_that_comes_too_late_is_not_replaced() -> None:
    world = world_with({"a": "cold", "b": "ready"})
    assert (
        chosen(world, "a", "b", "r", choice=Choice(pin_primary=True, last_resort=(ModelId("r"),)), budget_s=5.0) == ""
    )
    assert world.code("r!") is RejectCode.EXPIRED


@pytest.mark.untraced
@pytest.mark.parametrize("a", STATES)
def test_no_cold_or_busy_model_sends_a_request_to_the_last_resort(a: str) -> None:
    for b, pinned in product(STATES, (False, True)):
        choice = Choice(1.0, pin_primary=pinned, last_resort=(ModelId("r"),))
        got = chosen(world_with({"a": a, "b": b}), "a", "b", "r", choice=choice)
        hopeless = {"failing", "too_large"}
        assert (got == "r") == (a in hopeless and b in hopeless), (a, b, got)
        if pinned and a not in hopeless:
            assert got == "a", (a, b)


def test_a_first_candidate_of_which_no_times_are_known_gives_way_to_one_that_is_ready() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    world.arrive("warm", "b", takes_s=1.0)
    world.run(10.0)
    assert chosen(world, "a", "b", choice=Choice(prefer_first_s=100.0)) == "b"


def test_a_busy_candidate_whose_answers_are_not_known_gives_way_to_one_that_is_ready() -> None:
    world = World([model("a", 3_000), model("b", 3_000)])
    world.arrive("on a", "a")
    world.arrive("warm", "b", takes_s=1.0)
    world.run(10.0)
    assert chosen(world, "a", "b", choice=Choice(prefer_first_s=100.0)) == "b"


def test_each_candidate_that_is_lost_before_its_first_byte_is_tried_once() -> None:
    world = world_with({"a": "ready", "b": "ready", "c": "ready"})
    world.arrive("x", "a", "r", "b", "c", choice=REMOTE)
    got = []
    while world.fate("x") is Fate.GRANTED:
        got.append(served_by(world, "x"))
        world.finish("x", lost=True)
    assert got == ["a", "b", "c", "r"] and world.code("x") is RejectCode.LOST


def test_one_lost_candidate_leaves_the_others_their_rules() -> None:
    """After the first is lost, the next one is loaded although the one of last resort is ready."""
    world = world_with({"a": "ready", "b": "cold"})
    world.arrive("x", "a", "r", "b", choice=REMOTE, takes_s=None)
    world.finish("x", lost=True)
    assert world.fate("x") is Fate.WAITING
    world.run(30.0)
    assert served_by(world, "x") == "b"


def test_a_load_that_fails_while_a_request_waits_turns_it_to_the_next_local_model_first() -> None:
    world = world_with({"a": "cold", "b": "cold"})
    world.outcome_of = lambda move: Outcome.FAILED if move.model == "a" else Outcome.DONE
    world.arrive("x", "a", "r", "b", choice=REMOTE, takes_s=1.0)
    world.run(60.0)
    assert world.fate("x") is Fate.SERVED and served_by(world, "x") == "b"


def test_after_a_load_that_failed_no_candidate_is_left_beside_the_last() -> None:
    world = world_with({"a": "cold"})
    world.outcome_of = lambda move: Outcome.FAILED
    world.arrive("x", "a", "r", choice=REMOTE, takes_s=None)
    world.run(30.0)
    assert world.fate("x") is Fate.GRANTED and served_by(world, "x") == "r"
    assert world.scheduler.view.candidates_left(RequestId("x"), world.now) == ()


def test_after_a_load_that_failed_the_last_local_candidate_is_asked_once() -> None:
    world = world_with({"a": "cold", "b": "cold"})
    world.outcome_of = lambda move: Outcome.FAILED if move.model == "a" else Outcome.DONE
    world.arrive("x", "a", "b", choice=FIRST_S, takes_s=None)
    world.run(60.0)
    assert served_by(world, "x") == "b"
    world.finish("x", lost=True)
    assert world.fate("x") is Fate.REJECTED and world.code("x") is RejectCode.LOST


def test_a_choice_of_one_is_asked_again_once_like_any_model() -> None:
    world = world_with({"a": "ready"})
    world.arrive("x", "a", choice=FIRST_S)
    world.finish("x", lost=True)
    assert world.fate("x") is Fate.GRANTED
    world.finish("x", lost=True)
    assert world.fate("x") is Fate.REJECTED and world.code("x") is RejectCode.LOST


def test_candidates_that_are_left_are_those_that_were_not_tried() -> None:
    world = world_with({"a": "ready", "b": "ready"})
    assert world.scheduler.view.candidates_left(RequestId("x"), world.now) == ()
    world.arrive("x", "a", "r", "b", choice=REMOTE)
    left = []
    while world.fate("x") is Fate.GRANTED:
        left.append(world.scheduler.view.candidates_left(RequestId("x"), world.now))
        world.finish("x", lost=True)
    assert left == [("r", "b"), ("r",), ()]


def test_a_busy_model_sends_a_request_to_other_local_ones_and_never_to_the_last_resort() -> None:
    world = world_with({"a": "ready", "b": "ready"})
    world.arrive("x", "a", "r", "b", choice=REMOTE)
    world.finish("x", lost=True, busy=True)
    assert served_by(world, "x") == "b" and world.scheduler.view.candidates_left(RequestId("x"), world.now) == ()
    world.finish("x", lost=True)
    assert world.fate("x") is Fate.REJECTED and world.code("x") is RejectCode.LOST


# Those that a request is never turned to, in any position.
HOPELESS = ("failing", "too_large", "excluded", "removed")


def world_with_hopeless(state: str, **others: str) -> World:
    """As `world_with`, with a model `b` that cannot serve."""
    world = world_with({"b": "cold" if state in ("excluded", "removed") else state, **others})
    if state == "removed":
        world.config(removed=("b",))
    if state == "excluded":
        world.config(model("b", 2_000, exclusive="one"), model("p", 2_000, pinned=True, exclusive="one"))
        world.arrive("on p", "p", takes_s=0.0)
        world.run(6.0)
    return world


@pytest.mark.parametrize("state", HOPELESS)
@pytest.mark.parametrize("ladder", [("a", "b"), ("b", "a"), ("b", "a", "r"), ("r", "a", "b")])
@pytest.mark.parametrize("is_busy", [True, False])
def test_a_candidate_that_cannot_serve_is_not_turned_to(state: str, ladder: tuple[str, ...], is_busy: bool) -> None:
    """After the last one that can, the request is lost: its caller gets the last error, not that of one not asked."""
    world = world_with_hopeless(state, a="ready")
    world.arrive("x", *ladder, choice=REMOTE)
    assert served_by(world, "x") == "a"
    left = ("r",) if "r" in ladder else ()
    assert world.scheduler.view.candidates_left(RequestId("x"), world.now) == left
    world.finish("x", lost=True, busy=is_busy)
    if left and not is_busy:
        assert served_by(world, "x") == "r"
        world.finish("x", lost=True)
    assert world.fate("x") is Fate.REJECTED and world.code("x") is RejectCode.LOST


@pytest.mark.parametrize("state", HOPELESS)
@pytest.mark.parametrize("ladder", [("a", "b"), ("b", "a")])
def test_after_a_load_that_failed_the_caller_gets_that_error(state: str, ladder: tuple[str, ...]) -> None:
    world = world_with_hopeless(state, a="cold")
    world.engines["a"], fails = Engine(load_s=0.1), world.outcome_of
    world.outcome_of = lambda move: Outcome.FAILED if move.model == "a" else fails(move)
    world.arrive("x", *ladder, choice=FIRST_S)
    world.run(1.0)
    rejection = world.calls_by_id["x"].rejection
    assert rejection is not None and (rejection.code, rejection.model) == (RejectCode.LOAD_FAILED, "a")


@pytest.mark.parametrize("a", ["cold", "full"])
def test_a_candidate_that_can_serve_since_the_first_was_removed_is_turned_to(a: str) -> None:
    world = world_with({"a": a, "b": "too_large"})
    world.arrive("x", "a", "b", choice=FIRST_S, takes_s=1.0)
    assert world.fate("x") is Fate.WAITING
    world.config(model("b", 2_000), removed=("a",))
    world.run(60.0)
    assert world.fate("x") is Fate.SERVED and served_by(world, "x") == "b"


def test_a_candidate_that_can_serve_is_turned_to_before_one_that_stands_higher_and_cannot() -> None:
    world = world_with({"b": "too_large", "a": "ready", "c": "cold"})
    world.arrive("x", "b", "a", "c", choice=FIRST_S, takes_s=None)
    world.finish("x", lost=True)
    world.run(30.0)
    assert world.fate("x") is Fate.GRANTED and served_by(world, "x") == "c"


@pytest.mark.parametrize("others", [(), ("r",)])
def test_a_busy_model_is_not_asked_again(others: tuple[str, ...]) -> None:
    world = world_with({"a": "ready"})
    world.arrive("x", "a", *others, choice=REMOTE)
    world.finish("x", lost=True, busy=True)
    assert world.fate("x") is Fate.REJECTED and world.code("x") is RejectCode.LOST


def test_requests_with_a_choice_get_a_free_place_in_order_of_priority() -> None:
    world = world_with({"a": "full", "b": "full"})
    world.arrive("low", "a", "b", choice=Choice(), priority=2)
    world.arrive("high", "a", "b", choice=Choice(), priority=0)
    world.finish("on b")
    assert world.fate("high") is Fate.GRANTED and world.fate("low") is Fate.WAITING
    assert served_by(world, "high") == "b"


def test_what_is_asked_for_counts_for_the_model_that_was_chosen() -> None:
    world = world_with({"a": "cold", "b": "ready"})
    models = world.scheduler.state.models
    before = models[ModelId("a")].heat
    assert chosen(world, "a", "b", choice=FIRST_S) == "b"
    assert models[ModelId("a")].heat == before and models[ModelId("b")].heat_at == world.now


def test_a_first_candidate_that_was_too_slow_is_tried_again_after_a_while() -> None:
    world = world_with({"a": "ready", "b": "ready"})
    world.arrive("slow", "a", takes_s=200.0)
    world.run()
    world.arrive("quick", "b", takes_s=ANSWER_S)
    world.run(ANSWER_S)
    asking = world.asking("r?", "a", "b", budget_s=20.0, choice=FIRST_S)
    assert world.scheduler.view.weigh(asking)[1] == 1
    world.run(TRY_AGAIN_S)
    asking = world.asking("r?", "a", "b", budget_s=20.0, choice=FIRST_S)
    assert world.scheduler.view.weigh(asking)[1] == 0


@pytest.mark.untraced
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(40, 200))])
def test_in_no_run_a_request_goes_to_the_last_resort_though_a_local_model_could_serve(seed: int) -> None:
    """Models that do not fit together are loaded, evicted and busy all the time; every other run, loads fail."""
    random = Random(seed)
    sizes = [random.choice((2_000, 4_000, 6_000)) for _ in "abc"]
    specs = [model(name, mib, concurrency=random.randint(1, 3)) for name, mib in zip("abc", sizes, strict=True)]
    world = World([*specs, model("r", 0, concurrency=99)])
    world.arrive("first r", "r", takes_s=0.1)
    world.run(10.0)
    fails = seed % 2 == 1
    world.outcome_of = lambda move: Outcome.FAILED if fails and move.model != "r" else Outcome.DONE
    for number in range(25):
        ladder = [*random.sample("abc", random.randint(1, 3)), "r"]
        random.shuffle(ladder)
        choice = Choice(random.choice((0.0, 3.0)), random.random() < 0.3, last_resort=(ModelId("r"),))
        world.arrive(f"x{number}", *ladder, takes_s=random.random() * 5, choice=choice, priority=random.randint(0, 2))
        world.run(random.random() * 4)
    world.run()
    got = [served_by(world, f"x{number}") for number in range(25)]
    assert all(world.fate(f"x{number}") is Fate.SERVED for number in range(25))
    assert set(got) == {"r"} if fails else "r" not in got


def test_a_request_that_waits_for_the_last_resort_leaves_it_when_another_can_serve_again() -> None:
    world = World([model("a", 2_000), model("r", 0, concurrency=1)])
    world.engines |= {"a": Engine(load_s=0.1)}
    world.arrive("first r", "r", takes_s=0.1)
    world.run(10.0)
    world.outcome_of = lambda move: Outcome.FAILED
    world.arrive("on a", "a")
    world.run(0.5)
    assert world.code("on a") is RejectCode.LOAD_FAILED
    world.arrive("on r", "r", takes_s=60.0)
    world.arrive("x", "a", "r", takes_s=1.0, choice=REMOTE)
    world.config(learned={})
    assert world.fate("x") is Fate.WAITING and world.scheduler.state.waitlist.count(ModelId("r")) == 1
    world.outcome_of = lambda move: Outcome.DONE
    world.run()
    assert world.fate("x") is Fate.SERVED and served_by(world, "x") == "a"


@pytest.mark.parametrize("goes", ["unload", "remove"])
def test_a_candidate_that_fits_once_the_first_has_left_is_turned_to(goes: str) -> None:
    world = World([model("a", 20_000, pinned=True, grace_s=0.0), model("b", 20_000)], devices=(gpu(0, 24_000),))
    world.arrive("on a", "a")
    world.run(10.0)
    world.arrive("x", "a", "b", choice=FIRST_S, takes_s=1.0)
    assert world.fate("x") is Fate.WAITING
    if goes == "unload":
        world.ask("o", MoveKind.UNLOAD, "a", grace_s=0.0)
    else:
        world.config(removed=("a",))
    world.run(60.0)
    assert world.fate("x") is Fate.SERVED and served_by(world, "x") == "b"


def test_a_candidate_that_waits_for_its_store_is_turned_to() -> None:
    world = world_with({"a": "ready", "b": "cold"})
    world.arrive("x", "a", "b", choice=FIRST_S, takes_s=None)
    store(world, is_down=True)
    world.finish("x", lost=True)
    assert world.fate("x") is Fate.WAITING and world.scheduler.state.waitlist["x"].model == "b"
