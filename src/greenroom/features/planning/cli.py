"""`greenroom explain`: what would happen to a request that came now; `greenroom decisions`: what was decided lately.
What the words mean: docs/operating.md."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand, seconds_above_0
from greenroom.cli.failures import GatewayRefused

# The scheduler's reasons to wait and to refuse, as sentences.
WAITING: Final = {
    "busy": "it is ready and answers as many requests at once as it can",
    "leaving": "it is on its way out and has to be gone first",
    "no_room": "the models that would have to leave for it may not do so yet",
    "leased": "its memory is leased to other programs",
    "kept_for_others": "its memory is kept for requests that have waited too long already",
    "crowd": "requests for many models wait already and are handled in turn",
    "excluded": "scheduler.company does not let it be ready beside models that cannot leave now",
    "held": "its next version takes its place, and needs its memory",
    "green_room": "the green room has no memory left for it",
    "no_lease": "its memory was leased to another program or is not really free yet; it is asked for again soon",
    "store_down": "the lease store does not answer",
}
REFUSED: Final = {
    "queue_full": "the queue is full",
    "tenant_queue_full": "the tenant's places in the queue are taken",
    "load_failed": "its last load failed or its engine ended again, and it is not tried again yet",
    "excluded": "scheduler.company does not let it be ready beside a pinned model",
    "too_large": "it does not fit on the devices there are",
    "expired": "its answer would not come in time",
    "shutting_down": "the gateway is shutting down",
    "store_down": "the lease store does not answer",
}

# Why a model of a task is the one, or is not.
VERDICTS: Final = {
    "chosen": "it is the one",
    "refused": "it cannot serve now",
    "last_resort": "it is remote, and used only if no other can serve in time",
    "late": "its answer would not be there within the budget",
    "not_sooner": "it comes after the one that was chosen",
    "slower": "a later one serves sooner by more than prefer_first_s",
}

Explained = Mapping[str, Any]


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id, an alias, or a task")
    parser.add_argument("--priority", help="high, normal, low or a number (default: that of the model or task)")
    parser.add_argument("--tenant", help="the tenant it would be for")
    parser.add_argument("--stream", action="store_true", help="as a stream, whose caller can wait longer")
    parser.add_argument(
        "--budget-s", type=seconds_above_0, metavar="SECONDS", help="how long the whole answer may take"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _explain(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client, model_name

    model_name(args.model)
    explained = Client(address.address_of(args)).post("/api/v1/explain", _ask(args))
    if args.json:
        screen.say_json(explained)
        return
    for line in words(explained):
        screen.say(line)
    if args.budget_s is not None and explained["action"] == "serve":
        screen.say(f"  its answer would be cut after {screen.seconds(args.budget_s)}: its budget")
    screen.hint("nothing was changed; what was decided lately: greenroom decisions")


EXPLAIN = Subcommand(
    "explain",
    "Say what would happen if a request for a model came now, and why. Changes nothing.",
    _add_explain_options,
    _explain,
)


def _ask(args: argparse.Namespace) -> dict[str, object]:
    said = {"model": args.model, "priority": args.priority, "tenant": args.tenant, "x_budget_s": args.budget_s}
    given: dict[str, object] = {name: value for name, value in said.items() if value is not None}
    return {**given, "stream": True} if args.stream else given


def words(explained: Explained) -> list[str]:
    """The answer in sentences: what would happen, which models would leave, how long it would take."""
    first = _SENTENCES[explained["action"]](explained)
    leaving = [f"  {one['model']} would {_leave(one)}: {one['why']}" for one in explained["evict"]]
    return [first, *leaving, *_place(explained), *map(_candidate, explained.get("candidates", ()))]


def _candidate(one: Mapping[str, Any]) -> str:
    """A model of the task, and why it is the one, or is not."""
    why, eta_s = one.get("why"), one.get("eta_s")
    said = VERDICTS.get(one["verdict"], str(one["verdict"]).replace("_", " "))
    if one["verdict"] == "refused":
        said = REFUSED.get(str(why), said)
    elif one["verdict"] == "left_out":
        said = f"passed over: {why}"
    when = (
        "" if eta_s is None else f" (could begin in about {screen.seconds(eta_s)})" if eta_s else " (could begin now)"
    )
    return f"  candidate {one['model']}: {said}{when}"


def _leave(one: Mapping[str, Any]) -> str:
    return "be recalled" if one.get("is_lease") else "fall asleep" if one["to"] == "asleep" else "be unloaded"


def _serve(explained: Explained) -> str:
    return f"{explained['model']} is ready: the request would be served at once"


def _join(explained: Explained) -> str:
    return f"{explained['model']} is on its way already: the request would wait for it"


def _swap(explained: Explained) -> str:
    how = "woken" if explained["move"] == "wake" else "loaded"
    room = f" after {_list([one['model'] for one in explained['evict']])} made room" if explained["evict"] else ""
    return f"{explained['model']} would be {how}{_on(explained)}{room}"


def _on(explained: Explained) -> str:
    """Its GPUs; the host only for a model that uses none."""
    names = [one["name"] for one in explained.get("devices", ())]
    shown = [name for name in names if name != "host"] or names
    return f" on {_list(shown)}" if shown else ""


def _wait(explained: Explained) -> str:
    why = WAITING.get(explained["why"], str(explained["why"]).replace("_", " "))
    names = f" ({_list(leases)})" if (leases := explained.get("leases")) else ""
    return f"{explained['model']} would have to wait: {why}{names}"


def _refuse(explained: Explained) -> str:
    why = REFUSED.get(explained["why"], str(explained["why"]).replace("_", " "))
    return f"{explained['model']} would be refused: {why}"


_SENTENCES: Final = {"serve": _serve, "join": _join, "swap": _swap, "wait": _wait, "refuse": _refuse}


def _place(explained: Explained) -> list[str]:
    lines = [f"  {detail}"] if (detail := explained.get("detail")) else []
    if explained["behind"]:
        lines.append(f"  requests for {_list(explained['behind'])} would go first")
    if beside := explained.get("beside"):
        lines.append(f"  not beside: {_list(beside)}")
    if called_off := explained.get("calls_off"):
        lines.append(f"  {_list(called_off)} would have to be planned again, being less urgent")
    if explained.get("wait_max_s") == 0:
        return [*lines, *_refused_at_once(explained)]
    if explained.get("too_late"):
        lines.append(
            "  this caller would be refused: its time is over by then; the model would be brought all the same"
        )
    if explained["position"] is not None:
        lines.append(f"  place in the queue: {explained['position']}")
    return [*lines, *_time(explained)]


def _refused_at_once(explained: Explained) -> list[str]:
    refused = "  this caller would be refused at once: it may not wait (server.wait_max_s, stream_wait_max_s)"
    return [refused, "  the model would be brought all the same"] if explained.get("too_late") else [refused]


def _time(explained: Explained) -> list[str]:
    action, eta_s, retry_s = explained["action"], explained["eta_s"], explained["retry_after_s"]
    if action == "refuse":
        # Without a retry time, another try would fail as well.
        return [f"  worth another try in about {screen.seconds(retry_s)}"] if retry_s else []
    if action == "serve":
        return []
    wait_max_s = explained.get("wait_max_s")
    refused = "" if wait_max_s is None else f"; after {screen.seconds(wait_max_s)} it would be refused"
    if eta_s is None:
        return [f"  how long that takes is not known{'' if explained['why'] == 'leased' else ' yet'}{refused}"]
    is_longer = wait_max_s is not None and eta_s > wait_max_s
    return [f"  its answer would begin in about {screen.seconds(eta_s)}{refused if is_longer else ''}"]


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# --- decisions --------------------------------------------------------------------------------------------------------


SHOWN: Final = 20
SHOWN_MAX: Final = 1_000
TITLES: Final = ("at", "what", "model", "why")
# Facts that the other columns have, or that only programs need.
_ELSEWHERE: Final = frozenset(("seq", "at", "what", "model", "why", "slot", "move"))


def _add_decisions_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="only of this model, and evictions for it (default: of all)")
    parser.add_argument(
        "-n", "--last", type=_count, default=SHOWN, metavar="N", help=f"so many, the newest last (default: {SHOWN})"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _decisions(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client, model_path

    client = Client(address.address_of(args))
    logs = None if args.model is None else model_path(args.model, "logs")
    asked = {"limit": args.last} if args.model is None else {"limit": args.last, "model": args.model}
    answer = client.get("/api/v1/decisions", asked)
    if logs is not None and not answer["decisions"]:
        try:
            # The gateway refuses this for a model that does not exist. One that was removed may still have decisions.
            client.get(logs, {"lines": 0})
        except GatewayRefused as refused:
            # A key may be allowed to see decisions and no logs.
            if refused.status != 403:
                raise
        screen.note(f"nothing was decided about {args.model} lately")
    if args.json:
        screen.say_json(answer)
        return
    screen.say_table(TITLES, [_decision_row(one) for one in answer["decisions"]])
    screen.hint("what would happen to a request that came now: greenroom explain MODEL")


DECISIONS = Subcommand(
    "decisions", "Show what was decided lately about models and requests, and why.", _add_decisions_options, _decisions
)


def _decision_row(decision: Mapping[str, Any]) -> tuple[str, ...]:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(decision["at"]))
    facts = [f"{name}={value}" for name, value in decision.items() if name not in _ELSEWHERE]
    return at, decision["what"], decision.get("model") or "-", " ".join([decision["why"], *facts])


def _count(text: str) -> int:
    """Raises ArgumentTypeError, which argparse reports as wrong usage."""
    if not text.isdecimal() or not 1 <= int(text) <= SHOWN_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 to {SHOWN_MAX:,}")
    return int(text)
