"""Usage in memory: what is not known stays unknown, and made-up names are bounded."""

from __future__ import annotations

import pytest

from greenroom.telemetry.activity import FIGURES, OTHER, Counts, Record, UsageCounts

DAY = 20_000 * 86_400


def record(status: int = 200, **known: object) -> Record:
    made = Record(id="r", model="m", asked_as="m", tenant="", route="chat", arrived_at=0.0)
    made.status, made.wait_s, made.total_s = status, 1.0, 3.0
    for name, value in known.items():
        setattr(made, name, value)
    return made


def counting(**bounds: int) -> tuple[UsageCounts, list[float]]:
    """Counts at a time that a test can change. The tenant `named` is configured."""
    now = [float(DAY)]
    return UsageCounts(lambda tenant: tenant == "named", lambda: now[0], **bounds), now


def one(counts: UsageCounts) -> Counts:
    (found,) = counts.waiting.values()
    return found


def names(counts: UsageCounts) -> set[tuple[str, str, str]]:
    return {row[1:] for row in counts.waiting}


def test_sums_are_of_what_is_known_and_none_of_nothing() -> None:
    counts, _ = counting()
    counts.ended("k", "t", "m", record(), True)
    silent = dict(zip(FIGURES, one(counts).figures(), strict=True))
    unknown = ("prompt_tokens", "cached_tokens", "completion_tokens", "gpu_s", "audio_s", "pictures")
    assert [silent[name] for name in unknown] == [None] * 6
    assert (silent["requests"], silent["uncounted"], silent["answer_s"]) == (1, 1, 2.0)
    counts.ended("k", "t", "m", record(prompt_tokens=7, completion_tokens=3, gpu_time_ms=1500, audio_s=2.5), False)
    counts.ended("k", "t", "m", record(prompt_tokens=1, completion_tokens=1, cached_tokens=4, pictures=2), False)
    told = one(counts)
    assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (8, 4, 4)
    assert (told.gpu_s, told.audio_s, told.pictures, told.requests) == (1.5, 2.5, 2, 3)


def test_of_an_estimate_the_prompt_is_not_known() -> None:
    counts, _ = counting()
    counts.ended("", "", "m", record(499, prompt_tokens=0, completion_tokens=9, cached_tokens=0, estimated=True), False)
    left = one(counts)
    assert (left.aborted, left.estimated, left.completion_tokens) == (1, 1, 9)
    assert (left.prompt_tokens, left.cached_tokens) == (None, None)


@pytest.mark.parametrize("figure", [-1, 10**13, 2**70])
def test_a_figure_that_no_answer_can_have_is_not_known(figure: int) -> None:
    counts, _ = counting()
    counts.ended("", "", "m", record(prompt_tokens=figure, completion_tokens=5), False)
    assert (one(counts).prompt_tokens, one(counts).completion_tokens) == (None, 5)


def test_errors_are_counted_by_their_class() -> None:
    counts, _ = counting()
    for status in (200, 400, 404, 429, 429, 499, 500, 503):
        counts.refused("", "", "", status)
    found = one(counts)
    assert (found.requests, found.refused, found.rate_limited, found.failed, found.aborted) == (8, 4, 2, 2, 1)


def test_made_up_tenants_beyond_the_bound_share_a_row_and_named_ones_do_not() -> None:
    counts, now = counting(made_up_max=2)
    for tenant in ("a", "b", "c", "d", "named", ""):
        counts.refused("", tenant, "m", 400)
    counts.refused("key", "of-a-key", "m", 400)
    kept = {("", tenant, "m") for tenant in ("a", "b", "named", "")}
    assert names(counts) == kept | {("", OTHER, "m"), ("key", "of-a-key", "m")}
    assert counts.waiting[(DAY, "", OTHER, "m")].requests == 2
    counts.take()
    now[0] += 7200
    counts.refused("", "e", "m", 400)
    assert names(counts) == {("", OTHER, "m")}, "the bound is the day's, not the hour's"
    counts.take()
    now[0] += 86_400
    counts.refused("", "e", "m", 400)
    assert names(counts) == {("", "e", "m")}


def test_nothing_grows_without_end() -> None:
    counts, _ = counting(names_max=10)
    for number in range(1000):
        counts.refused(f"key-{number}", "t", f"model-{number}", 400)
    assert len(counts.waiting) == 11
    assert counts.waiting[(DAY, OTHER, OTHER, OTHER)].requests == 990
    counts, now = counting(waiting_max=10)
    for number in range(1000):
        now[0] += 60
        counts.refused("", "", f"model-{number}", 400)
    assert len(counts.waiting) <= 10 + 1000 * 60 // 3600 + 1
    assert sum(row.requests for row in counts.waiting.values()) == 1000


def test_names_of_the_day_are_known_after_a_restart() -> None:
    counts, _ = counting(made_up_max=2)
    counts.recall([("", "a", "m"), ("", "b", "m")])
    for tenant in ("a", "b", "c"):
        counts.refused("", tenant, "m", 400)
    assert names(counts) == {("", "a", "m"), ("", "b", "m"), ("", OTHER, "m")}


def test_what_could_not_be_written_is_added_to_what_came_meanwhile() -> None:
    counts, _ = counting()
    counts.ended("", "", "m", record(prompt_tokens=5, completion_tokens=1), False)
    taken = counts.take()
    assert not counts.waiting
    counts.ended("", "", "m", record(prompt_tokens=2), False)
    counts.refused("", "", "n", 400)
    counts.put_back(taken)
    assert {row[3]: found.requests for row, found in counts.waiting.items()} == {"m": 2, "n": 1}
    assert counts.waiting[(DAY, "", "", "m")].prompt_tokens == 7
