from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from greenroom.sim import traces
from greenroom.sim.records import SimArrival
from greenroom.sim.traces import Known, TraceError, read_trace, trace_of

HEADER = "t,model,prompt_len,output_len"


def written(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_rows_are_read_in_order_of_time_from_zero(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, "1700000003.5,b,10,20", "1700000001.5,a,30,0", "", "1700000001.5,b,1,2")
    assert read_trace(file) == [SimArrival(0.0, "a", 30, 0), SimArrival(0.0, "b", 1, 2), SimArrival(2.0, "b", 10, 20)]


def test_tenant_and_priority_are_read_where_they_are_given(tmp_path: Path) -> None:
    file = written(
        tmp_path, "tenant, T ,model,priority,output_len,prompt_len", "ann,0,a,high,2,1", ",1,a,,2,1", "bo,2,a,7,2,1"
    )
    assert [(row.tenant, row.priority) for row in read_trace(file)] == [("ann", 0), ("", 1), ("bo", 7)]


def test_every_priority_that_was_ever_recorded_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, f"{HEADER},priority", "0,a,1,1,-100", "1,a,1,1,-7", "2,a,1,1,100")
    assert [row.priority for row in read_trace(file)] == [-100, -7, 100]


def test_an_empty_length_is_the_mean_of_those_known(tmp_path: Path) -> None:
    trace = trace_of(written(tmp_path, HEADER, "0,a,100,", "1,a,,", "2,a,201, ", "3,a,0,"))
    assert [(row.prompt_len, row.output_len) for row in trace.rows] == [(100, 200), (100, 200), (201, 200), (0, 200)]
    assert trace.remarks == (
        "1 without prompt_len taken as 100 tokens, the mean of the others",
        "4 without output_len taken as 200 tokens, as none is known",
    )
    assert trace_of(written(tmp_path, HEADER, "0,a,0,0")).remarks == ()


def test_an_empty_length_of_a_log_without_models_is_the_mean_too(tmp_path: Path) -> None:
    file = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,30,5", "2023-11-17,,5")
    assert [row.prompt_len for row in read_trace(file, Known(["a"]))] == [30, 30]


def test_rows_for_other_models_are_left_out_and_counted_where_that_is_asked(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, "0,gone,900,1", "5,a,10,1", "6,old,,1", "7,gone,1,1")
    trace = trace_of(file, Known(["a"], {"old": "a"}, skips_others=True))
    assert [(row.at, row.model, row.prompt_len) for row in trace.rows] == [(0.0, "a", 10), (1.0, "a", 10)]
    assert trace.remarks[0] == "2 for models that are not in the configuration left out"
    with pytest.raises(TraceError, match="no row in it for a model of the configuration"):
        trace_of(file, Known(["b"], skips_others=True))
    with pytest.raises(TraceError, match=r":2: t is 'x'"):
        trace_of(written(tmp_path, HEADER, "x,a,1,1"), Known(["a"], skips_others=True))


def test_other_names_and_priorities_of_the_configuration_count(tmp_path: Path) -> None:
    file = written(tmp_path, HEADER, "0,old,1,1", "1,b,1,1")
    known = Known(["a", "b"], {"old": "a"}, {"a": 2})
    assert [(row.model, row.priority) for row in read_trace(file, known)] == [("a", 2), ("b", 1)]


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


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("a,1,1,0,soon", "priority is 'soon'"),
        ("a,1,1,0,101", "priority is '101'"),
        ("a,1,1,0,-101", "priority is '-101'"),
        ("a,1,1,0,--1", "priority is '--1'"),
        ("a,1,1,0,-", "priority is '-'"),
        (f"a,1,1,0,{'0' * 5_000}", "5,000 characters"),
    ],
)
def test_a_wrong_priority_is_told(row: str, told: str, tmp_path: Path) -> None:
    file = written(tmp_path, "model,prompt_len,output_len,t,priority", row)
    with pytest.raises(TraceError, match=told):
        read_trace(file)


def test_a_wrong_tenant_or_moment_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":2: tenant is not a name"):
        read_trace(written(tmp_path, f"{HEADER},tenant", "0,a,1,1,\x07"))
    with pytest.raises(TraceError, match=r":2: TIMESTAMP is 'noon'"):
        read_trace(written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"), Known(["a"]))


def test_a_file_that_is_no_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="header must name t, model"):
        read_trace(written(tmp_path, "time,name", "1,a"))
    with pytest.raises(TraceError, match="header must name t, model"):
        read_trace(written(tmp_path, ""))
    with pytest.raises(TraceError, match="there is no row"):
        read_trace(written(tmp_path, HEADER))
    with pytest.raises(TraceError, match="names no models"):
        read_trace(written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16,1,1"))
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
