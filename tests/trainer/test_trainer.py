"""What a trainer does with replicas that take, refuse, lose or misread an update."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from greenroom.features.versions.desired import DesiredState, read_state, write_state
from greenroom.trainer import Outcome, Patience, Report, Trainer
from tests.standins.dripping import DRIPS, dripping_server
from tests.trainer.fake_replica import FakeReplica

QUICK = Patience(answer_s=5, away_s=0.2, update_s=60, poll_s=0.01)
Make = Callable[..., FakeReplica]


@pytest.fixture
def replica() -> Iterator[Make]:
    made: list[FakeReplica] = []

    def make(number: int = 1, repo_id: str = "org/old", commit: str | None = "c0") -> FakeReplica:
        made.append(FakeReplica(number, repo_id, commit))
        return made[-1]

    yield make
    for one in made:
        one.close()


def trainer(*replicas: FakeReplica | str) -> Trainer:
    urls = [one if isinstance(one, str) else one.url for one in replicas]
    return Trainer(urls, api_key="k", patience=QUICK)


@pytest.fixture
def unreachable() -> Iterator[str]:
    """An address at which nothing listens, and which nothing else can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def outcomes(report: Report) -> list[Outcome]:
    return [result.outcome for result in report.results]


def orders(one: FakeReplica) -> list[str]:
    return [path for method, path, _ in one.calls if method == "POST"]


def test_a_prompt_is_sent_to_all_and_answers_tell_their_version(replica: Make, unreachable: str) -> None:
    first, second = replica(3), replica(4)
    answers = trainer(first, second, unreachable).prompt("hi", max_tokens=5)
    assert [(one.text, one.model_version, one.code) for one in answers] == [
        ("hi!", 3, None),
        ("hi!", 4, None),
        (None, None, "unreachable"),
    ]
    assert first.calls[0][2] == {"prompt": "hi", "max_tokens": 5}


@pytest.mark.parametrize("kind", DRIPS)
def test_an_answer_that_never_ends_is_not_waited_for(kind: str) -> None:
    with dripping_server(kind) as url:
        report = Trainer([url], patience=Patience(answer_s=0.3)).verify()
    assert [result.code for result in report.results] == ["unreachable"]
    assert "did not answer within 0.3 s" in str(report.results[0].message)


def test_a_replica_that_serves_something_else_after_its_update_goes_back_and_is_named(
    replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, liar = replica(3), replica(3)
    answer = liar.answer

    def other(method: str, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        return answer(method, path, {**body, "model_repo_id": "org/other"} if path == "/update-model" else body)

    monkeypatch.setattr(liar, "answer", other)
    report = trainer(honest, liar).update("org/new")
    assert not report.ok and outcomes(report) == [Outcome.ROLLED_BACK, Outcome.ROLLED_BACK]
    assert report.results[1].code == "differs" and liar.serves[1] == honest.serves[1] == "org/old"
    assert report.summary.startswith("1 of 2 replicas did not take org/new")
    kept = trainer(honest, liar).update("org/new", all_or_nothing=False)
    assert outcomes(kept) == [Outcome.SERVES, Outcome.DIFFERS] and "it serves version 6 of org/other" in str(kept)


def test_a_commit_that_was_named_is_what_must_be_served(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, commit = replica(3), "a" * 40
    answer = one.answer

    def other(method: str, path: str, body: Any) -> tuple[int, Any, dict[str, str]]:
        return answer(method, path, {**body, "revision": "b" * 40} if path == "/update-model" else body)

    assert trainer(one).update("org/new", commit).ok
    monkeypatch.setattr(one, "answer", other)
    report = trainer(one).update("org/new", commit)
    assert not report.ok and report.results[0].code == "differs"


# In JSON: Python's own reader takes 1e999 for infinity.
STRANGE = ["1e999", "-1e999", "NaN", "[]", "[7]", "{}", '"7"', "1.5", "true", "-1", str(2**53), str(2**63), "1" * 400]
STRANGE += ['""', r'"\ud800"', f'"{70_000 * "x"}"']


FIELDS = ["model", "model_version", "model_repo_id", "commit", "updating", "desired", "error"]
RIGHT = {("desired", "{}"), ("model", '"7"'), ("model_repo_id", '"7"'), ("commit", '"7"'), ("updating", "true")}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in FIELDS for value in STRANGE if (field, value) not in RIGHT]
)
def test_a_field_of_another_type_is_of_no_gateway_and_reaches_no_state_file(
    replica: Make, tmp_path: Path, field: str, value: str
) -> None:
    gateway, path = replica(3), tmp_path / "state.json"
    gateway.said[field] = value
    assert [result.code for result in trainer(gateway).verify().results] == ["not_a_gateway"]
    following = Trainer([gateway.url, replica(3).url], state_file=str(path), patience=QUICK)
    report = following.update("org/new", all_or_nothing=False)
    assert report.results[0].code == "not_a_gateway"
    assert read_state(str(path)) == DesiredState(4, "org/new")


@pytest.mark.parametrize("value", ["1e999", "[]", "{}", "7", "null", "[" * 100_000, '""', r'"\ud800"'])
@pytest.mark.parametrize("field", ["taskId", "status"])
def test_an_update_told_in_another_shape_is_of_no_gateway(replica: Make, field: str, value: str) -> None:
    one = replica(3)
    one.said[field] = value
    assert [result.code for result in trainer(one).update("org/new").results] == ["not_a_gateway"]


@pytest.mark.parametrize("version", ["²", "9" * 5000, "-1", str(2**60)])
def test_an_answer_to_a_prompt_with_a_strange_version_has_none(
    replica: Make, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    one = replica(3)
    said = {"X-Model-Version": version.encode().decode("latin-1")}
    monkeypatch.setattr(one, "answer", lambda *_: (200, {"choices": [{"text": "hi"}]}, said))
    assert [(answer.text, answer.model_version) for answer in trainer(one).prompt("hi")] == [("hi", None)]


def test_a_state_that_no_replica_would_read_is_not_written(replica: Make, tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    for state in (DesiredState(2**53, "org/new"), DesiredState(1, ""), DesiredState(1, "org/\ud800")):
        with pytest.raises(ValueError):
            write_state(path, state)
    full = Trainer([replica(2**53 - 2).url], state_file=path, patience=QUICK).update("org/new")
    assert outcomes(full) == [Outcome.FAILED] and read_state(path) == DesiredState(2**53 - 1, "org/new")
    report = Trainer([replica(3).url], state_file=path, patience=QUICK).update("org/new")
    assert not report.ok and report.results[0].code == "numbers_used_up"


def test_all_take_one_number_which_is_larger_than_every_earlier_one(replica: Make) -> None:
    first, second = replica(3), replica(7)
    report = trainer(first, second).update("org/new")
    assert report.ok and outcomes(report) == [Outcome.SERVES, Outcome.SERVES]
    assert first.serves == second.serves == (8, "org/new", "c1")
    assert "version 8" in report.summary


def test_what_another_trainer_brought_meanwhile_is_not_taken_for_what_was_asked(
    replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replica()
    answer = one.answer

    def busy_once(method: str, path: str, body: object) -> tuple[int, object, dict[str, str]]:
        if method == "POST" and len(one.versions) == 1:
            one.versions.append((2, "org/new", "step-1"))
            refusal = {"code": "update_in_progress", "message": "being updated", "taskId": "t9"}
            return 409, {"error": refusal}, {}
        return answer(method, path, body)

    monkeypatch.setattr(one, "answer", busy_once)
    report = trainer(one).update("org/new", "step-2")
    assert report.ok and one.serves == (3, "org/new", "step-2")


def test_what_answers_and_is_no_gateway_is_told(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, other = replica(), replica()
    monkeypatch.setattr(other, "answer", lambda *_: (200, {"status": "ok"}, {}))
    asked = trainer(gateway, other)
    assert [result.code for result in asked.verify().results] == [None, "not_a_gateway"]
    assert [result.code for result in asked.update("org/new").results] == [None, "not_a_gateway"]
    assert [answer.code for answer in asked.prompt("hi")] == [None, "not_a_gateway"]


def test_a_replica_that_is_busy_for_a_moment_is_asked_again(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replica()
    answer, busy = one.answer, [429, 502, 503]

    def now_and_then(method: str, path: str, body: object) -> tuple[int, object, dict[str, str]]:
        if method == "GET" and path != "/status" and busy:
            return busy.pop(), {"error": {"code": "queue_full", "message": "full"}}, {}
        return answer(method, path, body)

    monkeypatch.setattr(one, "answer", now_and_then)
    assert trainer(one).update("org/new").ok and not busy


def test_a_tag_that_looks_like_the_beginning_of_a_commit_is_none(replica: Make) -> None:
    one = replica(1, "org/old", "3f5a0000")
    assert trainer(one).reconcile("org/old", "3").ok and one.serves == (2, "org/old", "3")
    two = replica(1, "org/old", "3f5a0000")
    assert trainer(two).reconcile("org/old", "3f5a000").ok and two.serves[0] == 1


def test_the_same_weights_agree_under_different_numbers(replica: Make) -> None:
    assert trainer(replica(3), replica(7)).verify().ok


@pytest.mark.parametrize("other", [("org/other", "c0"), ("org/old", "c9")])
def test_another_repository_or_commit_does_not_agree(replica: Make, other: tuple[str, str]) -> None:
    report = trainer(replica(3), replica(2, *other)).verify()
    assert not report.ok and outcomes(report) == [Outcome.SERVES, Outcome.DIFFERS]


def test_a_replica_that_is_away_does_not_agree(replica: Make, unreachable: str) -> None:
    report = trainer(replica(), unreachable).verify()
    assert not report.ok and (report.results[1].outcome, report.results[1].code) == (Outcome.FAILED, "unreachable")


def test_one_that_fails_lets_the_others_go_back_and_is_named(replica: Make) -> None:
    first, second = replica(3), replica(3)
    second.fails_with = ("fetch_failed", "no such repository")
    report = trainer(first, second).update("org/new")
    assert not report.ok and outcomes(report) == [Outcome.ROLLED_BACK, Outcome.FAILED]
    assert first.serves == (5, "org/old", "c0") and second.serves == (3, "org/old", "c0")
    assert (report.results[1].code, report.results[1].message) == ("fetch_failed", "no such repository")
    assert report.summary == "1 of 2 replicas did not take org/new; the others went back."
    assert f"  {second.url} failed: no such repository; it serves version 3 of org/old (c0)" in str(report).splitlines()


def test_where_all_fail_none_is_said_to_have_gone_back(replica: Make) -> None:
    first, second = replica(3), replica(3)
    first.fails_with = second.fails_with = ("fetch_failed", "no such repository")
    assert trainer(first, second).update("org/new").summary == "2 of 2 replicas did not take org/new."


def test_verify_tells_the_error_of_the_last_update_beside_what_serves(replica: Make) -> None:
    first = replica(3)
    first.error = {"code": "fetch_failed", "message": "no such repository"}
    said = f"{first.url} serves version 3 of org/old (c0); its last update failed: no such repository"
    assert str(trainer(first).verify().results[0]) == said


def test_one_that_does_not_go_back_is_named(replica: Make) -> None:
    first, second, third = replica(3), replica(3), replica(3)
    first.refuses_to_go_back, third.fails_with = True, ("fetch_failed", "no such repository")
    report = trainer(first, second, third).update("org/new")
    assert outcomes(report) == [Outcome.FAILED, Outcome.ROLLED_BACK, Outcome.FAILED]
    assert report.results[0].model_repo_id == "org/new" and "it did not go back: both do not fit" in str(report)
    assert report.summary.endswith("1 of the others did not go back.")


def test_one_that_keeps_no_version_goes_back_by_an_update(replica: Make) -> None:
    first, second = replica(3), replica(3)
    first.keeps_nothing, second.fails_with = True, ("warm_up_failed", "it said nothing")
    assert outcomes(trainer(first, second).update("org/new"))[0] is Outcome.ROLLED_BACK
    assert first.serves == (5, "org/old", "c0")


def test_without_all_or_nothing_those_that_took_it_keep_it(replica: Make, unreachable: str) -> None:
    first, second = replica(3), replica(3)
    second.fails_with = ("fetch_failed", "no such repository")
    report = trainer(first, second, unreachable).update("org/new", all_or_nothing=False)
    assert outcomes(report) == [Outcome.SERVES, Outcome.FAILED, Outcome.LOST]
    assert first.serves[1] == "org/new"


def test_nothing_is_asked_for_where_one_cannot_be_asked(replica: Make, unreachable: str) -> None:
    first = replica(3)
    report = trainer(first, unreachable).update("org/new")
    assert outcomes(report) == [Outcome.UNTOUCHED, Outcome.FAILED] and orders(first) == []


@pytest.mark.parametrize("promises", [False, True])
def test_one_that_is_restarted_in_the_middle_is_asked_again_unless_it_serves_it(replica: Make, promises: bool) -> None:
    first = replica(3)
    first.restarts, first.promises_before_restart = 1, promises
    report = trainer(first).update("org/new")
    assert report.ok and first.serves == (4, "org/new", "c1")
    assert len(orders(first)) == (1 if promises else 2)
    assert "it ended during the update" in str(report)


def test_one_that_is_always_restarted_has_failed(replica: Make) -> None:
    first = replica(3)
    first.restarts = 100
    report = trainer(first).update("org/new")
    assert not report.ok and report.results[0].code == "restarted"


def test_a_branch_that_moved_between_two_replicas_is_no_success(replica: Make) -> None:
    first, second = replica(3), replica(3)
    second.finds = "c2"
    report = trainer(first, second).update("org/new")
    assert not report.ok and outcomes(report) == [Outcome.ROLLED_BACK, Outcome.ROLLED_BACK]
    assert report.results[1].code == "commits_differ"


def test_replicas_that_do_not_follow_the_file_are_named_and_the_state_goes_back(replica: Make, tmp_path: Path) -> None:
    first, path = replica(3), str(tmp_path / "state.json")
    write_state(path, DesiredState(8, "org/old"))
    report = Trainer([first.url], state_file=path, patience=QUICK).update("org/new", "main")
    assert outcomes(report) == [Outcome.FAILED] and report.results[0].code == "not_followed"
    assert orders(first) == []
    # The state that was wanted has had number 9.
    assert read_state(path) == DesiredState(10, "org/old", "c0", rollback=True)


def test_reconcile_updates_only_those_that_are_behind_to_the_commit_of_the_newest(replica: Make) -> None:
    first, second = replica(8, "org/new", "c5"), replica(3)
    report = trainer(first, second).reconcile("org/new")
    assert report.ok and orders(first) == []
    assert second.serves == (8, "org/new", "c5")
    assert "1 caught up" in report.summary


def test_reconcile_updates_all_where_none_serves_it_and_then_none(replica: Make) -> None:
    first, second = replica(3), replica(3)
    keeper = trainer(first, second)
    for _ in range(2):
        assert keeper.reconcile("org/new", "main").ok
    assert len(orders(first)) == len(orders(second)) == 1


def test_reconcile_waits_for_weights_that_replicas_are_fetching_themselves(replica: Make) -> None:
    first, second = replica(1, "org/new", "c1"), replica(1, "org/new", "c1")
    keeper = trainer(first, second)
    for fetching, told in (
        ((first, second), [Outcome.DIFFERS, Outcome.DIFFERS]),
        ((second,), [Outcome.SERVES, Outcome.DIFFERS]),
        ((), [Outcome.SERVES, Outcome.SERVES]),
    ):
        for one in (first, second):
            one.fetching = "org/new" if one in fetching else None
        report = keeper.reconcile("org/new")
        assert outcomes(report) == told and report.ok == (not fetching)
        assert str(report).count("it is being updated to org/new") == len(fetching)
    assert orders(first) == orders(second) == []


def test_reconcile_orders_nothing_of_a_replica_that_it_cannot_ask(replica: Make, unreachable: str) -> None:
    first = replica(3)
    report = trainer(first, unreachable).reconcile("org/new")
    # It would take what it is ordered while it starts, beside its own first version.
    assert outcomes(report) == [Outcome.SERVES, Outcome.FAILED] and report.results[1].code == "unreachable"


def test_an_address_that_is_none_is_refused() -> None:
    for wrong in (["ftp://x"], ["http://user:word@x"], []):
        with pytest.raises(ValueError):
            Trainer(wrong)
