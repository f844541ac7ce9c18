"""How lines look, and that nothing a caller sends can break or forge one."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.telemetry import logs

# Another process may hold the machine for a while: that says nothing about the code.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

log = logs.get_logger("test")


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test sets logging up for itself; what libraries log goes where it went before."""
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.delenv("LOG_FORMAT", raising=False)
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    logs.setup("info", "text")
    root.handlers = before


@pytest.fixture
def lost() -> Callable[[], int]:
    """How many lines were lost since the test began."""
    before = logs.lost_lines()
    return lambda: logs.lost_lines() - before


def text(level: str = "debug", form: Any = "text") -> io.StringIO:
    stream = io.StringIO()
    logs.setup(level, form, stream)
    return stream


def lines_of_json(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_text_line_has_clock_level_event_and_fields() -> None:
    stream = text()
    log.info("swap done", model="qwen-72b", evicted="siglip2", took_s=0.41, request="r-19")
    pattern = r"\d\d:\d\d:\d\d\.\d{3} info  swap done model=qwen-72b evicted=siglip2 took_s=0\.41 request=r-19\n"
    assert re.fullmatch(pattern, stream.getvalue())


def test_every_level_starts_its_event_in_the_same_column() -> None:
    stream = text()
    for say in (log.debug, log.info, log.warning, log.error):
        say("here")
    assert {line.index("here") for line in stream.getvalue().splitlines()} == {19}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two words", '"two words"'),
        ("", '""'),
        ("a=b", '"a=b"'),
        ('say "hi"', r'"say \"hi\""'),
        ("line\nbreak\r", r'"line\nbreak\r"'),
        ("\x1b[31mred", r'"\u001b[31mred"'),
        ("right\u202eleft", r'"right\u202eleft"'),
        ("\x85\u2028\x7f", r'"\u0085\u2028\u007f"'),
        ("\ud800", r'"\ud800"'),
        ("groß", '"groß"'),
        (b"raw\xff", r'"raw\\xff"'),
        (1234567.0, "1.23457e+06"),
        (12, "12"),
        (True, "True"),
        (["a", "b"], "\"['a', 'b']\""),
        (ValueError("too odd"), '"ValueError: too odd"'),
    ],
)
def test_value_is_quoted_and_escaped_where_needed(value: object, shown: str) -> None:
    stream = text()
    log.info("x", v=value)
    assert stream.getvalue().split(" x ", 1)[1] == f"v={shown}\n"


def test_none_is_left_out() -> None:
    stream = text()
    log.info("x", a=None, b=1)
    assert stream.getvalue().endswith(" x b=1\n")


@patient
@given(st.text(), st.text(), st.sampled_from(["text", "json"]))
def test_no_text_makes_a_second_line(event: str, value: str, format: Any) -> None:
    stream = io.StringIO(newline="")
    logs.setup("info", format, stream)
    log.info(event, v=value)
    written = stream.getvalue()
    assert len(written.splitlines()) == 1
    assert written.endswith("\n")


@patient
@given(st.text(st.characters(codec="utf-8"), max_size=200))
def test_json_line_gives_back_what_was_said(value: str) -> None:
    stream = text("info", "json")
    log.info("x", v=value)
    assert json.loads(stream.getvalue())["v"] == value


def test_json_line_has_time_level_area_and_fields() -> None:
    stream = text("info", "json")
    log.warning("load failed", model="qwen", took_s=0.5, tried=[1, 2], gone=None, level="high", raw=b"x")
    (line,) = lines_of_json(stream)
    assert line["ts"].endswith("Z")
    assert abs(datetime.fromisoformat(line.pop("ts")).timestamp() - datetime.now().timestamp()) < 60
    assert line == {
        "level": "warning",
        "area": "test",
        "event": "load failed",
        "model": "qwen",
        "took_s": 0.5,
        "tried": [1, 2],
        "level_": "high",
        "raw": "x",
    }


def test_json_line_survives_values_that_are_not_json() -> None:
    stream = text("info", "json")
    loop: list[Any] = []
    loop.append(loop)
    log.info("x", a="\ud800", b={1: {2: 3}}, c=object(), d=float("nan"))
    log.info("y", loop=loop, z=1)
    first, second = lines_of_json(stream)
    assert first["event"] == "x"
    assert second["event"] == "y"


def test_long_value_is_cut() -> None:
    stream = text()
    log.info("x", v="a" * 1_000_000)
    assert len(stream.getvalue()) < logs.VALUE_CHARS_MAX + 100


def test_level_decides_what_is_written() -> None:
    stream = text("warning")
    log.debug("no")
    log.info("no")
    log.warning("yes")
    log.error("yes")
    assert stream.getvalue().count("yes") == 2
    assert "no" not in stream.getvalue()


def test_disabled_level_formats_nothing(lost: Callable[[], int]) -> None:
    class Loud:
        def __str__(self) -> str:
            raise AssertionError("formatted")

    text("info")
    log.debug("x", v=Loud())
    assert lost() == 0
    log.info("x", v=Loud())
    assert lost() == 1


def closed_stream() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [closed_stream(), FullDisk()])
def test_stream_that_cannot_be_written_costs_the_line_only(stream: TextIO, lost: Callable[[], int]) -> None:
    logs.setup("info", "text", stream)
    log.error("x")
    assert lost() == 1


def test_stream_that_knows_ascii_only_gets_escapes(tmp_path: Path, lost: Callable[[], int]) -> None:
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as stream:
        logs.setup("info", "text", stream)
        log.info("größe", v="ü")
        log.info("next")
    assert len(path.read_text(encoding="ascii").splitlines()) == 2
    assert lost() == 0


def test_without_stderr_nothing_happens(monkeypatch: pytest.MonkeyPatch, lost: Callable[[], int]) -> None:
    logs.setup("info", "text")
    monkeypatch.setattr("sys.stderr", None)
    log.error("x")
    assert lost() == 1


def test_bug_carries_its_traceback_in_the_same_line() -> None:
    stream = text()
    try:
        raise KeyError("gone")
    except KeyError as error:
        log.bug("request broke", error, request="r-1")
    (line,) = stream.getvalue().splitlines()
    assert "request broke request=r-1" in line
    assert "KeyError" in line
    assert "test_bug_carries_its_traceback" in line


def test_warnings_of_libraries_become_lines_like_ours() -> None:
    stream = text("info", "json")
    logs.setup("info", "json", stream)
    library = logging.getLogger("some.library")
    library.warning("odd %s", "thing")
    library.info("chatter")
    said = [(line["area"], line["level"], line["event"]) for line in lines_of_json(stream)]
    assert said == [("some.library", "warning", "odd thing")]


def test_library_that_logs_wrongly_is_heard_all_the_same() -> None:
    stream = text()
    wrong = logging.LogRecord("some.library", logging.ERROR, __file__, 1, "bad %d", ("not a number",), None)
    (ours,) = (one for one in logging.getLogger().handlers if type(one).__module__ == logs.__name__)
    ours.emit(wrong)
    assert stream.getvalue().endswith(" error bad %d\n")


def test_exception_logged_by_a_library_keeps_its_traceback() -> None:
    stream = text("info", "json")
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("asyncio").exception("task failed")
    (line,) = lines_of_json(stream)
    assert line["error"] == "ValueError: inner"
    assert "Traceback" in line["traceback"]
