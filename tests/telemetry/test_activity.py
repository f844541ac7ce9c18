"""Records of requests, and usage that is counted of them: what is not known stays unknown, all of it is bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from greenroom.telemetry.activity import FIGURES, OTHER, Activity, Counts, Record, UsageCounts


def record(request_id: str, model: str = "qwen", **changed: Any) -> Record:
    said: dict[str, Any] = {"asked_as": model, "tenant": "lab", "route": "chat", "arrived_at": 1.0}
    one = Record(id=request_id, model=model, **said)
    for name, value in changed.items():
        setattr(one, name, value)
    return one


def ended(activity: Activity, request_id: str, model: str = "qwen") -> Record:
    one = record(request_id, model)
    activity.begin(one)
    activity.end(one)
    return one


def test_running_request_is_found_and_still_there_after_its_end() -> None:
    activity = Activity()
    one = record("r-1")
    activity.begin(one)
    assert activity.get("r-1") is one
    assert (one.state, len(activity)) == ("waiting", 1)
    activity.end(one)
    assert activity.get("r-1") is one
    assert (one.state, len(activity)) == ("done", 0)


def test_unknown_id_is_none() -> None:
    assert Activity().get("r-1") is None


def test_oldest_ended_is_forgotten_first_and_running_never() -> None:
    activity = Activity(keep_max=3)
    running = record("running")
    activity.begin(running)
    for number in range(10):
        ended(activity, f"r-{number}")
    assert activity.get("running") is running
    assert [activity.get(f"r-{number}") is not None for number in range(10)] == [False] * 7 + [True] * 3


def test_keeping_none_keeps_only_running_ones() -> None:
    activity = Activity(keep_max=0)
    ended(activity, "r-1")
    assert activity.get("r-1") is None


def test_ending_twice_changes_nothing() -> None:
    activity = Activity(keep_max=2)
    one = ended(activity, "r-1")
    ended(activity, "r-2")
    activity.end(one)
    ended(activity, "r-3")
    assert [activity.get(name) is None for name in ("r-1", "r-2", "r-3")] == [True, False, False]


def test_id_used_again_means_the_newest_and_leaks_nothing() -> None:
    activity = Activity()
    first, second = record("same"), record("same")
    activity.begin(first)
    activity.begin(second)
    activity.end(first)
    assert activity.get("same") is second
    activity.end(second)
    assert (activity.get("same"), len(activity), len(activity.recent(10))) == (second, 0, 1)


def test_recent_shows_running_first_then_newest_ended() -> None:
    activity = Activity()
    for name in ("a", "b"):
        ended(activity, name)
    for name in ("c", "d"):
        activity.begin(record(name))
    assert [one.id for one in activity.recent(10)] == ["d", "c", "b", "a"]
    assert [one.id for one in activity.recent(3)] == ["d", "c", "b"]
    assert activity.recent(0) == activity.recent(-1) == []


def test_recent_of_one_model_looks_past_the_others() -> None:
    activity = Activity()
    ended(activity, "a", "minilm")
    for number in range(5):
        ended(activity, f"r-{number}", "qwen")
    assert [one.id for one in activity.recent(1, model="minilm")] == ["a"]


def test_as_dict_has_every_field_and_is_json() -> None:
    said = record("r-1", client="cli", stream=True, first_byte_s=0.25, status=200).as_dict()
    assert " ".join(said) == (
        "id model asked_as tenant client route stream priority arrived_at state slot model_version model_repo_id "
        "wait_s first_byte_s total_s status error_code error_message reason details prompt_tokens completion_tokens "
        "cached_tokens gpu_time_ms audio_s pictures estimated chunks"
    )
    assert json.loads(json.dumps(said)) == said
    assert (said["id"], said["client"], said["first_byte_s"], said["state"]) == ("r-1", "cli", 0.25, "waiting")


DAY = 20_000 * 86_400


def counted(status: int = 200, **known: object) -> Record:
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
    counts.ended("k", "t", "m", counted(), True)
    silent = dict(zip(FIGURES, one(counts).figures(), strict=True))
    unknown = ("prompt_tokens", "cached_tokens", "completion_tokens", "gpu_s", "audio_s", "pictures")
    assert [silent[name] for name in unknown] == [None] * 6
    assert (silent["requests"], silent["uncounted"], silent["answer_s"]) == (1, 1, 2.0)
    counts.ended("k", "t", "m", counted(prompt_tokens=7, completion_tokens=3, gpu_time_ms=1500, audio_s=2.5), False)
    counts.ended("k", "t", "m", counted(prompt_tokens=1, completion_tokens=1, cached_tokens=4, pictures=2), False)
    told = one(counts)
    assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (8, 4, 4)
    assert (told.gpu_s, told.audio_s, told.pictures, told.requests) == (1.5, 2.5, 2, 3)


def test_of_an_estimate_the_prompt_is_not_known() -> None:
    counts, _ = counting()
    counts.ended(
        "", "", "m", counted(499, prompt_tokens=0, completion_tokens=9, cached_tokens=0, estimated=True), False
    )
    left = one(counts)
    assert (left.aborted, left.estimated, left.completion_tokens) == (1, 1, 9)
    assert (left.prompt_tokens, left.cached_tokens) == (None, None)


@pytest.mark.parametrize("figure", [-1, 10**13, 2**70])
def test_a_figure_that_no_answer_can_have_is_not_known(figure: int) -> None:
    counts, _ = counting()
    counts.ended("", "", "m", counted(prompt_tokens=figure, completion_tokens=5), False)
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
    counts.ended("", "", "m", counted(prompt_tokens=5, completion_tokens=1), False)
    taken = counts.take()
    assert not counts.waiting
    counts.ended("", "", "m", counted(prompt_tokens=2), False)
    counts.refused("", "", "n", 400)
    counts.put_back(taken)
    assert {row[3]: found.requests for row, found in counts.waiting.items()} == {"m": 2, "n": 1}
    assert counts.waiting[(DAY, "", "", "m")].prompt_tokens == 7
