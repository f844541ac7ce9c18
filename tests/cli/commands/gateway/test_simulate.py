from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.commands.operating import explain
from greenroom.cli.failures import ExitStatus
from greenroom.cli.main import main
from greenroom.sim.cases import Case
from greenroom.sim.runs import CaseFailed, CaseRuns
from tests.config.test_plugins import install
from tests.docs.pages import ROOT, blocks
from tests.process.trees import is_alive
from tests.waiting import PATIENCE_S, until_now

CONFIG = """
gpus: [{memory_mib: 10000, margin_mib: 0}]
models:
  big: {cmd: "sh --port ${PORT}", memory_mib: 8000, concurrency: 4}
  small: {cmd: "sh --port ${PORT}", memory_mib: 4000, concurrency: 4, priority: high, aliases: [little]}
  other: {cmd: "sh --port ${PORT}", memory_mib: 4000, concurrency: 4}
"""
WAITS = ("P50", "P95", "MAX", "NOT_THERE", "FULL", "SLOW")
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


def test_leaving_takes_as_long_as_given(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second request waits until the first model has left, and for its load; with a green room, until it sleeps."""
    trace = tmp_path / "two.csv"
    trace.write_text("t,model,prompt_len,output_len\n0,big,0,1\n100,small,0,1\n")
    exact = ("--config", config, "--trace", str(trace), "--jitter", "0", "--load-s", "4")

    def longest_s(*words: str) -> float:
        (case,) = figures(capsys, *exact, *words)
        return case["waits"]["max_s"]  # type: ignore[index, no-any-return]

    assert longest_s() == pytest.approx(5.0) and longest_s("--unload-s", "0.25") == pytest.approx(4.25)
    room = ("--green-room-mib", "20000")
    assert longest_s(*room) == pytest.approx(4.5) and longest_s(*room, "--sleep-s", "3") == pytest.approx(7.0)
    assert main(["simulate", *exact, "--sleep-s", "3", "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    assert "unloads 1 s, falling asleep 3 s, give or take 0%." in assumed[1]


def test_a_trace_may_come_through_a_pipe(
    config: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", trace, pipe]):
        assert main(["simulate", "-c", config, "--trace", str(pipe)]) == 0
    assert f"--trace {pipe} is a pipe: waiting for a program that writes to it" in capsys.readouterr().err


def test_a_report_may_go_through_a_pipe(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        assert main(["simulate", "-c", config, *SHORT, "--out", str(pipe)]) == 0
        assert reader.communicate()[0].startswith("<!DOCTYPE html>") and pipe.is_fifo()
    assert f"--out {pipe} is a pipe: waiting for a program that reads from it" in capsys.readouterr().err


def test_a_pipe_that_is_open_already_is_not_waited_for(config: str, trace: Path) -> None:
    """As the shell gives it for `<(…)`."""
    words = (sys.executable, "-m", "greenroom", "simulate", "-c", config, "--trace", "/dev/stdin")
    played = subprocess.run(words, input=trace.read_text(), capture_output=True, text=True, check=True)
    assert "trace: 60 requests" in played.stderr and "waiting" not in played.stderr


@pytest.mark.parametrize("endless", ["/dev/zero", "/dev/urandom"])
def test_a_trace_without_end_is_refused(config: str, endless: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, "--trace", endless]) != 0
    assert endless in capsys.readouterr().err


def test_a_case_whose_process_is_gone_is_told_in_words(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CaseFailed(Case("fifo"), "its process was ended by signal 9")

    monkeypatch.setattr(CaseRuns, "results", fail)
    assert main(["simulate", "-c", config, *SHORT]) == ExitStatus.FAILED
    said = capsys.readouterr().err
    assert "the case fifo could not be played with the policy 'fifo': its process was ended by signal 9\n" in said
    assert "Traceback" not in said


def test_cases_are_compared_in_a_table_and_in_words(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, *SHORT, "--gpus", "1..2", "--policy", "default,fifo"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["POLICY", "GPUS", "SERVED", *WAITS, "SWAPS", "BUSY"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["default", "1"],
        ["default", "2"],
        ["fifo", "1"],
        ["fifo", "2"],
    ]
    assert lines[6].startswith("A second GPU would take the p95 wait from ")
    assert any(line.startswith("The policy fifo instead of default would take") for line in lines)
    assert any(line.startswith("The bottleneck: ") for line in lines)
    assert lines[-1] == "What hardware costs is not known here."
    assert "events in" in err


def test_the_table_has_further_columns_where_they_say_something(
    config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{number},big,10,10,t{number % 2},low" for number in range(20)]
    trace.write_text("\n".join(["t,model,prompt_len,output_len,tenant,priority", *rows]))
    words = ("--green-room-mib", "0", "--load-s", "15", "--patience-s", "5")
    assert main(["simulate", "-c", config, "--trace", str(trace), *words]) == 0
    titles = capsys.readouterr().out.splitlines()[0].split()
    assert titles == ["POLICY", "ROOM_MIB", "SERVED", "LOST", *WAITS, "SWAPS", "BUSY", "FAIR"]


@pytest.mark.slow
def test_one_command_compares_gpus_their_size_green_rooms_and_concurrency(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--gpus", "1..2", "--gpu-mib", "10000..20000", "--green-room-mib", "0,20000", "--concurrency", "1..4")
    found = figures(capsys, "-c", config, *SHORT, *words)
    options = [(case["gpus"], case["gpu_mib"], case["green_room_mib"], case["concurrency"]) for case in found]
    assert options[0] == (1, 10_000, 0, 1) and len(set(options)) == 2 * 2 * 2 * 3
    assert {one[3] for one in options} == {1, 2, 4} and {one[1] for one in options} == {10_000, 20_000}
    assert main(["simulate", "-c", config, *SHORT, *words]) == 0
    titles = capsys.readouterr().out.splitlines()[0].split()
    assert titles[:6] == ["POLICY", "GPUS", "GPU_MIB", "ROOM_MIB", "AT_ONCE", "SERVED"]


def test_figures_say_what_requests_waited_for(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = figures(capsys, "-c", config, "--trace", str(trace), "--concurrency", "1")
    delays: dict[str, Any] = case["delays"]  # type: ignore[assignment]
    assert delays["bottleneck"] == "not there" and delays["not_there_s"] > delays["full_s"] > 0
    mean_s = case["waits"]["mean_s"]  # type: ignore[index]
    assert delays["not_there_s"] + delays["full_s"] == pytest.approx(mean_s, abs=0.01)
    assert set(case["delays_by_model"]) == {"big", "small", "other"}  # type: ignore[call-overload]


def test_answers_slow_each_other_down_unless_speed_is_constant(
    config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-c", config, "--trace", str(trace), "--tokens-per-s", "10")
    (shared,), (constant,) = figures(capsys, *words), figures(capsys, *words, "--constant-speed")
    assert shared["delays"]["slow_s"] > 0 == constant["delays"]["slow_s"]  # type: ignore[index]


def test_a_trace_is_played_with_other_names_and_priorities(
    config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = figures(capsys, "-c", config, "--trace", str(trace))
    assert case["requests"] == case["served"] == 60
    assert set(case["by_model"]) == {"big", "small", "other"} and set(case["by_class"]) == {"high", "normal"}  # type: ignore[call-overload]


def test_a_recording_tells_how_fast_models_are(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty answers of 100 tokens in 5 s each, under an alias; the others are not known."""
    rows = [f"{number * 30},little,0,100,,1,1.000,6.000" for number in range(20)]
    head = "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
    trace.write_text("\n".join([head, *rows, "900,big,0,100,,1,0.000,1.000"]))

    def assumed(*words: str) -> str:
        assert main(["simulate", "-c", config, "--trace", str(trace), "--json", *words]) == 0
        return "\n".join(json.loads(capsys.readouterr().out)["assumed"])

    assert "not used" not in assumed()
    assert "Tokens a second as recorded: small 20." in assumed() and "answers at 20 to 60 tokens" in assumed()
    assert "as recorded" not in assumed("--tokens-per-s", "30") and "as recorded" not in assumed("--spread")


def test_a_recording_tells_it_through_a_pipe_too(
    config: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, an answer takes 2 s; two at a time take 3 s each."""
    alone = [f"{number * 30},small,0,100,,1,0.000,2.000" for number in range(20)]
    pairs = [f"{1_000 + number // 2 * 30},small,0,100,,1,0.000,3.000" for number in range(40)]
    head = "t,model,prompt_len,output_len,tenant,priority,wait_s,total_s"
    trace.write_text("\n".join([head, *alone, *pairs]))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", trace, pipe]):
        assert main(["simulate", "-c", config, "--json", "--trace", str(pipe)]) == 0
    assumed = "\n".join(json.loads(capsys.readouterr().out)["assumed"])
    assert "Tokens a second as recorded: small 50." in assumed
    assert "8 at a time and beside another busy model answers take so many times as long: small 1.6, 2.1." in assumed


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


def test_what_waits_too_long_is_refused_as_by_the_gateway(
    config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers that take minutes each, one after the other: most wait for longer than the gateway lets them."""
    trace.write_text("t,model,prompt_len,output_len\n" + "".join(f"{n},big,1,1000\n" for n in range(200)))
    words = ("simulate", "-c", config, "--trace", str(trace), "--concurrency", "1", "--tokens-per-s", "10", "--json")
    assert main([*words]) == 0
    said = json.loads(capsys.readouterr().out)
    (case,) = said["cases"]
    assert case["waits"]["max_s"] <= 3_600.0 and case["rejected"] == {"expired": case["lost"]} and case["lost"] > 100
    assert (
        "About 92% of those served wait for more than 4.8 min: a caller that does not stream" in said["bottom_line"][1]
    )
    assert "after 3,600 s (server.stream_wait_max_s)" in said["assumed"][-2]
    assert said["assumed"][-1].startswith("A higher concurrency takes no more memory here")
    assert main([*words, "--patience-s", "20000"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cases"][0]["lost"] == 0 and "Callers give up after 20000 s." in said["assumed"]
    assert not any("does not stream" in sentence for sentence in said["bottom_line"])


def test_callers_may_give_up(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (case,) = figures(capsys, "-c", config, "--trace", str(trace), "--load-s", "60", "--patience-s", "20")
    assert case["rejected"]["expired"] > 0  # type: ignore[index]


def test_a_report_is_written(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.html"
    assert main(["simulate", "-c", config, *SHORT, "--gpus", "1,2", "--out", str(report)]) == 0
    page = report.read_text(encoding="utf-8")
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")) is not None
    assert "A second GPU would take" in page and "Poisson arrivals, 0.2 a second" in page


def test_a_report_that_cannot_be_written_is_told(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, *SHORT, "--out", "/nowhere/at/all.html"]) == 1
    assert "/nowhere/at/all.html cannot be written" in capsys.readouterr().err


def test_figures_are_shown_even_if_the_report_then_finds_no_room(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "-c", config, *SHORT, "--out", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert "As it is (default)" in said.out and "/dev/full cannot be written" in said.err
    assert "open /dev/full" not in said.err


def test_where_the_report_goes_is_checked_before_anything_is_read(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"there is no folder {tmp_path}/no"
    (tmp_path / "loop").symlink_to("loop")
    wrong: list[tuple[Path | str, str]] = [
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "r.html", missing),
        (f"{tmp_path}/no/", missing),
        (f"{config}/r.html", f"{config} is not a folder"),
        (f"{config}/", f"{config} is not a folder"),
    ]
    wrong += [(tmp_path / "loop", "Too many levels of symbolic links"), (tmp_path / ("x" * 300), "File name too long")]
    for out, told in wrong:
        assert main(["simulate", "-c", config, "--trace", "/nowhere.csv", "--out", str(out)]) == 1
        assert f"--out {out} cannot be written: {told}" in capsys.readouterr().err


def test_what_was_understood_of_a_trace_is_told(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,GPT-4,10,20,30\n45,big,10,20,30\n")
    words = ("simulate", "-c", config, "--trace", str(trace))
    assert main([*words]) == 1
    assert f"{trace}:2: there is no model 'GPT-4' in the configuration. Give it as an" in capsys.readouterr().err
    assert main([*words, "--skip-unknown"]) == 0
    told = capsys.readouterr().err
    assert "trace: 1 request over 0 s" in told and "left out ('GPT-4' 1)" in told
    assert "prompt_len from Request tokens" in told and "not used: Total tokens" in told
    assert main([*words, "--spread", "--time-unit", "ms", "--json"]) == 0
    out, told = capsys.readouterr()
    assert json.loads(out)["cases"][0]["requests"] == 2
    assert "2 requests over 0 s" in told and "in milliseconds (as given)" in told and "whatever Model says" in told


@pytest.mark.parametrize(("step", "unit", "other"), [(90_000, "ms", "s"), (30, "s", "ms")])
def test_a_guessed_unit_of_times_is_a_warning_until_it_is_confirmed(
    step: int, unit: str, other: str, config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text("timestamp,model,prompt_len,output_len\n" + "".join(f"{n * step},big,1,1\n" for n in range(9)))
    assert main(["simulate", "-c", config, "--trace", str(trace)]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert warning.startswith(f"warning: {trace}: timestamp is taken to be in ")
    assert f"--time-unit {unit} confirms it, {other}, us or ns says otherwise" in warning
    assert main(["simulate", "-c", config, "--trace", str(trace), "--time-unit", unit]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--seconds", "0.001"), "no request arrives.\n"),
        (("--trace", "one.csv"), "the only request is served; it waits 8.0 s, with 1 swap.\n"),
        (("--trace", "one.csv", "--patience-s", "1"), "0 of 1 request is served, with 1 swap.\n"),
        (("--trace", "two.csv"), "all 2 requests are served; half of them wait at most"),
        (("--trace", "two.csv", "--patience-s", "7.95"), "1 of 2 requests is served; it waits 7.9 s, with 1 swap.\n"),
    ],
)
def test_one_is_not_told_as_many(
    words: tuple[str, ...],
    told: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["t,model,prompt_len,output_len", "0,big,1,1", "0.1,big,1,1"]
    Path("one.csv").write_text("\n".join(rows[:2]))
    Path("two.csv").write_text("\n".join(rows))
    assert main(["simulate", "-c", config, "--load-s", "8", "--jitter", "0", *words]) == 0
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, ExitStatus.INTERRUPTED),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_outlives_the_command(number: signal.Signals, status: int, config: str) -> None:
    words = ("simulate", "-c", config, "--seconds", "1e7", "--gpus", "1,2", "--jobs", "2")
    program = subprocess.Popen([sys.executable, "-m", "greenroom", *words], stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
    try:
        until_now(lambda: len(children.read_text().split()) == 2, "two processes")
        pids = children.read_text().split()
        # Both have begun to play.
        until_now(lambda: all(cpu_ticks(pid) > 20 for pid in pids), "processes that play")
        program.send_signal(number)
        assert program.wait(PATIENCE_S) == status
    finally:
        program.kill()
        program.wait()
    until_now(lambda: not any(is_alive(int(pid)) for pid in pids), "both processes to end")


def cpu_ticks(pid: str) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_options_without_effect_are_warned_of(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, "--trace", str(trace), "--rate", "5", "--workload", "bursty"]) == 0
    assert "warning: --workload, --rate without effect: the requests are those of the trace" in capsys.readouterr().err
    assert main(["simulate", "-c", config, *SHORT, "--stretch", "2", "--skip-unknown"]) == 0
    assert "warning: --stretch, --skip-unknown without effect: there is no --trace" in capsys.readouterr().err
    assert main(["simulate", "-c", config, "--trace", str(trace), "--stretch", "2"]) == 0
    assert "without effect" not in capsys.readouterr().err
    assert main(["simulate", "-c", config, *SHORT, "--agents", "3"]) == 0
    assert "warning: --agents without effect: --workload is poisson" in capsys.readouterr().err
    assert main(["simulate", "-c", config, "--workload", "agents", "--seconds", "60", "--rate", "5"]) == 0
    assert "warning: --rate without effect: --workload is agents" in capsys.readouterr().err


def test_a_remote_model_is_always_ready_and_slows_nothing_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(
        "gpus: [{memory_mib: 24576}]\n"
        "remotes: {cloud: {base_url: 'https://models.example.org/v1'}}\n"
        "models: {far: {remote: cloud}, near: {cmd: 'run --port ${PORT}', memory_mib: 20480}}\n"
    )
    assert main(["simulate", "-c", str(file), *SHORT, "--green-room-mib", "0,65536", "--json"]) == 0
    said = capsys.readouterr()
    assert "size is not known" not in said.err
    for case in json.loads(said.out)["cases"]:
        assert case["by_model"]["far"]["max_s"] == 0.0 and case["delays_by_model"]["far"]["slow_s"] == 0.0


@pytest.mark.parametrize("near", ["", ", near: {cmd: 'run --port ${PORT}', memory_mib: 20480}"])
def test_a_remote_model_is_never_loaded(near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(
        "gpus: [{memory_mib: 24576}]\n"
        "remotes: {cloud: {base_url: 'https://models.example.org/v1'}}\n"
        f"models: {{far: {{remote: cloud}}{near}}}\n"
    )
    (case,) = figures(capsys, "-c", str(file), *SHORT)
    assert (case["loads"], case["swaps"]) == ((1, 1) if near else (0, 0))


@pytest.mark.parametrize("model", ["{remote: cloud}", "{cmd: 'run --port ${PORT}', memory_mib: 512, devices: [host]}"])
def test_a_green_room_can_be_tried_without_gpus_where_no_model_needs_one(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"remotes: {{cloud: {{base_url: 'https://models.example.org/v1'}}}}\nmodels: {{only: {model}}}\n")
    options = ("--green-room-mib", "0,4096", "--concurrency", "1,4")
    cases = figures(capsys, "-c", str(file), *SHORT, *options)
    assert len(cases) == 4 and not any(case["lost"] for case in cases)
    assert main(["simulate", "-c", str(file), *SHORT, "--gpus", "1"]) == 2
    assert "--gpu-mib" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["{cmd: 'run --port ${PORT}', memory_mib: 512}", "{cmd: 'run --port ${PORT}'}"])
def test_a_green_room_for_models_that_may_need_a_gpu_asks_for_its_size(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"models: {{only: {model}}}\n")
    assert main(["simulate", "-c", str(file), *SHORT, "--green-room-mib", "0,4096"]) == 2
    assert "say how large one is with --gpu-mib" in capsys.readouterr().err


def test_models_sleep_in_a_green_room_that_is_configured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    models = ", ".join(f"{name}: {{path: /m/{name}, engine: vllm, memory_mib: 20480}}" for name in ("a", "b"))
    file.write_text(f"gpus: [{{memory_mib: 24576}}]\nmemory: {{green_room_mib: 65536}}\nmodels: {{{models}}}\n")
    (case,) = figures(capsys, "-c", str(file), *SHORT)
    assert case["wakes"] != 0 and case["loads"] == 2


def test_gpus_can_be_tried_on_a_machine_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(CONFIG.replace("gpus:", "#"))
    assert main(["simulate", "-c", str(file), *SHORT, "--gpus", "1"]) == 2
    assert "--gpu-mib" in capsys.readouterr().err
    assert main(["simulate", "-c", str(file), *SHORT]) == 0
    assert "warning: the configuration names no gpus, so models are played in the host's" in capsys.readouterr().err
    (case,) = figures(capsys, "-c", str(file), *SHORT, "--gpus", "1", "--gpu-mib", "10000")
    assert set(case["devices"]) == {"gpu0"}  # type: ignore[call-overload]
    assert main(["simulate", "-c", str(file), *SHORT, "--gpus", "2", "--gpu-mib", "10000,20000"]) == 0
    assert "In the first case (default, 2 GPUs of 10,000 MiB), " in capsys.readouterr().out


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
    ("option", "value", "told"),
    [
        ("--gpus", "0", "0 is too few: 1 at least"),
        ("--gpus", "4..1", "4..1 goes down: write it as a list"),
        ("--gpus", "1..100", "100 is more than 64"),
        ("--gpus", "1..1000000", "1000000 is more than 64"),
        ("--gpus", "1,,2", "'1,,2' lacks a number: write one, a list (1,2,4) or a range (1..4)"),
        ("--gpus", "1..", "'1..' lacks a number"),
        ("--gpus", "", "'' lacks a number"),
        ("--gpus", "many", "'many' is not a whole number"),
        ("--gpus", "1" * 5_000, "111111111111… is more than 64"),
        ("--rate", "0", "0 is too little"),
        ("--stretch", "nan", "'nan' is not a number from 0 on"),
        ("--jitter", "1", "1 is not a share below 1"),
        ("--green-room-mib", "-1", "'-1' is not a whole number"),
        ("--green-room-mib", "0,9999999999", "9999999999 is more than 1,000,000,000"),
        ("--green-room-mib", "0..8000", "0..8000 cannot begin with 0, since it doubles: write a list such as 0,8000"),
        ("--green-room-mib", "0..0", "0..0 cannot begin with 0, since it doubles: write 0"),
        ("--green-room-mib", "8000..0", "8000..0 goes down: write it as a list"),
        ("--gpus", "0..2", "0 is too few: 1 at least"),
        ("--concurrency", "0", "0 is too few: 1 at least"),
        ("--concurrency", "8..2", "8..2 goes down"),
        ("--concurrency", "1..999999999999", "999999999999 is more than 1,000,000"),
        ("--gpu-mib", "0,1", "0 is too few: 1 at least"),
        ("--gpu-mib", "9999999999", "9999999999 is more than 1,000,000,000"),
        ("--loads-at-once", "999999999999", "999999999999 is more than 1,000,000"),
        ("--agents", "999999999999", "999999999999 is more than 100,000"),
        ("--load-s", "1e300", "1e300 s is more than a year"),
        ("--wake-s", "1e9", "1e9 s is more than a year"),
        ("--patience-s", "0", "0 is too little"),
        ("--patience-s", "1e300", "1e300 s is more than a year"),
        ("--tokens-per-s", "1e-300", "1e-300 is not between 0.001 and 1,000,000,000 tokens a second"),
        ("--prefill-tokens-per-s", "1e300", "1e300 is not between"),
        ("--seed", "1e5", "'1e5' is not a whole number of at most 12 digits"),
        ("--out", "", "it is empty: give the name of a file, or leave the option out"),
        ("--trace", "", "it is empty: give the name of a file"),
        ("--out", "-", "figures are printed to standard output; name a file for the report"),
        ("--trace", "-", "standard input is /dev/stdin"),
        ("--workload", "storm", "invalid choice: 'storm'"),
    ],
)
def test_wrong_options_are_refused(
    option: str, value: str, told: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["simulate", "-c", config, option, value])
    assert left.value.code == 2
    assert f"argument {option}: {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, 'is no JSON object such as {"model": [0, 8000]}') for text in ("", "[]", "3", "[" * 200_000)),
        ('{\n"big"', 'is no JSON object such as {"model": [0, 8000]}: it is wrong at line 2, column 6'),
        (f'{{"big": [0, {"1" * 5_000}]}}', 'is no JSON object such as {"model": [0, 8000]}'),
        ('{"big": [0, 1], "small": [0, 1], "big": [0, 2]}', ": big is there twice"),
        ('{"big": 5}', ": big: [MiB of GPU, MiB of host] is wanted, whole numbers from 0 to 1,000,000,000"),
        *(
            (f'{{"big": {mibs}}}', ": big: [MiB of GPU")
            for mibs in ("[1]", "[1, 2, 3]", "[-1, 0]", "[1.5, 0]", '["1", 0]')
        ),
        *(
            (f'{{"big": {mibs}}}', ": big: [MiB of GPU")
            for mibs in ("[true, 0]", "[1e12, 0]", "null", '{"a": 1, "b": 2}')
        ),
    ],
)
def test_a_wrong_file_of_needs_asleep_is_refused(
    text: str, told: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asleep.json"
    file.write_text(text)
    with pytest.raises(SystemExit) as left:
        main(["simulate", "-c", config, "--asleep", str(file)])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "argument --asleep: " in said and told in said and str(file) in said


@pytest.mark.parametrize(
    ("name", "told"),
    [("none.json", "No such file or directory"), ("", "Is a directory"), ("latin.json", "it is not UTF-8")],
)
def test_a_file_of_needs_asleep_that_cannot_be_read_is_refused(
    name: str, told: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"\xff": [0, 1]}')
    file = tmp_path / name
    with pytest.raises(SystemExit):
        main(["simulate", "-c", config, "--asleep", str(file)])
    assert capsys.readouterr().err.endswith(f"argument --asleep: {file} cannot be read: {told}\n")


def test_needs_asleep_name_a_model_once(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "asleep.json"
    file.write_text('{"little": [0, 4000], "big": [0, 4000], "small": [0, 8000]}')
    assert main(["simulate", "-c", config, "--asleep", str(file)]) == 2
    told = "greenroom: --asleep: 'little' and 'small' are the same model: name it once\n"
    assert capsys.readouterr().err == told


def test_needs_asleep_of_an_unknown_model_are_refused(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asleep.json"
    file.write_text('{"smal": [0, 4000]}')
    assert main(["simulate", "-c", config, "--asleep", str(file)]) == 2
    told = "greenroom: --asleep: there is no model 'smal' in the configuration; did you mean 'small'?\n"
    assert capsys.readouterr().err == told


def test_needs_asleep_may_name_an_alias(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(config).write_text(f"{CONFIG}host: {{memory_mib: 20000}}\nmemory: {{green_room_mib: 20000}}\n")
    file, found = tmp_path / "asleep.json", []
    for name in ("small", "little"):
        file.write_text(json.dumps({name: [0, 4_000]}))
        found.append(figures(capsys, "-c", config, *SHORT, "--asleep", str(file))[0])
    assert found[0] == found[1] and found[0]["sleeps"]


def test_needs_asleep_count_for_no_case_with_a_green_room_of_its_own(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asleep.json"
    file.write_text('{"small": [0, 4000]}')
    assert main(["simulate", "-c", config, *SHORT, "--asleep", str(file), "--green-room-mib", "8000"]) == 0
    told = (
        "warning: --asleep without effect: with --green-room-mib every model can sleep, with all its memory on the host"
    )
    assert told in capsys.readouterr().err


def test_an_unknown_policy_and_too_many_cases_are_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, "--policy", "default,lifo"]) == 2
    assert "there is no policy 'lifo': default or fifo" in capsys.readouterr().err
    assert main(["simulate", "-c", config, "--policy", "default,,fifo"]) == 2
    assert "--policy 'default,,fifo' lacks a name" in capsys.readouterr().err
    assert main(["simulate", "-c", config, "--gpus", "1..60", "--policy", "default,fifo"]) == 2
    assert "120 cases are more than 100" in capsys.readouterr().err


POLICIES = """
from greenroom.core.policy import FirstCome

class Bare:
    pass

class Raising(FirstCome):
    def rank(self, queue, now):
        raise ZeroDivisionError("nothing to divide by")

    def loss(self, resident, now):
        raise ZeroDivisionError("nothing to divide by")

class Reading(FirstCome):
    def rank(self, queue, now):
        open("/nowhere/ranks")

    loss = rank
"""


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        ("bare", "greenroom: --policy: 'bare' cannot be made: TypeError: Bare() takes no arguments\n"),
        (
            "raising",
            "greenroom: the case raising could not be played with the policy 'raising': "
            "ZeroDivisionError: nothing to divide by\n  | Traceback",
        ),
        (
            "reading",
            "greenroom: the case reading could not be played with the policy 'reading': "
            "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/ranks'\n  | Traceback",
        ),
    ],
)
@pytest.mark.parametrize("beside", ["", ",default"])
def test_a_policy_of_another_package_that_is_broken_is_named(
    policies: str,
    told: str,
    beside: str,
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = f"{tmp_path.name}_broken"
    entries = [f"{name.lower()} = {module}:{name}\n" for name in ("Bare", "Raising", "Reading")]
    install(tmp_path, "[greenroom.policies]\n" + "".join(entries), **{module: POLICIES})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["simulate", "-c", config, *SHORT, "--jobs", "2", "--policy", policies + beside]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policies", "told"),
    [
        ("default", "greenroom: scheduler.swapper: there is no swapper 'largest'; there are coordinator, memory\n"),
        ("default,lifo", "there is no policy 'lifo': default or fifo"),
    ],
)
def test_a_swapper_that_is_not_there_is_named_by_its_key_after_policies_that_are_not(
    policies: str, told: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config).write_text(f"{CONFIG}\nscheduler: {{swapper: largest}}\n")
    assert main(["simulate", "-c", config, *SHORT, "--policy", policies]) != 0
    assert told in capsys.readouterr().err


def test_another_scheduler_is_played_by_its_name(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    busy = ("--config", config, "--seconds", "600", "--rate", "0.5")
    (default,), (plain,) = figures(capsys, *busy), figures(capsys, *busy, "--scheduler", "plain")
    assert plain["swaps"] > default["swaps"]  # type: ignore[operator]
    assert main(["simulate", *busy, "--scheduler", "plain"]) == 0
    said = capsys.readouterr()
    assert "The scheduler is plain; policies are the default one's." in said.err and "As it is" not in said.out
    Path(config).write_text(f"{CONFIG}\nscheduler: {{implementation: plain}}\n")
    assert figures(capsys, *busy) == [plain]
    assert main(["simulate", *busy]) == 0
    assert "As it is" in capsys.readouterr().out


def test_a_scheduler_that_is_not_there_is_told(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "-c", config, *SHORT, "--scheduler", "coin"]) == 2
    assert "--scheduler: there is no implementation 'coin'; there are default, plain" in capsys.readouterr().err
    Path(config).write_text(f"{CONFIG}\nscheduler: {{implementation: coin}}\n")
    assert main(["simulate", "-c", config, *SHORT]) == 1
    assert "scheduler.implementation: there is no implementation 'coin'" in capsys.readouterr().err


def test_a_configuration_without_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text("models: {}")
    assert main(["simulate", "-c", str(file)]) == 1
    assert "there is no model" in capsys.readouterr().err


def test_rows_for_other_models_can_be_left_out(config: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text("t,model,prompt_len,output_len\n0,big,1,1\n1,gone,1,1\n2,small,,1\n")
    assert main(["simulate", "-c", config, "--trace", str(trace), "--skip-unknown", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cases"][0]["requests"] == 2
    assert told["assumed"][0] == (
        f"2 requests over 2 s from {trace}; time from t in seconds (by its title); "
        "1 for models that are not in the configuration left out ('gone' 1); "
        "1 without prompt_len taken as 1 tokens, the mean of the others."
    )


def test_the_policy_is_the_configurations_unless_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "greenroom.yaml"
    file.write_text(f"{CONFIG}\nscheduler: {{policy: fifo}}\n")
    usual, said = figures(capsys, "-c", str(file), *SHORT), figures(capsys, "-c", str(file), *SHORT, "--policy", "fifo")
    assert usual == said and usual[0]["policy"] == "fifo"
    assert figures(capsys, "-c", str(file), *SHORT, "--policy", "default")[0]["policy"] == "default"


def test_models_that_need_not_fit_take_no_room(
    config: str, tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "together.yaml"
    matrix = "{sets: {all: big & small & other}}"
    file.write_text(f"{CONFIG}\nscheduler: {{fit_memory: false, company: {{matrix: {matrix}}}}}\n")
    (fitting,) = figures(capsys, "-c", config, "--trace", str(trace))
    assert main(["simulate", "-c", str(file), "--trace", str(trace), "--json"]) == 0
    out, err = capsys.readouterr()
    (together,) = json.loads(out)["cases"]
    assert together["loads"] == 3 < fitting["loads"]  # type: ignore[operator]
    assert "size is not known" not in err


@pytest.mark.parametrize(
    ("rows", "stretch"),
    [
        (("0,big,1,1", "2e9,big,1,1"), "1"),
        (("0,big,1,1", "1e308,big,1,1"), "10"),
        (("0,big,1,1", "9,big,1,1"), "1e300"),
    ],
)
def test_a_trace_over_too_long_a_time_is_refused(
    rows: tuple[str, ...], stretch: str, config: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text("\n".join(["t,model,prompt_len,output_len", *rows]))
    assert main(["simulate", "-c", config, "--trace", str(trace), "--stretch", stretch]) == 1
    assert "from the first request to the last" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rate", "1e5"), "about 360,000,000 requests are more than 50,000,000: give a smaller --rate or --seconds"),
        (("--rate", "1e300"), "far more than 1,000,000,000,000 requests are more than 50,000,000: give a smaller"),
        (("--rate", "1e308", "--seconds", "1e-305", "--workload", "bursty"), "more than 50,000,000"),
        (("--workload", "agents", "--agents", "50000"), "about 90,000,000 requests"),
        (("--workload", "agents", "--agents", "50000"), "give a smaller --agents"),
        (("--rate", "1e-300", "--seconds", "1e300"), "--seconds 1e+300 is more than 1,000,000,000"),
    ],
)
def test_more_requests_than_a_run_is_made_for_are_refused(
    words: tuple[str, ...], told: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "-c", config, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_report_never_replaces_what_was_read(
    config: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "report.html"
    link.symlink_to(trace)
    before = trace.read_text()
    for out, what in ((config, "the configuration"), (str(trace), "the trace"), (str(link), "the trace")):
        assert main(["simulate", "-c", config, "--trace", str(trace), "--out", out]) == 2
        assert f"--out {out} is {what}" in capsys.readouterr().err
    assert Path(config).read_text() == CONFIG and trace.read_text() == before


def test_a_report_that_fails_half_way_leaves_the_old_one(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    report.write_text("old")
    write = Path.write_text

    def full_disk(path: Path, text: str, encoding: str) -> int:
        write(path, text[:10], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full_disk)
        assert main(["simulate", "-c", config, *SHORT, "--out", str(report)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert report.read_text() == "old" and {file.name for file in tmp_path.iterdir()} == {
        "greenroom.yaml",
        "report.html",
    }


def test_a_report_goes_through_a_link_and_to_what_is_no_file(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, link = tmp_path / "report.html", tmp_path / "link.html"
    link.symlink_to(report)
    assert main(["simulate", "-c", config, *SHORT, "--out", str(link)]) == 0
    assert link.is_symlink() and report.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main(["simulate", "-c", config, *SHORT, "--out", str(tmp_path)]) == 1
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err


# --- words that the gateway explains by -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "why",
    ["busy", "leaving", "no_room", "leased", "kept_for_others", "crowd", "green_room", "no_lease", "store_down"],
)
def test_every_reason_to_wait_has_a_sentence(why: str) -> None:
    nothing: dict[str, object] = {"behind": [], "evict": [], "position": None, "eta_s": None, "retry_after_s": None}
    first = explain.words({"action": "wait", "model": "big", "why": why, **nothing})[0]
    assert first == f"big would have to wait: {explain.WAITING[why]}"


# --- the guide --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_guide_shows_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("docs/simulate.md", "yaml")
    (tmp_path / "greenroom.yaml").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```bash\n(.*?)^```\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for command, output in examples:
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out.split() == output.split()
