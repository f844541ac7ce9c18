"""Records of requests: running ones are always found, ended ones for a while."""

from __future__ import annotations

import json
from typing import Any

from greenroom.telemetry.activity import Activity, Record


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
