from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from greenroom.core.events import Limits
from greenroom.core.model import Device, DeviceId, ModelId
from greenroom.sim.cases import Case, CaseResult, Prospects, cases, config_for, play, prospects, simulate
from greenroom.sim.config import OWN_PROCESSES, SimConfig, SimModel, Timings
from greenroom.sim.records import SimArrival
from greenroom.sim.results.bottleneck import BOTTLENECKS, Cause, bottleneck
from greenroom.sim.results.effect import Effect, effect, seconds
from greenroom.sim.results.stats import stats_of, waits_of
from greenroom.sim.results.verdict import advice
from greenroom.sim.truth import Delays
from greenroom.sim.workloads import Agents, Mix, Poisson, Recorded, Workload, zipf
from greenroom.sim.world import World
from tests.sim.settings import MANNERS, gpu, host, names, setting, sim_model, sleeper

SMALL = setting(*(sim_model(name) for name in names(4)), devices=(gpu(1_000), host(9_000)))
WORKLOAD = Poisson(Mix(zipf(names(4))), 0.2, 600.0)


def results(*compared: Case, base: SimConfig = SMALL, workload: Workload = WORKLOAD) -> list[CaseResult]:
    return [play(case, base, workload) for case in compared]


def test_a_second_gpu_is_compared_with_the_first() -> None:
    (sentence,) = advice(results(Case("fifo", 1), Case("fifo", 2))).changes
    assert sentence.startswith("A second GPU would take the p95 wait from ")
    assert sentence.endswith(": it helps a lot.")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({"gpus": 1}, {"gpus": 4}, "4 GPUs instead of 1"),
        ({"gpus": 7}, {"gpus": 8}, "An eighth GPU"),
        ({"gpu_mib": 1_000}, {"gpu_mib": 2_000}, "GPUs of 2,000 MiB instead of 1,000"),
        ({"green_room_mib": 0}, {"green_room_mib": 8_000}, "A green room of 8,000 MiB instead of none"),
        ({"green_room_mib": 8_000}, {"green_room_mib": 0}, "No green room instead of 8,000 MiB"),
        ({"concurrency": 4}, {"concurrency": 16}, "A concurrency of 16 instead of 4"),
        ({"policy": "default"}, {"policy": "fifo"}, "The policy fifo instead of default"),
    ],
)
def test_every_change_has_its_words(old: dict[str, Any], new: dict[str, Any], words: str) -> None:
    usual = Case("fifo")
    (sentence,) = advice(results(replace(usual, **old), replace(usual, **new))).changes
    assert sentence.partition(" would ")[0] == words and " the p95 wait " in sentence


def test_each_change_is_spoken_of_once_with_the_rest_as_in_the_first_case() -> None:
    said = advice(results(*cases(["default", "fifo"], [1, 2, 3], [0, 8_000])))
    assert [sentence.split(" would")[0] for sentence in said.changes] == [
        "A second GPU",
        "A third GPU",
        "A green room of 8,000 MiB instead of none",
        "The policy fifo instead of default",
    ]


def test_what_changes_nothing_is_said_to_change_nothing() -> None:
    said = advice(results(Case("fifo", 7), Case("fifo", 8)))
    figures = "the p95 wait at 0.0 s, the mean at 0.2 s, swaps at 4"
    assert said.changes == [f"An eighth GPU would leave {figures}: hardly a difference."]
    assert "None of the changes tried is needed." in said.bottom_line
    (sentence,) = advice([made(Case("fifo", gpus), 0.0) for gpus in (7, 8)]).changes
    assert sentence.endswith(": hardly any request waits either way.")
    assert advice(by_gpus(0.9, 0.2)).changes[0].endswith(": it helps a lot.")


def said_of_first(case: Case, base: SimConfig) -> str:
    (result,) = results(case, base=base, workload=Poisson(Mix(zipf(names(4))), 0.2, 10.0))
    return advice([result]).bottom_line[0].partition(" (")[0]


@pytest.mark.parametrize(
    "other", [{"policy": "fifo"}, {"gpus": 1}, {"gpu_mib": 2_000}, {"green_room_mib": 8_000}, {"concurrency": 4}]
)
def test_a_first_case_that_is_not_the_configured_machine_is_not_called_that(other: dict[str, Any]) -> None:
    base = replace(SMALL, devices=(gpu(1_000), gpu(1_000, 1), host(9_000)))
    same = Case("default", 2, 0, 1_000, 16)
    for case in (Case("default"), same):
        assert said_of_first(case, base) == "As it is"
    assert said_of_first(replace(same, **other), base) == "In the first case"


def test_a_green_room_is_the_configured_one_if_models_sleep_in_it_as_configured() -> None:
    base = replace(SMALL, models=tuple(map(sleeper, names(4))), limits=Limits(green_room_mib=2_000))
    assert said_of_first(Case("default", green_room_mib=2_000), base) == "As it is"
    assert said_of_first(Case("default", green_room_mib=4_000), base) == "In the first case"


def test_one_case_alone_is_summed_up() -> None:
    said = advice(results(Case("fifo", 1)))
    assert said.changes == [] and len(said.bottom_line) == 2
    assert "requests are served; half of them wait at most" in said.bottom_line[0]


# --- the bottom line --------------------------------------------------------------------------------------------------


def made(case: Case, p95_s: float, lost: int = 0, delays: Delays | None = None) -> CaseResult:
    """A case with these figures; the others are of a real run."""
    (real,) = results(Case("fifo", 1))
    stats = replace(
        real.stats,
        requests=1_000,
        served=1_000 - lost,
        waits=replace(real.stats.waits, p95_s=p95_s),
        delays={"a": delays or Delays(1_000 - lost)},
    )
    return CaseResult(case, stats)


def by_gpus(*p95_s: float) -> list[CaseResult]:
    return [made(Case("fifo", gpus), seconds) for gpus, seconds in enumerate(p95_s, 1)]


def with_room(*figures: tuple[float, int]) -> list[CaseResult]:
    """One GPU and two without a green room, then with one: the p95 wait and the requests lost."""
    compared = ((1, 0), (2, 0), (1, 8_000), (2, 8_000))
    return [made(Case("fifo", *case), *figure) for case, figure in zip(compared, figures, strict=True)]


COST_UNKNOWN = "What hardware costs is not known here."
BUYS: dict[str, tuple[Callable[[], list[CaseResult]], dict[int, str]]] = {
    "the smallest change that is good enough": (
        lambda: by_gpus(60.0, 20.0, 0.8, 0.0),
        {2: "The best single change: 3 GPUs instead of 1. It would take the p95 wait", -1: COST_UNKNOWN},
    ),
    "one that no further one improves on": (
        lambda: by_gpus(60.0, 20.0, 19.5),
        {2: "The best single change: a second GPU."},
    ),
    "as good, and better together": (
        lambda: with_room((60.0, 0), (20.0, 0), (21.0, 0), (5.0, 0)),
        {
            3: "About as good: a green room of 8,000 MiB instead of none.",
            4: "Better still, the best of all cases: fifo, 2 GPUs, green room 8,000 MiB. It serves all 1,000 requests "
            "with a p95 wait of 5.0 s and a mean delay of 0.0 s.",
            5: COST_UNKNOWN,
            -1: COST_UNKNOWN,
        },
    ),
    "only together": (
        lambda: with_room((60.0, 0), (60.0, 0), (60.0, 0), (5.0, 0)),
        {
            2: "None of the changes tried helps noticeably by itself.",
            3: "Together they do, the best of all cases: fifo, 2 GPUs, green room 8,000 MiB.",
        },
    ),
    "more served before shorter waits": (
        lambda: with_room((60.0, 500), (60.0, 100), (10.0, 500), (60.0, 100)),
        {2: "The best single change: a second GPU. It would take requests served from 500 of 1,000 to 900 of 1,0"},
    ),
    "nothing that costs": (
        lambda: [made(Case("fifo", concurrency=4), 60.0), made(Case("fifo", concurrency=16), 20.0)],
        {-1: "The best single change: a concurrency of 16 instead of 4."},
    ),
    "good enough as it is": (lambda: by_gpus(0.9, 0.2), {2: "None of the changes tried is needed."}),
}


@pytest.mark.parametrize("buy", BUYS)
def test_the_best_buy_is_named(buy: str) -> None:
    compared, told = BUYS[buy]
    said = advice(compared()).bottom_line
    assert all(said[line].startswith(text) for line, text in told.items()), said


def test_many_steps_do_not_add_up_to_requests_that_are_lost() -> None:
    """Each serves about as many as the one before, with shorter waits; the last loses a tenth."""
    compared = [made(Case("fifo", gpus), 60.0 / gpus, lost=4 * (gpus - 1)) for gpus in range(1, 26)]
    said = advice(compared)
    assert all(one.stats.lost <= 5 for one in said.chosen)
    others = [made(Case("fifo", concurrency=n), 60.0 / n, lost=4 * (n - 1)) for n in range(1, 26)]
    assert all(one.stats.lost <= 5 for one in advice([others[0], *others]).chosen)


def test_requests_that_are_lost_as_before_are_said_so() -> None:
    (sentence,) = advice([made(Case("fifo", 1), 60.0, lost=500), made(Case("fifo", 2), 20.0, lost=500)]).changes
    assert sentence == (
        "A second GPU would take the p95 wait from 60 s to 20 s, and leave requests served at 500 of 1,000, "
        "the mean at 9.1 s, swaps at 60: it helps a lot."
    )


def test_a_machine_that_never_serves_a_model_is_not_good_enough_though_few_ask_for_it() -> None:
    some, every = made(Case("fifo", gpu_mib=1_000), 0.0, lost=3), made(Case("fifo", gpu_mib=2_000), 0.0)
    starved = {"a": Delays(997), "b": Delays(lost_not_there=3, lost_too_large=3)}
    some = replace(some, stats=replace(some.stats, delays=starved))
    said = advice([some, every])
    assert said.changes[0].endswith(": it helps.")
    assert said.best == "The best single change: GPUs of 2,000 MiB instead of 1,000."
    assert advice([every, some]).changes[0].endswith(": worse.")
    assert "None of the changes tried helps noticeably by itself." in advice([some, some]).bottom_line


def test_requests_that_are_lost_in_one_of_two_cases_are_not_passed_over() -> None:
    said = advice([made(Case("fifo", 1), 0.0, lost=3), made(Case("fifo", 2), 0.0)])
    assert said.changes[0].endswith(": hardly a difference.")
    assert "None of the changes tried is needed." in said.bottom_line


def test_where_the_best_is_not_enough_its_bottleneck_is_named() -> None:
    full, there = Delays(900, lost_full=100), Delays(1_000)
    one, two = made(Case("fifo", 1), 60.0, lost=500), made(Case("fifo", 2), 20.0, lost=100, delays=full)
    (line,) = [line for line in advice([one, two]).bottom_line if line.startswith("The bottleneck then: ")]
    assert line == "The bottleneck then: models are there but full (requests lost: full 100). What may help: " + (
        "a higher concurrency."
    )
    assert not any("then" in line for line in advice([one, made(Case("fifo", 2), 0.5, delays=there)]).bottom_line)


@pytest.mark.parametrize(("late", "words"), [(1, "Fewer than 1%"), (50, "About 5%")])
def test_callers_that_wait_too_long_are_counted_though_they_are_few(late: int, words: str) -> None:
    one = made(Case("fifo"), 1.0)
    waits = waits_of([1.0] * (1_000 - late) + [300.0] * late)
    said = advice([replace(one, stats=replace(one.stats, waits=waits))], wait_max_s=290.0).bottom_line
    assert said[1].startswith(f"{words} of those served wait for more than 4.8 min")


# --- the bottleneck ---------------------------------------------------------------------------------------------------


def named(delays: Delays, p95_s: float = 1.0, lost: int = 0) -> str:
    """The line about the bottleneck of a machine with these delays."""
    return advice([made(Case("fifo"), p95_s, lost, delays)]).bottom_line[1]


@pytest.mark.parametrize(
    ("delays", "cause"),
    [
        (Delays(100, 500.0, 400.0, 300.0), Cause.NOT_THERE),
        (Delays(100, 300.0, 500.0, 400.0), Cause.FULL),
        (Delays(100, 300.0, 400.0, 500.0), Cause.SLOW),
        (Delays(100, 3.0, 2.0, 2.0), None),
        (Delays(), None),
        # Requests that are not served count first.
        (Delays(100, 500.0, 0.0, 0.0, lost_not_there=10, lost_full=20), Cause.FULL),
        (Delays(100, 0.0, 500.0, 0.0, lost_not_there=10), Cause.NOT_THERE),
        # Those that are too large are no part of those not there.
        (Delays(700, lost_not_there=180, lost_full=120, lost_too_large=90), Cause.FULL),
        (Delays(700, lost_not_there=180, lost_full=60, lost_too_large=80), Cause.NOT_THERE),
        (Delays(700, lost_not_there=180, lost_full=80, lost_too_large=100), Cause.TOO_LARGE),
        # So few that the waits of the others count.
        (Delays(1_000, 46_000.0, lost_not_there=3, lost_too_large=3), Cause.NOT_THERE),
    ],
)
def test_the_bottleneck_is_what_costs_most(delays: Delays, cause: Cause | None) -> None:
    assert bottleneck(delays) is cause
    line = named(delays)
    assert line.startswith(f"The bottleneck: {BOTTLENECKS[cause][0]}" if cause else "Hardly any request waits.")


def test_a_bottleneck_found_by_lost_requests_names_those_and_not_the_waits_of_the_others() -> None:
    line = named(Delays(100, 70.0, 0.0, 90.0, lost_not_there=30, lost_full=20))
    assert "(requests lost: not there 30, full 20)" in line and "on average" not in line


@pytest.mark.parametrize(
    ("slow_s", "is_compute", "helps"),
    [
        (100.0, False, "a higher concurrency"),
        (1_000.0, False, "a higher concurrency or faster GPUs"),
        (2_500.0, True, "faster GPUs or a higher concurrency"),
    ],
)
def test_models_that_are_full_of_slow_answers_lack_compute(slow_s: float, is_compute: bool, helps: str) -> None:
    """Answers take 2 s alone."""
    for lost in (0, 100):
        delays = Delays(1_000 - lost, full_s=60_000.0, slow_s=slow_s, lost_full=lost, work_s=2_000.0)
        assert bottleneck(delays) is Cause.FULL
        line = named(delays, 60.0, lost)
        assert ("as answers share the compute of a GPU and are slow" in line) is is_compute
        assert line.endswith(f"What may help: {helps}.")


def test_models_that_slow_each_other_down_may_be_spread_over_more_gpus() -> None:
    one = made(Case("fifo"), 0.0)
    delays = dict.fromkeys("ab", Delays(500, full_s=60_000.0, slow_s=2_000.0, work_s=1_000.0))
    one = replace(one, stats=replace(one.stats, delays=delays))
    assert advice([one]).bottom_line[1].endswith("What may help: faster GPUs, more GPUs or a higher concurrency.")
    assert "more GPUs" not in advice([replace(one, prospects=Prospects(spreading=False))]).bottom_line[1]
    fixed = replace(one, prospects=Prospects(more_gpus=False, spreading=False, other_gpus=True))
    assert "faster GPUs, letting models use other GPUs (devices) or " in advice([fixed]).bottom_line[1]


GPU1 = DeviceId("gpu1")
SMALL_GPU, LARGE_GPU, OTHER_LARGE = gpu(1_000), gpu(4_000, 1), gpu(4_000, 2)


@pytest.mark.parametrize(
    ("models", "gpus", "expected"),
    [
        ([sim_model("a"), sim_model("b")], [LARGE_GPU], Prospects()),
        # Each has one to itself.
        ([sim_model("a"), sim_model("b")], [LARGE_GPU, OTHER_LARGE], Prospects(spreading=False)),
        # Both fit on the larger one only, or one of them takes both.
        ([sim_model("a", 2_000), sim_model("b", 2_000)], [SMALL_GPU, LARGE_GPU], Prospects()),
        ([sim_model("a", 5_000, can_split=True), sim_model("b")], [SMALL_GPU, LARGE_GPU], Prospects(preloading=False)),
        ([sim_model("a", preload=True), sim_model("b", pinned=True)], [LARGE_GPU], Prospects(preloading=False)),
        # Only those without `devices` may use a further one; what runs on the host does not.
        ([sim_model("a", devices=(GPU1,)), sim_model("b")], [LARGE_GPU], Prospects()),
        (
            [sim_model("a", devices=(GPU1,)), sim_model("b", 0)],
            [LARGE_GPU, OTHER_LARGE],
            Prospects(more_gpus=False, spreading=False, other_gpus=True),
        ),
        # The GPU that it names is not there, so the other one has all to itself.
        (
            [sim_model("a", devices=(GPU1,)), sim_model("b")],
            [SMALL_GPU],
            Prospects(spreading=False, absent_gpus={"a": (GPU1,)}),
        ),
    ],
)
def test_prospects_are_what_models_could_use(models: list[SimModel], gpus: list[Device], expected: Prospects) -> None:
    assert prospects(setting(*models, devices=tuple(gpus))) == expected


@pytest.mark.parametrize(("green_room_mib", "lacks"), [(0, True), (1_000, True), (2_000, False)])
def test_a_green_room_that_holds_all_models_need_not_be_larger(green_room_mib: int, lacks: bool) -> None:
    config = config_for(Case("fifo", green_room_mib=green_room_mib), setting(sim_model("a"), sim_model("b")))
    assert prospects(config).green_room is lacks
    one = replace(made(Case("fifo"), 9.0, delays=Delays(100, not_there_s=900.0)), prospects=prospects(config))
    assert ("a larger green room" in advice([one]).bottom_line[1]) is lacks


def test_models_with_gpus_of_their_own_may_need_larger_ones_though_further_ones_do_not_help() -> None:
    one, two = (made(Case("fifo", gpus=count), 9.0, delays=Delays(100, not_there_s=900.0)) for count in (1, 2))
    said = advice([one, two]).bottom_line[1]
    assert "more GPUs" not in said and "larger GPUs" in said
    fixed = [replace(result, prospects=Prospects(more_gpus=False, spreading=False)) for result in (one, two)]
    said = advice(fixed).bottom_line[1]
    assert "more GPUs" not in said and "larger GPUs" in said


def test_a_second_gpu_is_used_though_the_first_holds_all_models() -> None:
    """They share its compute, so that two GPUs serve them twice as fast."""
    timings = Timings(load_s=1.0, concurrency=4, speed=OWN_PROCESSES)
    base = setting(*(sim_model(name, timings=timings) for name in "abcd"), devices=(gpu(8_000),))
    load = Poisson(Mix(zipf("abcd")), 1.0, 600.0)
    one, two = results(Case("default", gpus=1), Case("default", gpus=2), base=base, workload=load)
    assert one.stats.all_delays.slow_s > 2 * two.stats.all_delays.slow_s
    assert advice([one, two]).bottom_line[2].startswith("The best single change: a second GPU.")


def test_first_loads_are_not_mended_by_memory() -> None:
    base = replace(SMALL, devices=(gpu(4_000),))
    one, patient = (
        results(Case("fifo"), base=tried, workload=Poisson(Mix(zipf(names(4))), 0.2, 100.0))[0]
        for tried in (replace(base, patience_s=3.0), base)
    )
    assert (one.stats.loads, one.stats.unloads) == (4, 0) and one.stats.lost
    told = "What may help: preloading models (preload: true) or faster loads."
    for result, shares in ((one, "requests lost: not there"), (patient, "on average not there")):
        line = advice([result]).bottom_line[1]
        assert line.startswith(f"The bottleneck: models are loaded for the first time ({shares} ")
        assert line.endswith(told)


def test_first_loads_are_a_part_of_those_not_there_but_not_of_those_too_large() -> None:
    line = named(Delays(700, lost_not_there=180, lost_too_large=80, lost_first_load=85), lost=180)
    assert line.startswith("The bottleneck: models are loaded for the first time ")


def test_models_that_left_when_idle_are_not_mended_by_gpu_memory() -> None:
    """Both fit. Each request comes after its model has been idle for 60 s, but for the first."""
    models = [sim_model(name, ttl_s=60.0) for name in "ab"]
    for patience_s, shares in ((None, "on average not there"), (3.0, "requests lost: not there")):
        world = World(replace(setting(*models, devices=(gpu(2_000),)), patience_s=patience_s))
        world.feed(SimArrival(100.0 * number, ModelId("ab"[number % 2]), 0, 1) for number in range(20))
        world.run()
        result = CaseResult(Case("fifo"), stats_of(world))
        line = advice([result]).bottom_line[1]
        assert line.startswith(f"The bottleneck: models leave when they are idle and have to come back ({shares} ")
        assert line.endswith("(ttl_s, stay_warm) or letting models sleep in a larger green room.")
        if patience_s is None:
            assert (result.stats.loads, result.stats.all_delays.idle_load_s) == (20, 18 * 5.0)


def test_a_model_that_is_just_leaving_is_not_there_and_not_full() -> None:
    """It leaves after it has been idle for 60 s, which takes 20 s; a request that comes meanwhile is given up."""
    model = sim_model("a", ttl_s=60.0, timings=replace(MANNERS, unload_s=20.0))
    world = World(replace(setting(model), patience_s=6.0))
    world.feed(SimArrival(at, ModelId("a"), 0, 1) for at in (0.0, 70.0))
    world.run()
    delays = stats_of(world).all_delays
    assert (delays.served, delays.lost_not_there, delays.lost_full, delays.lost_idle_load) == (1, 1, 0, 1)


def test_a_model_that_made_room_for_another_did_not_leave_because_it_was_idle() -> None:
    world = World(setting(*(sim_model(name, ttl_s=600.0) for name in "ab")))
    world.feed(SimArrival(100.0 * number, ModelId("ab"[number % 2]), 0, 1) for number in range(20))
    world.run()
    result = CaseResult(Case("fifo"), stats_of(world))
    assert result.stats.loads == 20 and not result.stats.all_delays.idle_load_s
    assert "larger GPUs" in advice([result]).bottom_line[1]


def test_memory_may_help_a_model_that_waits_for_room_before_its_first_load() -> None:
    """The first request is answered for 100 s; the second model is there 5 s after it has left."""
    world = World(setting(sim_model("a"), sim_model("b")))
    for name in ("a", "b"):
        world.arrive(ModelId(name), 0, 10_000)
    world.run()
    delays = stats_of(world).delays
    assert (delays["a"].first_load_s, delays["a"].not_there_s) == (5.0, 5.0)
    assert (delays["b"].first_load_s, delays["b"].not_there_s) == (5.0, 111.0)
    assert "larger GPUs" in advice([CaseResult(Case("fifo"), stats_of(world))]).bottom_line[1]


NOT_THERE, ROOM = "models are not there", "larger GPUs, a larger green room"


@pytest.mark.parametrize(
    ("delays", "what", "may_help"),
    [
        # A model that is full and never idle keeps the other one out.
        (
            Delays(1_000, not_there_s=168_000.0, full_s=86_000.0, slow_s=100.0, work_s=5_000.0),
            NOT_THERE,
            f"{ROOM} or a higher concurrency",
        ),
        (Delays(1_000, not_there_s=168_000.0, full_s=20_000.0), NOT_THERE, "larger GPUs or a larger green room"),
        (Delays(1_000, not_there_s=7_600.0, slow_s=5_000.0, work_s=9_000.0), NOT_THERE, f"{ROOM} or faster GPUs"),
        (
            Delays(1_000, not_there_s=300.0, full_s=1_600.0, slow_s=3_500.0, work_s=9_000.0),
            "answers share",
            "faster GPUs or a higher concurrency",
        ),
        (Delays(1_000, lost_not_there=300, lost_full=200), NOT_THERE, f"{ROOM} or a higher concurrency"),
        # What may help these models alone is not mixed with what may help others.
        (
            Delays(1_000, lost_not_there=300, lost_kept_out=200, lost_full=100),
            "models find no room beside pinned ones",
            "more or larger GPUs or unpinning models (pinned)",
        ),
    ],
)
def test_remedies_of_all_causes_that_weigh_much_are_named(delays: Delays, what: str, may_help: str) -> None:
    said = named(delays, 60.0)
    assert what in said and said.endswith(f"What may help: {may_help}.")


def test_preloading_is_advised_only_where_models_fit_and_are_not_preloaded() -> None:
    first = made(Case("fifo"), 60.0, delays=Delays(1_000, not_there_s=60_000.0, first_load_s=60_000.0))
    assert advice([first]).bottom_line[1].endswith("What may help: preloading models (preload: true) or faster loads.")
    known = replace(first, prospects=Prospects(preloading=False))
    assert advice([known]).bottom_line[1].endswith("What may help: faster loads.")


def test_what_was_tried_and_does_not_help_is_not_said_to_help() -> None:
    not_there = Delays(1_000, not_there_s=60_000.0)
    first, second_gpu, room = (
        made(case, p95_s, delays=not_there)
        for case, p95_s in ((Case("fifo", 1, 0), 60.0), (Case("fifo", 2, 0), 20.0), (Case("fifo", 1, 8_000), 60.0))
    )
    both = made(Case("fifo", 2, 8_000), 20.0, delays=not_there)
    compared = [first, second_gpu, room, both]
    assert advice(compared).bottom_line[1].endswith("What may help: more GPUs or larger GPUs.")
    # With two GPUs as with one; and no case has more of them.
    assert advice(compared).bottom_line[3].startswith("The bottleneck then: ")
    assert advice(compared).bottom_line[3].endswith("What may help: larger GPUs.")
    said = advice([first, replace(second_gpu, stats=first.stats), room, both]).bottom_line[1]
    assert said.endswith("What may help: larger GPUs."), "these were not tried"
    # Less of it says nothing.
    assert "a larger green room" in advice([room, both, first, second_gpu]).bottom_line[1]


def test_models_that_are_never_served_are_named() -> None:
    starved = {"a": Delays(600), "b": Delays(lost_not_there=300), "c": Delays(lost_full=100)}
    one = made(Case("fifo"), 1.0, lost=400)
    said = advice([replace(one, stats=replace(one.stats, delays=starved))]).bottom_line
    assert said[-1] == "No request for b, c is served (400 lost)."


def test_models_that_fit_nowhere_are_named() -> None:
    base = replace(SMALL, models=(sim_model("m0", 2_000), *SMALL.models[1:]))
    (one,) = results(Case("fifo", 1), base=base)
    assert one.stats.lost and one.stats.rejected == {"too_large": one.stats.delays["m0"].lost_too_large}
    said = advice([one]).bottom_line
    assert said[1].startswith("The bottleneck: models fit on no GPU that they may use (requests lost: too large ")
    assert said[1].endswith("What may help: larger GPUs.")
    assert said[2] == f"m0 fits on no GPU that it may use: {one.stats.lost} requests for it cannot be served."


@pytest.mark.parametrize(("devices", "named"), [((GPU1,), "gpu1"), ((DeviceId("gpu3"), GPU1), "gpu3, gpu1")])
def test_a_model_that_names_only_gpus_that_are_not_there_is_told_so(devices: tuple[DeviceId, ...], named: str) -> None:
    base = replace(SMALL, models=(sim_model("m0", devices=devices), *SMALL.models[1:]))
    one, larger, two = results(Case("fifo", 1), Case("fifo", 1, gpu_mib=8_000), Case("fifo", 2), base=base)
    lost = one.stats.delays["m0"].lost
    assert one.stats.lost == lost and one.stats.delays["m0"].lost_no_gpu == lost
    said = advice([one]).bottom_line
    assert said[1:] == [
        f"The bottleneck: models may use only GPUs that are not there (requests lost: no such GPU {lost}).",
        f"m0 names only GPUs that this machine does not have ({named}): {lost} requests for it cannot be served. "
        "Change its devices, or the GPUs.",
    ]
    assert "None of the changes tried helps noticeably by itself." not in advice([one, two]).bottom_line
    assert not two.stats.lost and larger.stats.lost == lost


def test_models_that_name_only_gpus_that_are_not_there_are_named_together() -> None:
    absent = [sim_model(name, devices=(DeviceId(f"gpu{number}"),)) for number, name in ((3, "m0"), (2, "m1"))]
    (one,) = results(Case("fifo", 1), base=replace(SMALL, models=(*absent, *SMALL.models[2:])))
    (line,) = [line for line in advice([one]).bottom_line if line.startswith("m0, m1 ")]
    assert line.startswith("m0, m1 name only GPUs that this machine does not have (gpu3, gpu2): ")
    assert line.endswith(" requests for them cannot be served. Change their devices, or the GPUs.")


def test_models_that_pinned_ones_keep_out_are_told_from_those_that_are_too_large() -> None:
    """The pinned model is there first; the other would fit, as it does on a second GPU."""
    base = setting(sim_model("a", pinned=True, preload=True), sim_model("b"))
    asked = Recorded([SimArrival(10.0 + number, ModelId("b"), 0, 1) for number in range(4)])
    one, two = results(Case("fifo", 1), Case("fifo", 2), base=base, workload=asked)
    assert (one.stats.lost, two.stats.lost) == (4, 0)
    said = advice([one]).bottom_line
    assert said[1].startswith("The bottleneck: models find no room beside pinned ones (requests lost: kept out 4).")
    assert said[1].endswith("What may help: more or larger GPUs or unpinning models (pinned).")
    assert said[2:] == ["b finds no room beside pinned models: 4 requests for it cannot be served."]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        *((0.0, "0.0 s"), (0.44, "0.4 s"), (12.3, "12 s"), (150.0, "2.5 min"), (9_000.0, "2.5 h")),
        # Halves go up, also where a sum misses them by a hair. A table has 17.5 s for each of the first three.
        *((17.5, "18 s"), (17.499_999_999, "18 s"), (17.46, "18 s"), (16.5, "17 s"), (17.44, "17 s")),
        *((9.96, "10 s"), (135.0, "2.3 min"), (8_100.0, "2.3 h")),
    ],
)
def test_times_are_said_as_people_say_them(value: float, told: str) -> None:
    assert seconds(value) == told


# --- requests that are not served count -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_gpu_that_serves_twice_as_many_helps_though_waits_stay_as_long() -> None:
    """Callers give up after a minute, so with one GPU as with two those served waited up to a minute."""
    base = replace(SMALL, patience_s=60.0)
    busy = Poisson(Mix(zipf(names(4))), 30.0, 300.0)
    one, two = results(Case("fifo", 1), Case("fifo", 2), base=base, workload=busy)
    assert two.stats.served > 1.5 * one.stats.served and one.stats.requests == two.stats.requests
    assert two.stats.waits.p95_s == pytest.approx(one.stats.waits.p95_s, rel=0.05)
    said = advice([one, two])
    figures = f"from {one.stats.served:,} of {one.stats.requests:,} to {two.stats.served:,} of {one.stats.requests:,}"
    (sentence,) = said.changes
    assert f"requests served {figures}, the p95 wait" in sentence and "it helps" in sentence
    best = f"The best single change: a second GPU. It would take requests served {figures}"
    assert any(line.startswith(best) for line in said.bottom_line)


def test_short_waits_of_the_few_that_are_served_are_no_gain() -> None:
    (one,) = results(Case("fifo", 1))
    waits = replace(one.stats.waits, p95_s=one.stats.waits.p95_s / 10)
    fewer = replace(one.stats, served=one.stats.served * 9 // 10, waits=waits)
    assert effect(one.stats, fewer) is Effect.WORSE and effect(fewer, one.stats) is Effect.MUCH_BETTER


def test_agents_that_get_more_answers_in_the_same_time_are_better_off() -> None:
    """They ask again after each answer: all are served in both cases, and there are more of them."""
    loops = Agents(Mix(zipf(names(4))), 8, 600.0)
    slow, quick = (simulate(replace(SMALL, devices=(gpu(mib), host(9_000))), loops) for mib in (1_000, 4_000))
    assert slow.lost == quick.lost == 0 and quick.served > 1.5 * slow.served
    even = replace(quick, waits=slow.waits)
    assert effect(slow, even) is Effect.MUCH_BETTER and effect(even, slow) is Effect.WORSE


def test_where_nothing_is_served_there_is_no_wait_to_speak_of() -> None:
    too_small = replace(SMALL, devices=(gpu(500), host(9_000)))
    none, all_served = results(Case("fifo", 1), base=too_small) + results(Case("fifo", 2))
    assert none.stats.served == 0
    said, waits_s = advice([none, all_served]), all_served.stats.waits
    p95, mean = seconds(waits_s.p95_s), seconds(waits_s.mean_s)
    waits = f", with a p95 wait of {p95} and a mean of {mean} where none was served before"
    for sentence in (said.changes[0], next(line for line in said.bottom_line if line.startswith("The best single"))):
        assert "swaps from 0 to " in sentence and waits in sentence and "-" not in sentence
    assert said.changes[0].endswith(f"{waits}: it helps a lot.")
    (sentence,) = advice([all_served, none]).changes
    assert sentence.endswith(f"; none is served then, where the p95 wait was {p95}: worse.")
    slow = made(Case("fifo", 3), 1.0, delays=Delays(1_000, slow_s=800.0))
    assert "what sharing a GPU adds" not in advice([none, slow]).changes[0]


def test_a_change_that_only_makes_answers_faster_helps() -> None:
    slow, fast = (
        made(Case("fifo", gpus), 0.0, delays=Delays(1_000, slow_s=s)) for gpus, s in ((1, 3_900.0), (2, 100.0))
    )
    assert effect(slow.stats, fast.stats) is Effect.MUCH_BETTER and effect(fast.stats, slow.stats) is Effect.WORSE
    said, gain = advice([slow, fast]), "what sharing a GPU adds to an answer from 3.9 s to 0.1 s"
    assert gain in said.changes[0] and said.changes[0].endswith("it helps a lot.")
    assert said.best == "The best single change: a second GPU."
    assert any(line.startswith(said.best) and gain in line for line in said.bottom_line)


def test_slow_answers_are_not_called_no_wait() -> None:
    slow = Delays(1_000, slow_s=18_000.0)
    said = advice([made(Case("fifo", gpus), 0.0, delays=slow) for gpus in (1, 2)])
    assert said.changes[0].endswith(": hardly a difference.")
    assert "None of the changes tried helps noticeably by itself." in said.bottom_line


def test_a_little_slower_is_not_worse_where_waits_are_much_longer() -> None:
    before, after = (
        made(Case("fifo", gpus), 139.0, delays=Delays(1_000, not_there_s=not_there_s, slow_s=slow_s))
        for gpus, not_there_s, slow_s in ((1, 53_000.0, 1_100.0), (2, 52_000.0, 2_000.0))
    )
    assert effect(before.stats, after.stats) is Effect.NONE


def test_two_cases_that_serve_nothing_are_not_said_to_let_none_wait() -> None:
    too_small = replace(SMALL, devices=(gpu(500), host(9_000)))
    (sentence,) = advice(results(Case("fifo", 1), Case("fifo", 2), base=too_small)).changes
    assert sentence.endswith(" would leave requests served at 0 of 99, swaps at 0: hardly a difference.")
