"""What many commands have in common: `--json`, `--watch`, refusals of the gateway, and words that are wrong usage."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cli.command import Cli
from tests.cli.fake_gateway import Answer, FakeGateway, answer, error

MODEL = "/api/v1/models/m"
HOST = {"available_mib": 1, "total_mib": 2}
GPUS = {"probe": {"kind": "nvml", "looked_s_ago": 0.2, "failure": None, "pids_visible": True}, "host": HOST, "gpus": []}
STATUS = {"uptime_s": 1.0, "queue": {"depth": 2}, "devices": [], "models": []}


@pytest.mark.parametrize(
    ("command", "method", "path"),
    [
        ("explain m", "POST", "/api/v1/explain"),
        ("gpus", "GET", "/api/v1/gpus"),
        ("ps", "GET", "/api/v1/status"),
        *((f"{order} m", "POST", f"{MODEL}/{order}") for order in ("load", "unload", "sleep", "prepare")),
        ("logs m", "GET", f"{MODEL}/logs"),
        ("reload", "POST", "/api/v1/reload"),
        ("leases", "GET", "/api/v1/leases"),
        ("decisions", "GET", "/api/v1/decisions"),
        ("usage", "GET", "/api/v1/usage"),
    ],
)
def test_json_is_what_the_gateway_gave(command: str, method: str, path: str, gateway: FakeGateway, cli: Cli) -> None:
    told: dict[str, Any] = {"model": "m", "tier": "ready", "any": [1, None], "leases": []}
    gateway.on(method, path, answer(told))
    assert cli(*command.split(), "--json").json == told


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    ("command", "path", "told", "titles"), [("gpus", "gpus", GPUS, "no GPUs"), ("ps", "status", STATUS, "MODEL ")]
)
def test_watching_goes_on_until_interrupted(
    command: str,
    path: str,
    told: dict[str, Any],
    titles: str,
    as_json: bool,
    gateway: FakeGateway,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", nap)
    gateway.on("GET", f"/api/v1/{path}", answer(told))
    said = cli(command, "--watch", *(["--json"] if as_json else []), status=130)
    assert (len(said.lines) if as_json else (said.out + said.err).count(titles)) == 3


UNKNOWN = error(404, "model_not_found", "There is no model m. GET /v1/models lists those there are.")
LISTED = "There is no model m. `greenroom ps` lists those there are.\n"
PINNED = error(
    409, "model_pinned", "m is pinned. Ask with force=true to have it leave all the same, or unpin it first."
)


@pytest.mark.parametrize(
    ("command", "method", "path", "refusal", "said"),
    [
        ("explain m", "POST", "/api/v1/explain", UNKNOWN, LISTED),
        ("load m", "POST", f"{MODEL}/load", UNKNOWN, LISTED),
        ("chat m hello", "POST", "/v1/chat/completions", UNKNOWN, LISTED),
        ("unload m", "POST", f"{MODEL}/unload", PINNED, "m is pinned. Say --force to have it leave"),
        (
            "sleep m",
            "POST",
            f"{MODEL}/sleep",
            error(422, "unsupported", "m runs on llamacpp. `unload` works."),
            "m runs on llamacpp. `unload` works.\n",
        ),
        (
            "reload",
            "POST",
            "/api/v1/reload",
            error(422, "invalid_config", "g.yaml:3: models: unknown key"),
            "g.yaml:3: models: unknown key\n",
        ),
        ("jobs result j", "GET", "/v1/jobs/j/result", error(409, "job_unfinished", "It is running."), "It is running."),
        # With the lines of the engine.
        (
            "load m",
            "POST",
            f"{MODEL}/load",
            error(503, "model_load_failed", "m broke.", "bad magic\n\x1b[31mred"),
            "m broke.\n  | bad magic\n  | \N{REPLACEMENT CHARACTER}[31mred\n",
        ),
    ],
)
def test_a_refusal_of_the_gateway_is_told_in_the_words_of_the_command_line(
    command: str, method: str, path: str, refusal: Answer, said: str, gateway: FakeGateway, cli: Cli
) -> None:
    gateway.on(method, path, refusal)
    out, err = cli(*command.split(), status=1)
    assert out == "" and f"greenroom: {said}" in err


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_decisions_about_an_unknown_model_are_refused(gateway: FakeGateway, options: list[str], cli: Cli) -> None:
    gateway.on("GET", "/api/v1/decisions", answer({"decisions": []}))
    gateway.on("GET", f"{MODEL}/logs", UNKNOWN)
    assert cli("decisions", "m", *options, status=1) == ("", f"greenroom: {LISTED}")


# --- wrong usage ------------------------------------------------------------------------------------------------------

LEASE = "lease --mib 1"


@pytest.mark.parametrize(
    ("command", "option", "wrong", "said"),
    [
        (command, option, wrong, said)
        for command, option, values, said in (
            ("unload m", "--grace-s", ("nan", "inf", "-1", "1e400", "soon"), "{option}: {wrong} is no number"),
            ("chat m", "--temperature", ("nan", "inf", "-1", "1e400", "soon"), "{option}: {wrong} is no number"),
            (
                "explain m",
                "--budget-s",
                ("-1", "0", "nan", "soon"),
                "{option}: {wrong} is no number of seconds above 0",
            ),
            ("decisions", "--last", ("0", "-1", "1001", "all"), "1,000"),
            (LEASE, "--priority", ("urgent", "²", "--5", "1234", ""), "'{wrong}' is no priority"),
            (LEASE, "--wait", ("nan", "inf", "-1"), "is a number of seconds from 0 to 31,536,000"),
            (LEASE, "--grace-s", ("1e9",), "is a number of seconds from 0 to 31,536,000"),
            (LEASE, "--ttl-s", ("nan",), "is a number of seconds from 0 to 31,536,000"),
            (LEASE, "--mib", ("-5", "0"), "is no whole number above 0"),
            (LEASE, "--gpus", ("0",), "is no whole number above 0"),
            ("estimate m.gguf", "--ctx", ("many", "9" * 5_000), "whole number"),
            ("estimate m.gguf", "--gpus", ("-1",), "whole number"),
            ("estimate m.gguf", "--gpus", ("999999999",), "no machine has 999,999,999 GPUs"),
            ("trainer keep org/new", "--every-s", ("-1", "nan", "0"), "seconds"),
            ("trainer keep org/new", "--away-s", ("-1", "inf"), "seconds"),
            ("serve", "--port", ("80x", "", "-1", "65536", "²"), "{wrong} is not a port: 0 to 65535"),
            ("serve", "--lease-store", ("ftp://x",), "the address must begin with redis://"),
            ("ps", "--url", ("ftp://x",), "'ftp://x' is not an address; write it like http://127.0.0.1:8210\n"),
        )
        for wrong in values
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_that_cannot_be_is_wrong_usage(command: str, option: str, wrong: str, said: str, cli: Cli) -> None:
    program = ["--", "true"] if command == LEASE else []
    err = cli(*command.split(), f"{option}={wrong}", *program, status=2).err
    assert said.format(option=option, wrong=wrong) in err and "waiting for" not in err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lease --mib 1", "usage: greenroom lease"),
        ("lease -- true", "usage: greenroom lease"),
        ("lease --mib x -- true", "usage: greenroom lease"),
        *((f"replicas {count}", "usage: greenroom replicas") for count in ("0", "two", "65", "-1")),
        *((f"jobs {action}", "id") for action in ("show", "cancel", "result", "wait", "list job-1")),
    ],
)
def test_what_lacks_a_word_or_has_one_too_many_is_wrong_usage(
    command: str, said: str, gateway: FakeGateway, cli: Cli
) -> None:
    assert said in cli(*command.split(), status=2).err
    assert gateway.asked == []


NOT_UTF_8 = r"'a\udcff' is not UTF-8, and cannot be sent"
NAMED = ("decisions", "load", "unload", "sleep", "prepare", "logs", "explain")


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        *((command, "a\udcff", NOT_UTF_8) for command in (*NAMED, "flush", "logs -f", "chat m", "jobs show")),
        *((command, "a\udcff", NOT_UTF_8) for command in ("usage --by", "usage --csv --by", "explain m --tenant")),
        ("trainer verify --model", "a\udcff", NOT_UTF_8),
        *(
            (command, name, f"{name!r} is no name of a model: {why}")
            for command in NAMED
            for name, why in (("a\nb", "it has control or invisible characters"), ("", "it is empty"))
        ),
    ],
)
def test_what_cannot_be_a_name_is_wrong_usage(
    command: str, name: str, said: str, gateway: FakeGateway, cli: Cli
) -> None:
    out, err = cli(*command.split(), name, status=2)
    assert out == "" and err.splitlines()[-1] == f"greenroom: {said}"
    assert gateway.asked == []
