from __future__ import annotations

import shutil

import pytest

from greenroom.cli import screen


def test_what_a_terminal_would_act_on_is_taken_out() -> None:
    assert screen.harmless("a\x1b[2Jb\rc\x9bd\u202ee\tf\ng") == "a\ufffd[2Jb\ufffdc\ufffdd\ufffde\tf\ng"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((None, "-"), (0, "0.0s"), (0.44, "0.4s"), (9.97, "10s"), (59, "59s"), (150, "2m"), (3_595, "1h")),
        *((5_399, "1h30m"), (7_200, "2h"), (86_000, "1d"), (172_800, "2d"), (200_000, "2d8h")),
    ],
)
def test_seconds_are_said_shortly(value: float | None, shown: str) -> None:
    assert screen.seconds(value) == shown


def test_a_table_in_a_pipe_has_columns_that_can_be_cut() -> None:
    text = screen.plain_table(("model", "memory MiB", "note"), [("a", "300", "two words"), ("longer", "", "-")])
    assert text.splitlines() == ["MODEL   MEMORY_MIB  NOTE", "a       300         two words", "longer  -           -"]


def test_a_cell_cannot_begin_a_new_line() -> None:
    assert len(screen.plain_table(("a",), [("x\ny",)]).splitlines()) == 2


def test_hints_are_for_people_only(capsys: pytest.CaptureFixture[str]) -> None:
    screen.hint("try this")
    assert capsys.readouterr() == ("", "")


def test_a_spinner_in_a_pipe_is_one_line_for_each_text(capsys: pytest.CaptureFixture[str]) -> None:
    with screen.spinner("loading") as show:
        show("loading: 3s")
    assert capsys.readouterr() == ("", "loading\nloading: 3s\n")


@pytest.mark.parametrize(
    ("called", "on_path", "shown"),
    [
        (".venv/bin/greenroom", None, ".venv/bin/greenroom"),
        (".venv/bin/greenroom", "/usr/bin/greenroom", "greenroom"),
        ("/src/greenroom/cli/main.py", None, "greenroom"),
    ],
)
def test_what_to_type_next_can_be_typed(
    called: str, on_path: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [called])
    monkeypatch.setattr(shutil, "which", lambda name: on_path)
    assert screen.program() == shown
