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

from greenroom.cli.failures import ExitStatus
from greenroom.features.planning import cli as explain
from greenroom.sim.cases import Case
from greenroom.sim.runs import CaseFailed, CaseRuns
from tests.cli.command import Cli, Said
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
FAR = "remotes: {cloud: {base_url: 'https://models.example.org/v1'}}\n"
NEAR = "near: {cmd: 'run --port ${PORT}', memory_mib: 20480}"
WAITS = ("P50", "P95", "MAX", "NOT_THERE", "FULL", "SLOW")
SHORT = ("--seconds", "300", "--rate", "0.2")
HEAD = "t,model,prompt_len,output_len"
RECORDED = f"{HEAD},tenant,priority,wait_s,total_s"


class Simulate:
    """`greenroom simulate` with one configuration, and a trace of 60 requests."""

    def __init__(self, folder: Path, cli: Cli) -> None:
        self.config, self.trace, self._cli = folder / "greenroom.yaml", folder / "trace.csv", cli
        self.config.write_text(CONFIG)
        self.rows(*(f"{number * 3},{('big', 'little', 'other')[number % 3]},100,100" for number in range(60)))

    def rows(self, *rows: str, head: str = HEAD) -> None:
        self.trace.write_text("\n".join([head, *rows, ""]))

    def __call__(self, *words: object, status: int = 0) -> Said:
        return self._cli("simulate", "-c", self.config, *words, status=status)

    def played(self, *words: object, status: int = 0) -> Said:
        """With the trace."""
        return self("--trace", self.trace, *words, status=status)

    def cases(self, *words: object) -> list[Any]:
        cases: list[Any] = self(*words, "--json").json["cases"]
        return cases

    def case(self, *words: object) -> Any:
        (case,) = self.cases(*words)
        return case

    def played_case(self, *words: object) -> Any:
        return self.case("--trace", self.trace, *words)


@pytest.fixture
def simulate(tmp_path: Path, cli: Cli) -> Simulate:
    return Simulate(tmp_path, cli)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_leaving_takes_as_long_as_given(simulate: Simulate) -> None:
    """The second request waits until the first model has left, and for its load; with a green room, until it sleeps."""
    simulate.rows("0,big,0,1", "100,small,0,1")
    exact = ("--jitter", "0", "--load-s", "4")

    def longest_s(*words: str) -> Any:
        return simulate.played_case(*exact, *words)["waits"]["max_s"]

    assert longest_s() == pytest.approx(5.0) and longest_s("--unload-s", "0.25") == pytest.approx(4.25)
    room = ("--green-room-mib", "20000")
    assert longest_s(*room) == pytest.approx(4.5) and longest_s(*room, "--sleep-s", "3") == pytest.approx(7.0)
    assumed = simulate.played(*exact, "--sleep-s", "3", "--json").json["assumed"]
    assert "unloads 1 s, falling asleep 3 s, give or take 0%." in assumed[1]


def test_a_trace_may_come_through_a_pipe(simulate: Simulate, pipe: Path) -> None:
    """Also one that was recorded. Alone, an answer takes 2 s; two at a time take 3 s each."""
    alone = [f"{number * 30},small,0,100,,1,0.000,2.000" for number in range(20)]
    pairs = [f"{1_000 + number // 2 * 30},small,0,100,,1,0.000,3.000" for number in range(40)]
    simulate.rows(*alone, *pairs, head=RECORDED)
    with subprocess.Popen(["cp", simulate.trace, pipe]):
        said = simulate("--json", "--trace", pipe)
    assert f"--trace {pipe} is a pipe: waiting for a program that writes to it" in said.err
    assumed = "\n".join(said.json["assumed"])
    assert "Tokens a second as recorded: small 50." in assumed
    assert "8 at a time and beside another busy model answers take so many times as long: small 1.6, 2.1." in assumed


def test_a_report_may_go_through_a_pipe(simulate: Simulate, pipe: Path) -> None:
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        said = simulate(*SHORT, "--out", pipe)
        assert reader.communicate()[0].startswith("<!DOCTYPE html>") and pipe.is_fifo()
    assert f"--out {pipe} is a pipe: waiting for a program that reads from it" in said.err


def test_a_pipe_that_is_open_already_is_not_waited_for(simulate: Simulate) -> None:
    """As the shell gives it for `<(…)`."""
    words = (sys.executable, "-m", "greenroom", "simulate", "-c", simulate.config, "--trace", "/dev/stdin")
    played = subprocess.run(words, input=simulate.trace.read_text(), capture_output=True, text=True, check=True)
    assert "trace: 60 requests" in played.stderr and "waiting" not in played.stderr


def test_a_case_whose_process_is_gone_is_told_in_words(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CaseFailed(Case("fifo"), "its process was ended by signal 9")

    monkeypatch.setattr(CaseRuns, "results", fail)
    said = simulate(*SHORT, status=ExitStatus.FAILED).err
    assert "the case fifo could not be played with the policy 'fifo': its process was ended by signal 9\n" in said
    assert "Traceback" not in said


def test_cases_are_compared_in_a_table_and_in_words(simulate: Simulate) -> None:
    said = simulate(*SHORT, "--gpus", "1..2", "--policy", "default,fifo")
    lines = said.lines
    assert lines[0].split() == ["POLICY", "GPUS", "SERVED", *WAITS, "SWAPS", "BUSY"]
    rows = [tuple(line.split()[:2]) for line in lines[1:5]]
    assert rows == [("default", "1"), ("default", "2"), ("fifo", "1"), ("fifo", "2")]
    assert lines[6].startswith("A second GPU would take the p95 wait from ")
    assert any(line.startswith("The policy fifo instead of default would take") for line in lines)
    assert any(line.startswith("The bottleneck: ") for line in lines)
    assert lines[-1] == "What hardware costs is not known here."
    assert "events in" in said.err


def test_the_table_has_further_columns_where_they_say_something(simulate: Simulate) -> None:
    simulate.rows(*(f"{number},big,10,10,t{number % 2},low" for number in range(20)), head=f"{HEAD},tenant,priority")
    words = ("--green-room-mib", "0", "--load-s", "15", "--patience-s", "5")
    titles = ["POLICY", "ROOM_MIB", "SERVED", "LOST", *WAITS, "SWAPS", "BUSY", "FAIR"]
    assert simulate.played(*words).lines[0].split() == titles


@pytest.mark.slow
def test_one_command_compares_gpus_their_size_green_rooms_and_concurrency(simulate: Simulate) -> None:
    words = ("--gpus", "1..2", "--gpu-mib", "10000..20000", "--green-room-mib", "0,20000", "--concurrency", "1..4")
    found = simulate.cases(*SHORT, *words)
    options = [(case["gpus"], case["gpu_mib"], case["green_room_mib"], case["concurrency"]) for case in found]
    assert options[0] == (1, 10_000, 0, 1) and len(set(options)) == 2 * 2 * 2 * 3
    assert {one[3] for one in options} == {1, 2, 4} and {one[1] for one in options} == {10_000, 20_000}
    titles = simulate(*SHORT, *words).lines[0].split()
    assert titles[:6] == ["POLICY", "GPUS", "GPU_MIB", "ROOM_MIB", "AT_ONCE", "SERVED"]


def test_figures_say_what_requests_waited_for(simulate: Simulate) -> None:
    case = simulate.played_case("--concurrency", "1")
    delays = case["delays"]
    assert delays["bottleneck"] == "not there" and delays["not_there_s"] > delays["full_s"] > 0
    assert delays["not_there_s"] + delays["full_s"] == pytest.approx(case["waits"]["mean_s"], abs=0.01)
    assert set(case["delays_by_model"]) == {"big", "small", "other"}


def test_answers_slow_each_other_down_unless_speed_is_constant(simulate: Simulate) -> None:
    slow = ("--tokens-per-s", "10")
    shared, constant = simulate.played_case(*slow), simulate.played_case(*slow, "--constant-speed")
    assert shared["delays"]["slow_s"] > 0 == constant["delays"]["slow_s"]


def test_a_trace_is_played_with_other_names_and_priorities_and_can_be_stretched(simulate: Simulate) -> None:
    case = simulate.played_case()
    assert case["requests"] == case["served"] == 60
    assert set(case["by_model"]) == {"big", "small", "other"} and set(case["by_class"]) == {"high", "normal"}
    assert simulate.played_case("--stretch", "10")["makespan_s"] > 5 * case["makespan_s"]


def test_a_recording_tells_how_fast_models_are(simulate: Simulate) -> None:
    """Twenty answers of 100 tokens in 5 s each, under an alias; the others are not known."""
    rows = [f"{number * 30},little,0,100,,1,1.000,6.000" for number in range(20)]
    simulate.rows(*rows, "900,big,0,100,,1,0.000,1.000", head=RECORDED)

    def assumed(*words: str) -> str:
        return "\n".join(simulate.played("--json", *words).json["assumed"])

    assert "not used" not in assumed()
    assert "Tokens a second as recorded: small 20." in assumed() and "answers at 20 to 60 tokens" in assumed()
    assert "as recorded" not in assumed("--tokens-per-s", "30") and "as recorded" not in assumed("--spread")


def test_a_green_room_turns_loads_into_wakes(simulate: Simulate) -> None:
    without, with_room = simulate.cases("--trace", simulate.trace, "--green-room-mib", "0,20000")
    assert without["wakes"] == 0 and with_room["wakes"] > 0 and with_room["loads"] == 3


@pytest.mark.parametrize("workload", ["poisson", "bursty", "agents"])
def test_drawn_workloads_are_the_same_for_the_same_seed(workload: str, simulate: Simulate) -> None:
    one, again, other = (
        simulate.case("--workload", workload, *SHORT, "--agents", "3", "--seed", seed) for seed in (5, 5, 6)
    )
    assert one == again != other and one["served"] == one["requests"] != 0


def test_times_and_concurrency_can_be_said(simulate: Simulate) -> None:
    def mean_s(*words: str) -> Any:
        return simulate.played_case("--jitter", "0", *words)["waits"]["mean_s"]

    quick = mean_s("--load-s", "0.1", "--tokens-per-s", "1000")
    assert quick < mean_s("--load-s", "30")
    assert quick < mean_s("--load-s", "0.1", "--tokens-per-s", "5", "--concurrency", "1")


def test_what_waits_too_long_is_refused_as_by_the_gateway(simulate: Simulate) -> None:
    """Answers that take minutes each, one after the other: most wait for longer than the gateway lets them."""
    simulate.rows(*(f"{number},big,1,1000" for number in range(200)))
    words = ("--concurrency", "1", "--tokens-per-s", "10", "--json")
    said = simulate.played(*words).json
    (case,) = said["cases"]
    assert case["waits"]["max_s"] <= 3_600.0 and case["rejected"] == {"expired": case["lost"]} and case["lost"] > 100
    told = "About 92% of those served wait for more than 4.8 min: a caller that does not stream"
    assert told in said["bottom_line"][1]
    assert "after 3,600 s (server.stream_wait_max_s)" in said["assumed"][-2]
    assert said["assumed"][-1].startswith("A higher concurrency takes no more memory here")
    said = simulate.played(*words, "--patience-s", "20000").json
    assert said["cases"][0]["lost"] == 0 and "Callers give up after 20000 s." in said["assumed"]
    assert not any("does not stream" in sentence for sentence in said["bottom_line"])


def test_callers_may_give_up(simulate: Simulate) -> None:
    assert simulate.played_case("--load-s", "60", "--patience-s", "20")["rejected"]["expired"] > 0


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_is_written(simulate: Simulate, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    simulate(*SHORT, "--gpus", "1,2", "--out", report)
    page = report.read_text(encoding="utf-8")
    assert ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>")) is not None
    assert "A second GPU would take" in page and "Poisson arrivals, 0.2 a second" in page


def test_figures_are_shown_even_if_the_report_then_finds_no_room(simulate: Simulate) -> None:
    said = simulate(*SHORT, "--out", "/dev/full", status=1)
    assert "As it is (default)" in said.out and "/dev/full cannot be written" in said.err
    assert "open /dev/full" not in said.err


def test_where_the_report_goes_is_checked_before_anything_is_read(simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    missing, no_folder = f"there is no folder {tmp_path}/no", f"{simulate.config} is not a folder"
    for out, told in (
        (tmp_path, "it is a folder"),
        (tmp_path / "no" / "r.html", missing),
        (f"{tmp_path}/no/", missing),
        (f"{simulate.config}/r.html", no_folder),
        (f"{simulate.config}/", no_folder),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        said = simulate("--trace", "/nowhere.csv", "--out", out, status=1)
        assert f"--out {out} cannot be written: {told}" in said.err


def test_a_report_never_replaces_what_was_read(simulate: Simulate, tmp_path: Path) -> None:
    link = tmp_path / "report.html"
    link.symlink_to(simulate.trace)
    before = simulate.trace.read_text()
    for out, what in ((simulate.config, "the configuration"), (simulate.trace, "the trace"), (link, "the trace")):
        assert f"--out {out} is {what}" in simulate.played("--out", out, status=2).err
    assert simulate.config.read_text() == CONFIG and simulate.trace.read_text() == before


def test_a_report_that_fails_half_way_leaves_the_old_one(
    simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.html"
    report.write_text("old")
    before, write = sorted(os.listdir(tmp_path)), Path.write_text

    def full_disk(path: Path, text: str, encoding: str) -> int:
        write(path, text[:10], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full_disk)
        assert "No space left on device" in simulate(*SHORT, "--out", report, status=1).err
    assert report.read_text() == "old" and sorted(os.listdir(tmp_path)) == before


def test_a_report_goes_through_a_link_and_to_what_is_no_file(simulate: Simulate, tmp_path: Path) -> None:
    report, link = tmp_path / "report.html", tmp_path / "link.html"
    link.symlink_to(report)
    simulate(*SHORT, "--out", link)
    assert link.is_symlink() and report.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


# --- what is said of a trace ------------------------------------------------------------------------------------------


def test_what_was_understood_of_a_trace_is_told(simulate: Simulate) -> None:
    titles = "Timestamp,Model,Request tokens,Response tokens,Total tokens"
    simulate.rows("5,GPT-4,10,20,30", "45,big,10,20,30", head=titles)
    told = f"{simulate.trace}:2: there is no model 'GPT-4' in the configuration. Give it as an"
    assert told in simulate.played(status=1).err
    told = simulate.played("--skip-unknown").err
    assert "trace: 1 request over 0 s" in told and "left out ('GPT-4' 1)" in told
    assert "prompt_len from Request tokens" in told and "not used: Total tokens" in told
    said = simulate.played("--spread", "--time-unit", "ms", "--json")
    assert said.json["cases"][0]["requests"] == 2 and "2 requests over 0 s" in said.err
    assert "in milliseconds (as given)" in said.err and "whatever Model says" in said.err


def test_rows_for_other_models_can_be_left_out(simulate: Simulate) -> None:
    simulate.rows("0,big,1,1", "1,gone,1,1", "2,small,,1")
    told = simulate.played("--skip-unknown", "--json").json
    assert told["cases"][0]["requests"] == 2
    assert told["assumed"][0] == (
        f"2 requests over 2 s from {simulate.trace}; time from t in seconds (by its title); "
        "1 for models that are not in the configuration left out ('gone' 1); "
        "1 without prompt_len taken as 1 tokens, the mean of the others."
    )


@pytest.mark.parametrize(("step", "unit", "other"), [(90_000, "ms", "s"), (30, "s", "ms")])
def test_a_guessed_unit_of_times_is_a_warning_until_it_is_confirmed(
    step: int, unit: str, other: str, simulate: Simulate
) -> None:
    simulate.rows(*(f"{number * step},big,1,1" for number in range(9)), head=HEAD.replace("t,", "timestamp,", 1))
    (warning,) = [line for line in simulate.played().err.splitlines() if line.startswith("warning:")]
    assert warning.startswith(f"warning: {simulate.trace}: timestamp is taken to be in ")
    assert f"--time-unit {unit} confirms it, {other}, us or ns says otherwise" in warning
    assert "warning" not in simulate.played("--time-unit", unit).err


@pytest.mark.parametrize(
    ("rows", "words", "told"),
    [
        (("0,big,1,1", "1,bigg,1,1"), (), ":3: there is no model 'bigg' in the configuration; did you mean 'big'?"),
        (("0,big,1,1", "2e9,big,1,1"), (), "from the first request to the last"),
        (("0,big,1,1", "1e308,big,1,1"), ("--stretch", "10"), "from the first request to the last"),
        (("0,big,1,1", "9,big,1,1"), ("--stretch", "1e300"), "from the first request to the last"),
    ],
)
def test_a_trace_that_cannot_be_played_is_refused(
    rows: tuple[str, ...], words: tuple[str, ...], told: str, simulate: Simulate
) -> None:
    simulate.rows(*rows)
    assert told in simulate.played(*words, status=1).err


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
    words: tuple[str, ...], told: str, simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.csv").write_text(f"{HEAD}\n0,big,1,1")
    Path("two.csv").write_text(f"{HEAD}\n0,big,1,1\n0.1,big,1,1")
    assert told in simulate("--load-s", "8", "--jitter", "0", *words).out


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, ExitStatus.INTERRUPTED), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_process_outlives_the_command(number: signal.Signals, status: int, simulate: Simulate) -> None:
    words = ("simulate", "-c", simulate.config, "--seconds", "1e7", "--gpus", "1,2", "--jobs", "2")
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


# --- the configuration ------------------------------------------------------------------------------------------------


def test_a_remote_model_is_always_ready_and_slows_nothing_down(simulate: Simulate) -> None:
    simulate.config.write_text(f"gpus: [{{memory_mib: 24576}}]\n{FAR}models: {{far: {{remote: cloud}}, {NEAR}}}\n")
    said = simulate(*SHORT, "--green-room-mib", "0,65536", "--json")
    assert "size is not known" not in said.err
    for case in said.json["cases"]:
        assert case["by_model"]["far"]["max_s"] == 0.0 and case["delays_by_model"]["far"]["slow_s"] == 0.0


@pytest.mark.parametrize(("models", "loads"), [("", 0), (f", {NEAR}", 1)])
def test_a_remote_model_is_never_loaded(models: str, loads: int, simulate: Simulate) -> None:
    simulate.config.write_text(f"gpus: [{{memory_mib: 24576}}]\n{FAR}models: {{far: {{remote: cloud}}{models}}}\n")
    case = simulate.case(*SHORT)
    assert (case["loads"], case["swaps"]) == (loads, loads)


@pytest.mark.parametrize("model", ["{remote: cloud}", "{cmd: 'run --port ${PORT}', memory_mib: 512, devices: [host]}"])
def test_a_green_room_can_be_tried_without_gpus_where_no_model_needs_one(model: str, simulate: Simulate) -> None:
    simulate.config.write_text(f"{FAR}models: {{only: {model}}}\n")
    cases = simulate.cases(*SHORT, "--green-room-mib", "0,4096", "--concurrency", "1,4")
    assert len(cases) == 4 and not any(case["lost"] for case in cases)
    assert "--gpu-mib" in simulate(*SHORT, "--gpus", "1", status=2).err


def test_models_sleep_in_a_green_room_that_is_configured(simulate: Simulate) -> None:
    models = ", ".join(f"{name}: {{path: /m/{name}, engine: vllm, memory_mib: 20480}}" for name in ("a", "b"))
    room = "gpus: [{memory_mib: 24576}]\nmemory: {green_room_mib: 65536}\n"
    simulate.config.write_text(f"{room}models: {{{models}}}\n")
    case = simulate.case(*SHORT)
    assert case["wakes"] != 0 and case["loads"] == 2


def test_gpus_can_be_tried_on_a_machine_without(simulate: Simulate) -> None:
    simulate.config.write_text(CONFIG.replace("gpus:", "#"))
    assert "--gpu-mib" in simulate(*SHORT, "--gpus", "1", status=2).err
    told = "warning: the configuration names no gpus, so models are played in the host's"
    assert told in simulate(*SHORT).err
    assert set(simulate.case(*SHORT, "--gpus", "1", "--gpu-mib", "10000")["devices"]) == {"gpu0"}
    out = simulate(*SHORT, "--gpus", "2", "--gpu-mib", "10000,20000").out
    assert "In the first case (default, 2 GPUs of 10,000 MiB), " in out


def test_a_model_of_unknown_size_is_warned_of(simulate: Simulate) -> None:
    simulate.config.write_text('models: {anything: {cmd: "sh --port ${PORT}"}}')
    assert "models.anything: its size is not known" in simulate(*SHORT).err


def test_another_scheduler_is_played_by_its_name(simulate: Simulate) -> None:
    busy = ("--seconds", "600", "--rate", "0.5")
    default, plain = simulate.case(*busy), simulate.case(*busy, "--scheduler", "plain")
    assert plain["swaps"] > default["swaps"]
    said = simulate(*busy, "--scheduler", "plain")
    assert "The scheduler is plain; policies are the default one's." in said.err and "As it is" not in said.out
    simulate.config.write_text(f"{CONFIG}\nscheduler: {{implementation: plain}}\n")
    assert simulate.case(*busy) == plain
    assert "As it is" in simulate(*busy).out


def test_the_policy_is_the_configurations_unless_it_is_said(simulate: Simulate) -> None:
    simulate.config.write_text(f"{CONFIG}\nscheduler: {{policy: fifo}}\n")
    usual = simulate.case(*SHORT)
    assert usual == simulate.case(*SHORT, "--policy", "fifo") and usual["policy"] == "fifo"
    assert simulate.case(*SHORT, "--policy", "default")["policy"] == "default"


def test_models_that_need_not_fit_take_no_room(simulate: Simulate) -> None:
    fitting = simulate.played_case()
    matrix = "{sets: {all: big & small & other}}"
    simulate.config.write_text(f"{CONFIG}\nscheduler: {{fit_memory: false, company: {{matrix: {matrix}}}}}\n")
    said = simulate.played("--json")
    assert said.json["cases"][0]["loads"] == 3 < fitting["loads"]
    assert "size is not known" not in said.err


@pytest.mark.parametrize(
    ("config", "words", "status", "told"),
    [
        ("models: {}", (), 1, "there is no model"),
        (f"{CONFIG}\nscheduler: {{implementation: coin}}\n", (), 1, "there is no implementation 'coin'"),
        (
            f"{CONFIG}\nscheduler: {{swapper: largest}}\n",
            ("--policy", "default"),
            1,
            "greenroom: scheduler.swapper: there is no swapper 'largest'; there are coordinator, memory\n",
        ),
        # A policy that is not there is named before it.
        (
            f"{CONFIG}\nscheduler: {{swapper: largest}}\n",
            ("--policy", "default,lifo"),
            2,
            "there is no policy 'lifo': default or fifo",
        ),
        *(
            (
                f"models: {{only: {{cmd: 'run --port ${{PORT}}'{size}}}}}\n",
                ("--green-room-mib", "0,4096"),
                2,
                "say how large one is with --gpu-mib",
            )
            for size in (", memory_mib: 512", "")
        ),
    ],
)
def test_what_cannot_be_simulated_of_a_configuration_is_told(
    config: str, words: tuple[str, ...], status: int, told: str, simulate: Simulate
) -> None:
    simulate.config.write_text(config)
    assert told in simulate(*SHORT, *words, status=status).err


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--trace", "trace.csv", "--rate", "5", "--workload", "bursty"),
            "--workload, --rate without effect: the requests are those of the trace",
        ),
        ((*SHORT, "--stretch", "2", "--skip-unknown"), "--stretch, --skip-unknown without effect: there is no --trace"),
        ((*SHORT, "--agents", "3"), "--agents without effect: --workload is poisson"),
        (("--workload", "agents", "--seconds", "60", "--rate", "5"), "--rate without effect: --workload is agents"),
        (
            (*SHORT, "--asleep", "asleep.json", "--green-room-mib", "8000"),
            "--asleep without effect: with --green-room-mib every model can sleep, with all its memory on the host",
        ),
    ],
)
def test_options_without_effect_are_warned_of(
    words: tuple[str, ...], told: str, simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("asleep.json").write_text('{"small": [0, 4000]}')
    assert f"warning: {told}" in simulate(*words).err
    assert "without effect" not in simulate.played("--stretch", "2").err


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("--out", "/nowhere/at/all.html"), 1, "/nowhere/at/all.html cannot be written"),
        (("--trace", "/dev/zero"), 1, "/dev/zero"),
        (("--trace", "/dev/urandom"), 1, "/dev/urandom"),
        (("--policy", "default,lifo"), 2, "there is no policy 'lifo': default or fifo"),
        (("--policy", "default,,fifo"), 2, "--policy 'default,,fifo' lacks a name"),
        (("--gpus", "1..60", "--policy", "default,fifo"), 2, "120 cases are more than 100"),
        (("--scheduler", "coin"), 2, "--scheduler: there is no implementation 'coin'; there are default, plain"),
        (("--rate", "1e5"), 2, "about 360,000,000 requests are more than 50,000,000: give a smaller --rate or --seco"),
        (("--rate", "1e300"), 2, "far more than 1,000,000,000,000 requests are more than 50,000,000: give a smaller"),
        (("--rate", "1e308", "--seconds", "1e-305", "--workload", "bursty"), 2, "more than 50,000,000"),
        (("--workload", "agents", "--agents", "50000"), 2, "about 90,000,000 requests"),
        (("--workload", "agents", "--agents", "50000"), 2, "give a smaller --agents"),
        (("--rate", "1e-300", "--seconds", "1e300"), 2, "--seconds 1e+300 is more than 1,000,000,000"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: tuple[str, ...], status: int, told: str, simulate: Simulate
) -> None:
    assert told in simulate(*words, status=status).err


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
def test_wrong_options_are_refused(option: str, value: str, told: str, simulate: Simulate) -> None:
    assert f"argument {option}: {told}" in simulate(option, value, status=2).err


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
def test_a_wrong_file_of_needs_asleep_is_refused(text: str, told: str, simulate: Simulate, tmp_path: Path) -> None:
    file = tmp_path / "asleep.json"
    file.write_text(text)
    said = simulate("--asleep", file, status=2).err
    assert "argument --asleep: " in said and told in said and str(file) in said


@pytest.mark.parametrize(
    ("name", "told"),
    [("none.json", "No such file or directory"), ("", "Is a directory"), ("latin.json", "it is not UTF-8")],
)
def test_a_file_of_needs_asleep_that_cannot_be_read_is_refused(
    name: str, told: str, simulate: Simulate, tmp_path: Path
) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"\xff": [0, 1]}')
    file = tmp_path / name
    assert simulate("--asleep", file, status=2).err.endswith(f"argument --asleep: {file} cannot be read: {told}\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '{"little": [0, 4000], "big": [0, 4000], "small": [0, 8000]}',
            "'little' and 'small' are the same model: name it once",
        ),
        ('{"smal": [0, 4000]}', "there is no model 'smal' in the configuration; did you mean 'small'?"),
    ],
)
def test_needs_asleep_name_each_model_once(text: str, told: str, simulate: Simulate, tmp_path: Path) -> None:
    (tmp_path / "asleep.json").write_text(text)
    assert simulate("--asleep", tmp_path / "asleep.json", status=2).err == f"greenroom: --asleep: {told}\n"


def test_needs_asleep_may_name_an_alias(simulate: Simulate, tmp_path: Path) -> None:
    simulate.config.write_text(f"{CONFIG}host: {{memory_mib: 20000}}\nmemory: {{green_room_mib: 20000}}\n")
    file, found = tmp_path / "asleep.json", []
    for name in ("small", "little"):
        file.write_text(json.dumps({name: [0, 4_000]}))
        found.append(simulate.case(*SHORT, "--asleep", file))
    assert found[0] == found[1] and found[0]["sleeps"]


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
    policies: str, told: str, beside: str, simulate: Simulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"{tmp_path.name}_broken"
    entries = [f"{name.lower()} = {module}:{name}\n" for name in ("Bare", "Raising", "Reading")]
    install(tmp_path, "[greenroom.policies]\n" + "".join(entries), **{module: POLICIES})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert told in simulate(*SHORT, "--jobs", "2", "--policy", policies + beside, status=1).err


# --- words that the gateway explains by -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "why", ["busy", "leaving", "no_room", "leased", "kept_for_others", "crowd", "green_room", "no_lease", "store_down"]
)
def test_every_reason_to_wait_has_a_sentence(why: str) -> None:
    nothing: dict[str, object] = {"behind": [], "evict": [], "position": None, "eta_s": None, "retry_after_s": None}
    first = explain.words({"action": "wait", "model": "big", "why": why, **nothing})[0]
    assert first == f"big would have to wait: {explain.WAITING[why]}"


# --- the guide --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_guide_shows_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    (block,) = blocks("docs/simulate.md", "yaml")
    (tmp_path / "greenroom.yaml").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/simulate.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```bash\n(.*?)^```\n\n```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    for command, output in examples:
        assert cli(*shlex.split(command)[1:]).out.split() == output.split()
