from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from greenroom.cli.main import main, parser
from tests.cli.test_guides import ROOT, blocks

CONFIG = """
gpus: [{memory_mib: 10000, margin_mib: 0}]
models:
  big: {cmd: "sh --port ${PORT}", memory_mib: 8000, concurrency: 4}
  small: {cmd: "sh --port ${PORT}", memory_mib: 4000, concurrency: 4, priority: high, aliases: [little]}
  other: {cmd: "sh --port ${PORT}", memory_mib: 4000, concurrency: 4}
"""
SHORT = ("--seconds", "300", "--rate", "0.2")


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "greenroom.yaml"
    file.write_text(CONFIG)
    return str(file)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    rows = [f"{number * 3},{('big', 'little', 'other')[number % 3]},100,100" for number in range(60)]
    file.write_text("\n".join(["t,model,prompt_len,output_len", *rows]))
    return file


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["simulate", *words, "--json"]) == 0
    cases: list[dict[str, object]] = json.loads(capsys.readouterr().out)["cases"]
    return cases


def test_cases_are_compared_in_a_table_and_in_words(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, *SHORT, "--gpus", "1..2", "--policy", "default,fifo"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["POLICY", "GPUS", "SERVED", "P50", "P95", "MEAN", "MAX", "SWAPS", "BUSY"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["default", "1"],
        ["default", "2"],
        ["fifo", "1"],
        ["fifo", "2"],
    ]
    assert lines[5].startswith("A second GPU would take the p95 wait from ")
    assert any(line.startswith("The policy default instead of fifo would take") for line in lines)
    assert "events in" in err


def test_the_table_has_further_columns_where_they_say_something(
    config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{number},big,10,10,t{number % 2},low" for number in range(20)]
    trace.write_text("\n".join(["t,model,prompt_len,output_len,tenant,priority", *rows]))
    words = ("--green-room-mib", "0", "--load-s", "15", "--patience-s", "5")
    assert main(["simulate", "-c", config, "--trace", str(trace), *words]) == 0
    titles = capsys.readouterr().out.splitlines()[0].split()
    assert titles == ["POLICY", "ROOM_MIB", "SERVED", "REFUSED", "P50", "P95", "MEAN", "MAX", "SWAPS", "BUSY", "FAIR"]


def test_a_trace_is_played_with_other_names_and_priorities(
    config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = figures(capsys, "-c", config, "--trace", str(trace))
    assert case["requests"] == case["served"] == 60
    assert set(case["by_model"]) == {"big", "small", "other"} and set(case["by_class"]) == {"high", "normal"}  # type: ignore[call-overload]


def test_stretched_time_makes_the_run_longer(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plain,) = figures(capsys, "-c", config, "--trace", str(trace))
    (stretched,) = figures(capsys, "-c", config, "--trace", str(trace), "--stretch", "10")
    assert stretched["makespan_s"] > 5 * plain["makespan_s"]  # type: ignore[operator]


def test_a_green_room_turns_loads_into_wakes(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-c", config, "--trace", str(trace), "--green-room-mib", "0,20000")
    without, with_room = figures(capsys, *words)
    assert without["wakes"] == 0 and with_room["wakes"] > 0  # type: ignore[operator]
    assert with_room["loads"] == 3


@pytest.mark.parametrize("workload", ["poisson", "bursty", "agents"])
def test_drawn_workloads_are_the_same_for_the_same_seed(
    workload: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-c", config, "--workload", workload, *SHORT, "--agents", "3")
    one, again = figures(capsys, *words, "--seed", "5"), figures(capsys, *words, "--seed", "5")
    assert one == again != figures(capsys, *words, "--seed", "6")
    assert one[0]["served"] == one[0]["requests"] != 0


def test_times_and_concurrency_can_be_said(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mean_s(*words: str) -> float:
        (case,) = figures(capsys, "-c", config, "--trace", str(trace), "--jitter", "0", *words)
        return case["waits"]["mean_s"]  # type: ignore[index, no-any-return]

    quick = mean_s("--load-s", "0.1", "--tokens-per-s", "1000")
    assert quick < mean_s("--load-s", "30") and quick < mean_s(
        "--load-s", "0.1", "--tokens-per-s", "5", "--concurrency", "1"
    )


def test_callers_may_give_up(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = figures(capsys, "-c", config, "--trace", str(trace), "--load-s", "60", "--patience-s", "20")
    assert case["rejected"]["expired"] > 0  # type: ignore[index]


def test_a_report_is_written(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    assert main(["simulate", "-c", config, *SHORT, "--gpus", "1,2", "--out", str(report)]) == 0
    page = report.read_text(encoding="utf-8")
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")) is not None
    assert "A second GPU would take" in page and "poisson arrivals, 0.2 a second" in page


def test_a_report_that_cannot_be_written_is_told(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, *SHORT, "--out", "/nowhere/at/all.html"]) == 1
    assert "/nowhere/at/all.html cannot be written" in capsys.readouterr().err


def test_gpus_can_be_tried_on_a_machine_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(CONFIG.replace("gpus:", "#"))
    assert main(["simulate", "-c", str(file), *SHORT, "--gpus", "1"]) == 2
    assert "--gpu-mib" in capsys.readouterr().err
    (case,) = figures(capsys, "-c", str(file), *SHORT, "--gpus", "1", "--gpu-mib", "10000")
    assert set(case["devices"]) == {"gpu0"}  # type: ignore[call-overload]


def test_a_model_of_unknown_size_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text('models: {anything: {cmd: "sh --port ${PORT}"}}')
    assert main(["simulate", "-c", str(file), *SHORT]) == 0
    assert "models.anything: its size is not known" in capsys.readouterr().err


def test_what_is_wrong_with_a_trace_is_told(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("t,model,prompt_len,output_len\n0,big,1,1\n1,bigg,1,1\n")
    assert main(["simulate", "-c", config, "--trace", str(trace)]) == 1
    assert f"{trace}:3: there is no model 'bigg' in the configuration; did you mean 'big'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "0"),
        ("--gpus", "4..1"),
        ("--gpus", "1..100"),
        ("--gpus", "many"),
        ("--rate", "0"),
        ("--stretch", "nan"),
        ("--jitter", "1"),
        ("--green-room-mib", "-1"),
        ("--concurrency", "0"),
        ("--workload", "storm"),
    ],
)
def test_wrong_options_are_refused(words: tuple[str, str], config: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", "-c", config, *words])
    assert left.value.code == 2


def test_an_unknown_policy_and_too_many_cases_are_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, "--policy", "default,lifo"]) == 2
    assert "there is no policy 'lifo': default or fifo" in capsys.readouterr().err
    assert main(["simulate", "-c", config, "--gpus", "1..60", "--policy", "default,fifo"]) == 2
    assert "120 cases are more than 100" in capsys.readouterr().err


def test_a_configuration_without_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text("models: {}")
    assert main(["simulate", "-c", str(file)]) == 1
    assert "there is no model" in capsys.readouterr().err


# --- the guide --------------------------------------------------------------------------------------------------------


def test_the_guide_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration loads, its commands are understood, and the table has the columns it shows."""
    (block,) = blocks("docs/simulate.md", "yaml")
    (tmp_path / "greenroom.yaml").write_text(block, encoding="utf-8")
    commands = [shlex.split(line) for text in blocks("docs/simulate.md", "bash") for line in text.splitlines()]
    assert len(commands) == 3 and all(parser().parse_args(words[1:]).run for words in commands)
    monkeypatch.chdir(tmp_path)
    assert main([*commands[0][1:], "--seconds", "600"]) == 0
    titles = capsys.readouterr().out.splitlines()[0].split()
    shown = (ROOT / "docs/simulate.md").read_text(encoding="utf-8").splitlines()
    assert titles in [line.split() for line in shown]
