from __future__ import annotations

import bz2
import gzip
import lzma
from collections import Counter
from pathlib import Path

import pytest

from greenroom.core.events import RequestArrived, ServeDone
from greenroom.core.model import ModelId, RequestId, TenantId
from greenroom.runtime.record.recording import encode
from greenroom.sim.records import SORTED_MAX, Arrivals, SimArrival
from greenroom.sim.traces import traces
from greenroom.sim.traces.columns import TraceError
from greenroom.sim.traces.traces import Known, read_trace, trace_of

HEADER = "t,model,prompt_len,output_len"


def written(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


LOG = "TIMESTAMP,ContextTokens,GeneratedTokens"
ONES = '"input_length": 1, "output_length": 1'
READ: dict[str, tuple[tuple[str, ...], Known | None, list[SimArrival]]] = {
    "in order of time, from zero": (
        (HEADER, "1700000003.5,b,10,20", "1700000001.5,a,30,0", "", "1700000001.5,b,1,2"),
        None,
        [SimArrival(0.0, "a", 30, 0), SimArrival(0.0, "b", 1, 2), SimArrival(2.0, "b", 10, 20)],
    ),
    "with tenants and priorities": (
        ("tenant, T ,model,priority,output_len,prompt_len", "ann,0,a,high,2,1", ",1,a,,2,1", "bo,2,a,7,2,1"),
        None,
        [SimArrival(0.0, "a", 1, 2, "ann", 0), SimArrival(1.0, "a", 1, 2), SimArrival(2.0, "a", 1, 2, "bo", 7)],
    ),
    "with every priority that was ever recorded": (
        (f"{HEADER},priority", "0,a,1,1,-100", "1,a,1,1,-7", "2,a,1,1,100"),
        None,
        [SimArrival(float(at), "a", 1, 1, "", priority) for at, priority in enumerate((-100, -7, 100))],
    ),
    "an empty length of a log without models is the mean too": (
        (LOG, "2023-11-16,30,5", "2023-11-17,,5"),
        Known(["a"]),
        [SimArrival(0.0, "a", 30, 5), SimArrival(86_400.0, "a", 30, 5)],
    ),
    "other names and priorities of the configuration": (
        (HEADER, "0,old,1,1", "1,b,1,1"),
        Known(["a", "b"], {"old": "a"}, {"a": 2}),
        [SimArrival(0.0, "a", 1, 1, "", 2), SimArrival(1.0, "b", 1, 1)],
    ),
    **{
        f"columns separated by {delimiter!r}": (
            (
                f"{HEADER},note".replace(",", delimiter),
                '0.5,a,10,20,"x"'.replace(",", delimiter),
                "2.5,b,30,40,".replace(",", delimiter),
            ),
            None,
            [SimArrival(0.0, "a", 10, 20), SimArrival(2.0, "b", 30, 40)],
        )
        for delimiter in (";", "\t", "|")
    },
    "a column twice that does not count": ((f"{HEADER},note,note", "0,a,1,1,x,y"), None, [SimArrival(0.0, "a", 1, 1)]),
    # Tables with gaps are often written with all their numbers as fractions.
    "whole lengths, however they are written": (
        (HEADER, "0,a,472.0,18.0", "1,a,,0.0"),
        None,
        [SimArrival(0.0, "a", 472, 18), SimArrival(1.0, "a", 472, 0)],
    ),
    "a model column beside public titles": (
        (f"{LOG},Model", "2023-11-16,3,4,b", "2023-11-17,5,6,a"),
        Known(["a", "b"]),
        [SimArrival(0.0, "b", 3, 4), SimArrival(86_400.0, "a", 5, 6)],
    ),
    "JSON with our own names": (
        ('{"t": 1.5, "model": "b", "prompt_len": 1, "output_len": 2, "tenant": "x", "priority": "low"}',),
        None,
        [SimArrival(0.0, "b", 1, 2, "x", 2)],
    ),
    "JSON may leave out what is not known": (
        (f'{{"timestamp": 2.5, "model": "a", {ONES}}}', f'{{"timestamp": 9.5, "model": "b", {ONES}, "tenant": "x"}}'),
        None,
        [SimArrival(0.0, "a", 1, 1), SimArrival(7.0, "b", 1, 1, "x")],
    ),
    "whole numbers in JSON are seconds if there were too many requests": (
        tuple(f'{{"timestamp": {at}, {ONES}}}' for at in range(3)),
        Known(["a"]),
        [SimArrival(float(at), "a", 1, 1) for at in range(3)],
    ),
    "recordings put together are one": (
        (HEADER, "1,a,1,1", HEADER, "2,a,1,1"),
        None,
        [SimArrival(0.0, "a", 1, 1), SimArrival(1.0, "a", 1, 1)],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_rows_are_read(name: str, tmp_path: Path) -> None:
    lines, known, rows = READ[name]
    assert read_trace(written(tmp_path, *lines), known) == rows


def test_an_empty_length_is_the_mean_of_those_known(tmp_path: Path) -> None:
    trace = trace_of(written(tmp_path, HEADER, "0,a,100,", "1,a,,", "2,a,201, ", "3,a,0,"))
    assert [(row.prompt_len, row.output_len) for row in trace.rows] == [(100, 200), (100, 200), (201, 200), (0, 200)]
    assert trace.remarks == (
        "1 without prompt_len taken as 100 tokens, the mean of the others",
        "4 without output_len taken as 200 tokens, as none is known",
    )
    assert trace_of(written(tmp_path, HEADER, "0,a,0,0")).remarks == ()


def test_rows_for_other_models_are_left_out_and_counted_where_that_is_asked(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, "0,gone,900,1", "5,a,10,1", "6,old,,1", "7,gone,1,1")
    trace = trace_of(file, Known(["a"], {"old": "a"}, skips_others=True))
    assert [(row.at, row.model, row.prompt_len) for row in trace.rows] == [(0.0, "a", 10), (1.0, "a", 10)]
    assert trace.remarks[0] == "2 for models that are not in the configuration left out ('gone' 2)"
    with pytest.raises(TraceError, match="no row in it for a model of the configuration"):
        trace_of(file, Known(["b"], skips_others=True))
    with pytest.raises(TraceError, match=r":2: t is 'x'"):
        trace_of(written(tmp_path, HEADER, "x,a,1,1"), Known(["a"], skips_others=True))


def test_rows_that_name_no_model_are_left_out_and_counted_like_those_of_others(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, "0,,900,1", "5,a,10,1", "6,,1,1")
    trace = trace_of(file, Known(["a"], skips_others=True))
    assert [row.model for row in trace.rows] == ["a"]
    assert trace.remarks[0] == "2 for models that are not in the configuration left out ('' 2)"


def test_a_log_without_models_is_spread_over_those_given(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:{minute:02}:{second:02}.6805900,374,44" for minute in range(50) for second in range(60)]
    file = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", *rows)
    found = read_trace(file, Known(["a", "b", "c"], priorities={"c": 0}), seed=5)
    models = Counter(row.model for row in found)
    assert [name for name, _ in models.most_common()] == ["a", "b", "c"]
    assert models["a"] / models["c"] == pytest.approx(3.0, rel=0.25)
    assert (found[0].at, round(found[-1].at, 3)) == (0.0, 49 * 60 + 59.0)
    assert {row.priority for row in found if row.model == "c"} == {0}
    assert found == read_trace(file, Known(["a", "b", "c"], priorities={"c": 0}), seed=5)
    assert found != read_trace(file, Known(["a", "b", "c"], priorities={"c": 0}), seed=6)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("x,aaa,1,1", "t is 'x', not a number"),
        ("inf,aaa,1,1", "t is 'inf', not a finite number"),
        ("-1,aaa,1,1", "t is '-1', which is negative"),
        ("1,,1,1", "model is empty"),
        ("1,aa,1,1", "there is no model 'aa' in the configuration; did you mean 'aaa'?"),
        ("1,zebra,1,1", "there is no model 'zebra' in the configuration"),
        ("1,aaa,-1,1", "prompt_len is '-1', not a number of tokens"),
        ("1,aaa,1,1.5", "output_len is '1.5', not a number of tokens"),
        ("1,aaa,1,99999999999999999999", "output_len is '99999999999999999999', not a number of tokens"),
        (f"1,aaa,{'9' * 5_000},1", f"prompt_len is '{'9' * 60}' … (5,000 characters), not a number of tokens"),
        (f"1,aaa,1,{'0' * 400}7", f"output_len is '{'0' * 60}' … (401 characters), not a number of tokens"),
        (f"{'9' * 400},aaa,1,1", f"t is '{'9' * 60}' … (400 characters), not a finite number"),
        ("1,aaa,?,1", "prompt_len is '?', not a number of tokens"),
        ("1,aaa,1", "3 values where the header names 4"),
        ("1,aaa,1,1,1", "5 values where the header names 4"),
        ('1,"aaa,1,1', "this is not CSV"),
    ],
)
def test_a_wrong_row_is_told_with_file_and_line(row: str, told: str, tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, "0,aaa,1,1", row)
    with pytest.raises(TraceError) as error:
        read_trace(file, Known(["aaa", "b"]))
    assert error.value.message.startswith(f"{file}:3: {told}")


OWN = '"prompt_len": 1, "output_len": 1'
BY_PRIORITY = "model,prompt_len,output_len,t,priority"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        *(
            ((BY_PRIORITY, f"a,1,1,0,{priority}"), f"priority is '{priority}'")
            for priority in ("soon", "101", "-101", "--1", "-")
        ),
        ((BY_PRIORITY, f"a,1,1,0,{'0' * 5_000}"), "5,000 characters"),
        ((f"{HEADER},tenant", "0,a,1,1,\x07"), ":2: tenant is not a name"),
        ((LOG, "noon,1,1"), ":2: TIMESTAMP is 'noon'"),
        ((f"{HEADER},model", "0,a,1,1,b"), ":1: the header names model twice"),
        (("time,name", "1,a"), "header must name t, model"),
        ((f"{LOG},Model", "2023-11-16,3,4,a", "2023-11-17,5,6,b"), ":3: there is no model 'b' in the configuration"),
        ((HEADER, "2024-05-01 10:00:00,a,1,1", "5,a,1,1"), ":3: t is '5', not a time like"),
        ((HEADER, "5,a,1,1", "2024-05-01 10:00:01,a,1,1"), ":3: t is '2024-.*', not a number"),
        (('[{"timestamp": 1}]',), ":1: this is one JSON document"),
        (('{"timestamp": 1',), ":1: this is not JSON"),
        ((f'{{"t": 1, "model": "a", {OWN}}}', "[" * 100_000), ":2: this is not JSON"),
        (('{"timestamp": 1}',), ":1: the header must name .* there is no prompt_len and no output_len"),
        ((f'{{"t": 1, {OWN}}}', "7"), ":2: this is not a JSON object"),
        ((f'{{"t": 1, {OWN}}}', "", '{"prompt_len": 1}'), ":3: t is '', not a number"),
        (('{"t": 1, "prompt_len": 1.5, "output_len": 1}',), ":1: prompt_len is '1.5', not a number of tokens"),
        (('{"t": 1, "prompt_len": true, "output_len": 1}',), ":1: prompt_len is true, neither text nor a number"),
        ((f'{{"t": 1, "model": ["a"], {OWN}}}',), r':1: model is \["a"\], neither text nor a number'),
        (
            (f'{{"t": 1, "model": {{"a": "{"x" * 100}"}}, {OWN}}}',),
            r':1: model is {"a": "x{53}…, neither text nor a number',
        ),
        *(
            (
                ('{"greenroom_events":1}', f'{{"n":1,"x":{{"_":"RequestArrived"}},"event":{event}}}'),
                ":2: this is not the arrival of a request",
            )
            for event in ('"a"', '{"candidates":7,"now":1}', '{"candidates":[],"now":1}', '{"now":1}')
        ),
    ],
)
def test_what_cannot_be_read_is_told_with_its_line(lines: tuple[str, ...], told: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=told):
        read_trace(written(tmp_path, *lines), Known(["a"]))


def test_a_file_that_is_no_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="names no models"):
        read_trace(written(tmp_path, LOG, "2023-11-16,1,1"))
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"t,model\n\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(binary)


def test_a_trace_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "ROWS_MAX", 2)
    with pytest.raises(TraceError, match="more than 2 rows"):
        read_trace(written(tmp_path, HEADER, "0,a,1,1", "1,a,1,1", "2,a,1,1"))
    with pytest.raises(TraceError, match="more than 2 rows"):
        rows = ("0,a,1,1", "1,b,1,1", "2,b,1,1")
        trace_of(written(tmp_path, HEADER, *rows), Known(["a"], skips_others=True))


# --- public logs ------------------------------------------------------------------------------------------------------


def test_dates_are_read_with_and_without_zone_and_fraction(tmp_path: Path) -> None:
    dates = (
        "2024-05-01T12:00:00+02:00",
        "2024-05-01 10:00:01",
        "2024-05-01T10:00:02.25Z",
        "2024-05-01 10:00:03.1234567",
    )
    trace = trace_of(written(tmp_path, HEADER, *(f"{date},a,1,1" for date in dates)))
    assert [row.at for row in trace.rows] == pytest.approx([0.0, 1.0, 2.25, 3.123456])
    assert trace.columns == "time from t (dates)"
    with pytest.raises(TraceError, match=r":2: t is '2024-.*', a date and no number of ms"):
        trace_of(written(tmp_path, HEADER, f"{dates[1]},a,1,1"), time_unit="ms")


BURSTS = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_a_log_of_services_is_read_in_seconds_and_spread_where_that_is_asked(tmp_path: Path) -> None:
    rows = (
        "5,ChatGPT,472,18,490,Conversation log",
        "45,ChatGPT,1087,230,1317,Conversation log",
        "118,GPT-4,417,0,417,x",
    )
    file = written(tmp_path, BURSTS, *rows)
    trace = trace_of(file, Known(["mine"], {"ChatGPT": "mine"}, skips_others=True))
    assert list(trace.rows) == [SimArrival(0.0, "mine", 472, 18), SimArrival(40.0, "mine", 1087, 230)]
    assert trace.columns == (
        "time from Timestamp in seconds (guessed: whole numbers, one request every 40 s rather than ms; "
        "--time-unit says otherwise); model from Model; prompt_len from Request tokens; "
        "output_len from Response tokens; not used: Total tokens, Log Type"
    )
    assert trace.remarks == ("1 for models that are not in the configuration left out ('GPT-4' 1)",)
    spread = trace_of(file, Known(["a"], spreads=True))
    assert [row.model for row in spread.rows] == ["a", "a", "a"] and "whatever Model says" in spread.columns


def test_lines_of_json_are_read(tmp_path: Path) -> None:
    rows = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}',
        "",
        '{"timestamp": 30535, "input_length": 6472, "output_length": null, "hash_ids": []}',
    )
    trace = trace_of(written(tmp_path, *rows), Known(["a"]))
    assert list(trace.rows) == [SimArrival(0.0, "a", 6955, 52), SimArrival(pytest.approx(3.053), "a", 6472, 52)]
    assert trace.columns == (
        "JSON: time from timestamp in milliseconds (guessed: whole numbers, one request every 3,053 ms rather than s; "
        "--time-unit says otherwise); models drawn from the configuration, the first most often; "
        "prompt_len from input_length; output_len from output_length; not used: hash_ids"
    )


@pytest.mark.parametrize("before", [1, 500])
def test_models_that_only_some_lines_of_json_name_are_never_overlooked(before: int, tmp_path: Path) -> None:
    bare = [f'{{"timestamp": {at}.5, "input_length": 1, "output_length": 1}}' for at in range(before)]
    named = '{"timestamp": 900.5, "input_length": 1, "output_length": 1, "hash": 3, "model": "b"}'
    with pytest.raises(TraceError, match=r":1: model is empty" if before == 1 else r":501: .*'model'.* no line before"):
        read_trace(written(tmp_path, *bare, named), Known(["a", "b"]))
    other = '{"timestamp": 900.5, "input_length": 1, "output_length": 1, "hash": 3}'
    assert len(read_trace(written(tmp_path, *bare, other), Known(["a"]))) == before + 1


def test_where_all_come_at_once_no_unit_is_guessed(tmp_path: Path) -> None:
    rows = ['{"timestamp": 7, "input_length": 1, "output_length": 1}'] * 3
    trace = trace_of(written(tmp_path, *rows), Known(["a"]))
    assert trace.doubt == "" and "all at the same time" in trace.columns


@pytest.mark.parametrize(
    ("title", "times", "unit", "why"),
    [
        ("t", ("0", "100000"), "seconds", "by its title"),
        ("timestamp_ms", ("0", "1"), "milliseconds", "by its title"),
        ("Timestamp MS", ("0", "50"), "milliseconds", "by its title"),
        ("TimestampMs", ("0", "50"), "milliseconds", "by its title"),
        ("timestamp", ("1700000000", "1700000001"), "seconds", "since 1970"),
        ("timestamp", ("1700000000123", "1700000000456"), "milliseconds", "since 1970"),
        ("timestamp", ("1700000000123456789", "1700000000456000000"), "nanoseconds", "since 1970"),
        ("timestamp", ("0.5", "100000.25"), "seconds", "fractions"),
        ("timestamp", ("0", "9", "30"), "seconds", "one request every 15 s"),
        ("timestamp", ("0", "900", "3000"), "milliseconds", "one request every 1,500 ms"),
    ],
)
def test_the_unit_of_times_is_found_and_told(
    title: str, times: tuple[str, ...], unit: str, why: str, tmp_path: Path
) -> None:
    file = written(tmp_path, f"{title},model,prompt_len,output_len", *(f"{time},a,1,1" for time in times))
    trace = trace_of(file)
    assert f"time from {title} in {unit} (" in trace.columns and why in trace.columns
    size_s = {"seconds": 1.0, "milliseconds": 1e-3, "nanoseconds": 1e-9}[unit]
    assert trace.rows[-1].at == pytest.approx((float(times[-1]) - float(times[0])) * size_s)
    assert trace_of(file, time_unit="us").rows[-1].at == pytest.approx((float(times[-1]) - float(times[0])) * 1e-6)


def test_a_recording_of_events_gives_its_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    arrived = RequestArrived(100.0, RequestId("r1"), (ModelId("b"), ModelId("a")), 2, TenantId("x"))
    later = RequestArrived(101.5, RequestId("r2"), (ModelId("a"),))
    events = [
        f'{{"n":{n},"event":{encode(event)}}}' for n, event in enumerate((arrived, ServeDone(101.0, "r1"), later), 1)
    ]
    file.write_text("\n".join(['{"greenroom_events":1}', *events, '{"n":3,"end":"whole"}']) + "\n")
    trace = trace_of(file, Known(["a", "b"]))
    assert list(trace.rows) == [SimArrival(0.0, "b", 200, 200, "x", 2), SimArrival(1.5, "a", 200, 200, "", 1)]
    assert trace.columns.startswith("a recording of events: time from t in seconds")
    assert trace.remarks[0] == "2 without prompt_len taken as 200 tokens, as none is known"


def test_rows_far_out_of_order_are_sorted_and_equals_keep_their_order(tmp_path: Path) -> None:
    rows = [f"{(number * 7919) % 500},{'ab'[number % 2]},{number},1" for number in range(2_000)]
    found = read_trace(written(tmp_path, HEADER, *rows))
    told = [(int(row.split(",")[0]), int(row.split(",")[2])) for row in rows]
    assert [(row.at, row.prompt_len) for row in found] == sorted(told)
    packed = trace_of(written(tmp_path, HEADER, *rows)).rows
    assert packed[5] == found[5] and packed[-1] == found[-1] and packed[3:6] == found[3:6] and len(packed) == 2_000


def test_more_rows_than_are_sorted_at_once_are_in_order_and_equals_keep_theirs() -> None:
    rows = Arrivals()
    for number in range(SORTED_MAX + 1_000):
        rows.add(-number // 3, "a", number, 0, "", 1)
    rows.sort()
    lengths = [row.prompt_len for row in rows]
    assert lengths == sorted(range(SORTED_MAX + 1_000), key=lambda number: (-number // 3, number))


def test_an_empty_file_says_what_a_trace_has(tmp_path: Path) -> None:
    for content in ("", "\n \n"):
        file = tmp_path / "trace.csv"
        file.write_text(content)
        with pytest.raises(
            TraceError,
            match=r"trace.csv: it is empty; a trace has a row for each request and a header that names t, model",
        ):
            trace_of(file)
    with pytest.raises(TraceError, match=r"no row in it, only a header; a gateway with server.record_activity adds"):
        trace_of(written(tmp_path, HEADER))
    with pytest.raises(TraceError, match="no row in it: no request arrived while it was recorded"):
        trace_of(written(tmp_path, '{"greenroom_events":1}'))


def test_headers_in_the_middle_of_a_file_are_said_to_be_left_out(tmp_path: Path) -> None:
    trace = trace_of(written(tmp_path, HEADER, "0,a,1,1", HEADER, "1,a,1,1", HEADER, "2,a,1,1"))
    assert len(trace.rows) == 3 and trace.remarks == ("2 with the titles once more left out",)
    file = written(tmp_path, HEADER, "0,a,1,1", HEADER, "1,zz,1,1")
    assert trace_of(file, Known(["a"], skips_others=True)).remarks == (
        "1 for models that are not in the configuration left out ('zz' 1)",
        "1 with the titles once more left out",
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (gzip.compress(b"t,model"), r"it is compressed \(gzip\): unpack it first.*--trace <\(gzip -dc '.*a trace'\)"),
        (bz2.compress(b"t,model"), r"compressed \(bzip2\).*<\(bzip2 -dc "),
        (lzma.compress(b"t,model"), r"compressed \(xz\).*<\(xz -dc "),
        (b"\x28\xb5\x2f\xfd\x04\x00", r"compressed \(Zstandard\).*<\(zstd -dc "),
        (b"PK\x03\x04\x14\x00", r"compressed \(zip\).*<\(unzip -p "),
        (b"PAR1\x15\x04", "it is a Parquet file: write it as CSV"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "zip", "parquet"],
)
def test_a_file_that_is_no_text_says_how_to_make_it_one(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "a trace"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=told):
        trace_of(file)
