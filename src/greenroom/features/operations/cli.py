"""Orders to a gateway: `greenroom load`, `unload`, `sleep` and `prepare`, which wait until the move is done, `reload`,
`flush` and `logs`."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand, seconds
from greenroom.cli.failures import CommandFailed

if TYPE_CHECKING:
    from greenroom.cli.client import Client


# A load has a deadline of its own; this is for a gateway that died without closing its connections.
MOVE_MAX_S: Final = 7_200.0
LOOK_EVERY_S: Final = 0.5


def _load(args: argparse.Namespace) -> None:
    _carry_out(args, "load", "loading")
    _hint(args, "it answers at once now; `greenroom ps` shows which models had to leave")


def _prepare(args: argparse.Namespace) -> None:
    _carry_out(args, "prepare", "preparing")
    _hint(args, "its first request wakes it; `greenroom load` would do so now")


def _sleep(args: argparse.Namespace) -> None:
    answer = _carry_out(args, "sleep", "putting to sleep")
    if answer["tier"] == "cold":
        _hint(args, f"it was not ready; `greenroom prepare {answer['model']}` brings it into the green room")
    else:
        _hint(args, "the next request wakes it; `greenroom ps` shows where each model is")


def _unload(args: argparse.Namespace) -> None:
    _carry_out(args, "unload", "unloading")
    _hint(args, "the next request for it loads it again; see `greenroom ps`")


def _hint(args: argparse.Namespace, what: str) -> None:
    """What to type or to expect next."""
    if not args.json:
        screen.hint(what)


def _add_bring_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--evict", action="append", default=[], metavar="MODEL", help="unload this model to make room; may be repeated"
    )
    parser.add_argument("--force", action="store_true", help="evict these also if they are pinned")
    address.add_token_option(parser)
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _add_leave_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--grace-s", type=seconds, metavar="S", help="how long running answers may go on (default: the model's grace_s)"
    )
    parser.add_argument("--force", action="store_true", help="also if it is pinned")
    address.add_token_option(parser)
    address.add_options(parser, json_help="print the gateway's answer as JSON")


LOAD = Subcommand("load", "Make a model ready now, and wait until it is.", _add_bring_options, _load)
UNLOAD = Subcommand("unload", "Stop a model's engine, and wait until its memory is free.", _add_leave_options, _unload)
SLEEP = Subcommand(
    "sleep",
    "Free a model's GPU memory but keep its weights in host memory, so that it can wake at once.",
    _add_leave_options,
    _sleep,
)
PREPARE = Subcommand(
    "prepare",
    "Read a model into host memory while others are served, so that it can wake at once.",
    _add_bring_options,
    _prepare,
)


def _carry_out(args: argparse.Namespace, order: str, doing: str) -> Mapping[str, Any]:
    """Ask for it with the options that were given, and say where the model is then."""
    from greenroom.cli.client import Client

    grace_s, evict = getattr(args, "grace_s", None), getattr(args, "evict", None)
    if grace_s is not None and grace_s.is_integer():
        # A whole number can be signed, a fraction cannot.
        grace_s = int(grace_s)
    # Only what is said: this is the body that a token is signed for.
    said = {"evict": evict or None, "grace_s": grace_s, "force": args.force or None}
    body = {key: value for key, value in said.items() if value is not None}
    answer, took_s = move(Client(address.address_of(args)), args.model, order, body, doing, address.token_of(args))
    if args.json:
        screen.say_json(answer)
    else:
        screen.say(f"{answer['model']} is {answer['tier']} after {screen.seconds(took_s)}")
    return answer


def move(
    client: Client, model: str, order: str, body: Mapping[str, object], doing: str, token: str | None = None
) -> tuple[Mapping[str, Any], float]:
    """Ask for the move and wait. Returns the gateway's answer and the seconds it took. Raises CommandFailed."""
    from greenroom.cli.client import model_path

    began = time.monotonic()
    path = model_path(model, order)
    with screen.spinner(f"{doing} {model}") as show:
        answer = _in_background(
            lambda: client.post(path, dict(body), answer_max_s=MOVE_MAX_S, token=token),
            lambda: show(f"{doing} {model}: {outlook(client, model, time.monotonic() - began)}"),
        )
    return answer, time.monotonic() - began


def outlook(client: Client, model: str, waited_s: float) -> str:
    """Time so far and time to go, as text; only the time so far where the gateway does not know the rest."""
    so_far = screen.seconds(waited_s)
    try:
        models = client.get("/api/v1/status")["models"]
    except CommandFailed:
        # The request for the move itself reports what is wrong.
        return so_far
    # An alias is not among the ids, so it has no time to go.
    moving = next((known["moving"] for known in models if known["id"] == model), None) or {}
    eta_s = moving.get("eta_s")
    return so_far if eta_s is None else f"{so_far}, about {screen.seconds(eta_s)} to go"


def _in_background(call: Callable[[], Any], look: Callable[[], None]) -> Any:
    """Run the call in a thread and `look` meanwhile, at a terminal. An interrupt does not wait for the call."""
    if not sys.stderr.isatty():
        return call()
    from concurrent.futures import Future

    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="order", daemon=True).start()
    while True:
        try:
            return future.result(LOOK_EVERY_S)
        except TimeoutError:
            if future.done():
                raise
            look()


# --- configuration, caches, logs --------------------------------------------------------------------------------------


# The file may be on a slow disk, and the sizes of model files are looked up.
RELOAD_MAX_S: Final = 120.0
FLUSH_PATH: Final = "/v1/cache/flush"
FLUSH_MAX_S: Final = 120.0
# The gateway's word for each kind of change, the mark before its line, and its meaning.
KINDS: Final = (
    ("added", "+", "new"),
    ("removed", "-", "finishes its answers and leaves"),
    ("changed", "~", "gets a new engine at its next request"),
    ("relabelled", "=", "keeps running, with new settings"),
    ("at_once", "*", "applied"),
)


def _add_reload_options(parser: argparse.ArgumentParser) -> None:
    address.add_token_option(parser)
    address.add_options(parser, json_help="print what changed as JSON")


def _reload(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client

    began = time.monotonic()
    client, token = Client(address.address_of(args)), address.token_of(args)
    changes = client.post("/api/v1/reload", answer_max_s=RELOAD_MAX_S, token=token)
    if args.json:
        screen.say_json(changes)
        return
    lines = told(changes)
    for line in lines:
        screen.say(line)
    changed = f"{len(lines)} change{'s' if len(lines) != 1 else ''}" if lines else "nothing changed"
    screen.say(f"reloaded in {screen.seconds(time.monotonic() - began)}: {changed}")
    if changes.get("added"):
        screen.hint(f"make the new one ready: greenroom load {changes['added'][0]}")


RELOAD = Subcommand(
    "reload", "Have the gateway read its configuration again and apply what changed.", _add_reload_options, _reload
)


def told(changes: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each model or key that changed."""
    return [f"{mark} {name}: {meaning}" for kind, mark, meaning in KINDS for name in changes.get(kind, ())]


def _add_flush_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="its id or an alias (default: all models)")
    parser.add_argument("--tenant", help="only what this tenant's requests left")
    parser.add_argument("--tag", help="only what requests with this X-Cache-Tag left")
    address.add_token_option(parser)
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def _flush(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client

    named = {"tag": args.tag, "tenant": args.tenant, "model": args.model}
    scope = next((scope for scope, value in named.items() if value is not None), "all")
    fields = {"scope": scope, "modelId": args.model, "tenantId": args.tenant, "tag": args.tag}
    # Only what is said: this is the body that a token is signed for.
    body = {key: value for key, value in fields.items() if value is not None}
    client = Client(address.address_of(args))
    answer = client.post(FLUSH_PATH, body, answer_max_s=FLUSH_MAX_S, token=address.token_of(args))
    if args.json:
        screen.say_json(answer)
    elif answer["flushed"]:
        removed = answer["entriesRemoved"]
        screen.say("flushed" if removed is None else f"flushed: {removed:,} entries removed")
    if not answer["flushed"]:
        raise CommandFailed(answer["reason"])


FLUSH = Subcommand(
    "flush", "Empty the caches of prompts: of a model, a tenant, a tag, or all.", _add_flush_options, _flush
)


# --- logs -------------------------------------------------------------------------------------------------------------


LINES: Final = 200


def _add_logs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument("-f", "--follow", action="store_true", help="follow new lines until interrupted")
    parser.add_argument("-n", "--lines", type=_count, default=LINES, metavar="N", help=f"last lines (default: {LINES})")
    address.add_options(parser, json_help="print JSON; with -f one string a line")


def _logs(args: argparse.Namespace) -> None:
    from greenroom.cli.client import Client, model_path

    client = Client(address.address_of(args))
    if args.follow:
        _follow(client, model_path(args.model, "logs/stream"), args)
        return
    answer = client.get(model_path(args.model, "logs"), {"lines": args.lines})
    if args.json:
        screen.say_json(answer)
        return
    for line in answer["lines"]:
        screen.say(line)
    if not answer["lines"]:
        screen.note(f"the engine of {answer['model']} has printed nothing; to see whether it runs: greenroom ps")


LOGS = Subcommand(
    "logs",
    "Print the last lines of a model's engine, and with -f the next ones as they come.",
    _add_logs_options,
    _logs,
)


def _follow(client: Client, path: str, args: argparse.Namespace) -> None:
    with client.stream("GET", f"{path}?lines={args.lines}") as events:
        for event in events:
            if event.comment is None:
                _show(event.data, args.json)
    screen.note("the gateway ended the stream")


def _show(line: str, as_json: bool) -> None:
    if as_json:
        screen.say_json(line, on_one_line=True)
    else:
        screen.say(line)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("a number of lines is not negative")
    return number
