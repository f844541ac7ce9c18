"""What is written down can be read again: rows as CSV, any event exactly; and gaps are never overlooked."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core import effects, events
from greenroom.core.effects import Effects, OpOutcome, RejectCode, Rejection, because
from greenroom.core.events import (
    ConfigChanged,
    Event,
    Learned,
    RequestArrived,
    RequestGone,
    ServeDone,
    Timer,
    TimerKind,
)
from greenroom.core.model import LeaseId, ModelId, Move, MoveId, MoveKind, OpId, RequestId, SlotId
from greenroom.runtime.record.recording import (
    ActivityRecorder,
    EventRecorder,
    decode,
    encode,
    read,
    read_events,
)
from greenroom.telemetry.activity import Record
from tests.full_disk import full_disk
from tests.waiting import until

HI = because("hi", number=1)
MOVE = Move(MoveId("m-1"), MoveKind.LOAD, SlotId("s-1"), ModelId("a"), 1, {}, 0.5)
# Every effect there is, and something to ask it with.
ASKED: dict[str, tuple[Any, ...]] = {
    "grant": (RequestId("r"), SlotId("s"), HI),
    "reject": (RequestId("r"), Rejection(RejectCode.LOST, ModelId("a")), HI),
    "cut": (RequestId("r"), HI),
    "move": (MOVE, HI),
    "abort": (MoveId("m-1"), HI),
    "answer": (OpId("op"), OpOutcome.DONE, HI),
    "recall": (LeaseId("l"), 12.5, HI),
    "set_timer": (Timer(TimerKind.IDLE, "s"), None, HI),
}


class Heard:
    """Writes down every effect it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *said: self.asked.append((name, said))


async def recording_to(path: Path, **options: Any) -> EventRecorder:
    recorder = EventRecorder(path, **options)
    await recorder.open()
    return recorder


def gone(number: int) -> Event:
    return RequestGone(number / 3, RequestId(f"r-{number}"))


# --- events ---------------------------------------------------------------------------------------------------------


async def test_events_and_effects_come_back_in_order(tmp_path: Path) -> None:
    path, heard = tmp_path / "events", Heard()
    recorder = await recording_to(path)
    effects = recorder.watching(cast(Effects, heard))
    events = [gone(1), ServeDone(0.1 + 0.2, RequestId("r-2"), lost_before_first_byte=True), gone(3)]
    for event in events:
        recorder.add(event)
    for name, said in ASKED.items():
        getattr(effects, name)(*said)
    await recorder.close()
    assert heard.asked == list(ASKED.items()), "everything is passed on as it is"
    recording = read(path)
    assert recording.events == events == read_events(path)
    assert recording.effects == list(ASKED.items())
    assert recording.incomplete is None


async def test_an_effect_may_be_asked_for_by_the_names_of_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "events"
    heard: list[object] = []

    class Named(Heard):
        def grant(self, request: RequestId, slot: SlotId, reason: object) -> None:
            heard.append((request, slot, reason))

    request, slot, reason = ASKED["grant"]
    recorder = await recording_to(path)
    recorder.watching(cast(Effects, Named())).grant(request, slot, reason=reason)
    await recorder.close()
    assert heard == [(request, slot, reason)] and read(path).effects == [("grant", ASKED["grant"])]


def test_every_effect_the_core_can_ask_for_is_watched() -> None:
    wanted = {name for name in vars(Effects) if not name.startswith("_")}
    assert wanted == set(ASKED)


async def test_earlier_recording_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for number in (1, 2):
        recorder = await recording_to(path)
        recorder.add(gone(number))
        await recorder.close()
    assert (read_events(tmp_path / "events.1"), read_events(path)) == ([gone(1)], [gone(2)])


async def test_starts_that_fail_do_not_push_out_the_last_real_recording(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for number in (1, 2):
        recorder = await recording_to(path)
        recorder.add(gone(number))
        await recorder.close()
    for _ in range(3):
        # One that ended in good order, one that did not end at all.
        await (await recording_to(path)).close()
        await recording_to(path)
    assert (read_events(tmp_path / "events.1"), read(path).events) == ([gone(2)], [])


async def test_recording_that_loses_an_event_ends_there_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "events"
    recorder = await recording_to(path, waiting_max=2)
    for number in range(5):
        recorder.add(gone(number))
    await recorder.close()
    recording = read(path)
    assert recording.events == [gone(0), gone(1)]
    assert recording.incomplete == "the disk was too slow or full"
    assert "incomplete" in json.loads(path.read_text().splitlines()[-1])
    with pytest.raises(ValueError, match="is incomplete: the disk was too slow"):
        read_events(path)


async def test_recording_on_a_disk_that_was_full_for_a_while_has_no_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events"
    recorder = await recording_to(path)
    recorder.add(gone(1))
    await until(lambda: '"n":1' in path.read_text(), "the first is written")
    with full_disk(path.stat().st_size):
        recorder.add(gone(2))
        await until(lambda: "recording failed" in capsys.readouterr().err, "the second cannot be written")
    recorder.add(gone(3))
    await recorder.close()
    recording = read(path)
    assert recording.events == [gone(1), gone(2), gone(3)]
    assert recording.incomplete is None


async def test_recording_that_has_grown_too_large_ends_there(tmp_path: Path) -> None:
    path = tmp_path / "events"
    recorder = await recording_to(path, bytes_max=40)
    recorder.add(gone(1))
    await until(lambda: recorder._file.is_full, "the first is written")
    recorder.add(gone(2))
    await recorder.close()
    assert (read(path).events, read(path).incomplete) == ([gone(1)], "the file is as large as it may be")


async def test_gap_half_a_line_and_a_missing_end_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "events"
    recorder = await recording_to(path)
    for number in range(3):
        recorder.add(gone(number))
    await recorder.close()
    head, *lines, end = path.read_text().splitlines(keepends=True)

    def seen(*text: str) -> tuple[int, str | None]:
        path.write_text("".join(text))
        recording = read(path)
        return len(recording.events), recording.incomplete

    assert seen(head, *lines, end) == (3, None)
    assert seen(head, lines[0], lines[2], end) == (1, "lines are missing before line 3")
    assert seen(head, *lines[:2], end) == (2, "lines are missing before line 4")
    assert seen(head, *lines) == (3, "it was not ended")
    assert seen(head, lines[0], lines[1][:-5]) == (1, "the last line was not finished")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a recording"),
        ('{"greenroom_events":2}\n', "not a recording"),
        ('{"greenroom_events":1}\n{"n":1,"event":{"_":"Flood"}}\n', ":2: "),
        ('{"greenroom_events":1}\nnonsense\n', ":2: "),
        ('{"greenroom_events":1}\n[]\n', ":2: "),
    ],
)
def test_what_is_no_recording_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "events"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read(path)


# --- requests -------------------------------------------------------------------------------------------------------


def ended(number: int, **changed: Any) -> Record:
    said: dict[str, Any] = {
        "id": f"r-{number}",
        "model": "qwen/7b",
        "asked_as": "seven",
        "tenant": "lab",
        "route": "chat",
        "priority": 2,
        "arrived_at": 1_700_000_000.1234 + number,
    }
    record = Record(**said)
    for name, value in {"status": 200, "prompt_tokens": 12, "completion_tokens": 34, **changed}.items():
        setattr(record, name, value)
    return record


async def test_an_empty_file_does_not_replace_the_one_kept(tmp_path: Path) -> None:
    path, kept = tmp_path / "activity.csv", tmp_path / "activity.csv.1"
    kept.write_text("keep me")
    path.touch()
    recorder = ActivityRecorder(path)
    await recorder.open()
    await recorder.close()
    assert kept.read_text() == "keep me"


async def test_each_answered_request_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "activity.csv"
    recorder = ActivityRecorder(path)
    await recorder.open()
    recorder.add(ended(1, wait_s=0.25, total_s=1.5))
    recorder.add(ended(2, status=503))
    recorder.add(ended(3, status=499))
    recorder.add(ended(4, tenant='a "b", c', prompt_tokens=None, completion_tokens=None))
    await recorder.close()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = rows
    assert first == {
        "t": "1700000001.123",
        "model": "qwen/7b",
        "prompt_len": "12",
        "output_len": "34",
        "tenant": "lab",
        "priority": "2",
        "wait_s": "0.250",
        "total_s": "1.500",
    }
    assert (last["tenant"], last["prompt_len"], last["output_len"]) == ('a "b", c', "", "")
    assert (last["wait_s"], last["total_s"]) == ("", "")


EVENTS = get_args(Event)


def there_and_back(value: object) -> Any:
    return decode(json.loads(encode(value)))


def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Records of this kind with every field drawn, also those that have defaults."""
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in fields(kind)})


def values(hint: Any) -> st.SearchStrategy[Any]:
    parts = get_args(hint)
    if get_origin(hint) is UnionType:
        return st.one_of([values(part) for part in parts])
    if get_origin(hint) is Mapping:
        return st.dictionaries(values(parts[0]), values(parts[1]), max_size=3)
    if get_origin(hint) is tuple and parts[-1] is Ellipsis:
        return st.lists(values(parts[0]), max_size=3).map(tuple)
    return records(hint) if isinstance(hint, type) and is_dataclass(hint) else st.from_type(hint)


@pytest.mark.parametrize(
    "kind", [*EVENTS, Rejection, effects.Reason, Move, events.Limits], ids=lambda kind: kind.__name__
)
@pytest.mark.pure
def test_every_kind_of_record_comes_back_as_it_was(kind: type[Any]) -> None:
    # A busy machine is slow to make records, which says nothing of them.
    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
    @given(records(kind))
    def check(record: Any) -> None:
        # By what they print, so that what is not equal to itself (nan) compares too, and 1 is not 1.0.
        assert repr(there_and_back(record)) == repr(record)

    check()


def test_floats_enums_and_the_order_of_mappings_are_exact() -> None:
    learned = Learned({MoveKind.WAKE: 0.1 + 0.2, MoveKind.LOAD: 1e-310}, None)
    event = ConfigChanged(1 / 3, learned={ModelId("b"): learned, ModelId("a"): learned})
    back = there_and_back(event)
    assert back == event
    assert list(back.learned) == ["b", "a"]
    assert list(back.learned["a"].moves_s) == [MoveKind.WAKE, MoveKind.LOAD]
    endless = RequestArrived(0.0, RequestId("r"), (ModelId("m"),), give_up_at=float("inf"))
    assert there_and_back(endless) == endless


def test_effects_come_back_with_their_reasons() -> None:
    asked = ("r-1", Rejection(RejectCode.EXPIRED, ModelId("m"), 2.5), because("late", eta_s=2.5, behind=None))
    assert there_and_back(asked) == asked


@pytest.mark.parametrize(
    "said", [{"_": "Nobody"}, {"no": "kind"}, {"_": "RequestGone"}, {"_": "Tier", "is": "upstairs"}, {"_": "map"}]
)
def test_what_is_no_record_is_refused(said: Any) -> None:
    with pytest.raises(ValueError):
        decode(said)
