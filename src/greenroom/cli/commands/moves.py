"""What `load`, `unload`, `sleep` and `prepare` share: their options, asking for a move, showing how far it is, the end.

Owns what all four say. What is to be typed next is each command's own.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import address, screen
from greenroom.cli.failures import CommandFailed, Exit

if TYPE_CHECKING:
    from greenroom.cli.client import Client

# A load ends at the model's own deadline; this is for a gateway that has died without closing its connections.
MOVE_MAX_S: Final = 7_200.0
LOOK_EVERY_S: Final = 0.5

# What to type or to expect next, by the gateway's answer.
Hint = Callable[[Mapping[str, Any]], str]


def add_bringing_options(parser: argparse.ArgumentParser) -> None:
    """Those of orders that bring a model."""
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--evict", action="append", default=[], metavar="MODEL", help="unload this one for it; may be repeated"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def add_leaving_options(parser: argparse.ArgumentParser) -> None:
    """Those of orders that send a model away."""
    parser.add_argument("model", help="its id or an alias")
    parser.add_argument(
        "--grace-s", type=float, metavar="S", help="how long running answers may go on (default: the model's grace_s)"
    )
    address.add_options(parser, json_help="print the gateway's answer as JSON")


def bring(args: argparse.Namespace, order: str, doing: str, hint: Hint) -> int:
    return _carry_out(args, order, {"evict": args.evict} if args.evict else {}, doing, hint)


def send_away(args: argparse.Namespace, order: str, doing: str, hint: Hint) -> int:
    return _carry_out(args, order, {} if args.grace_s is None else {"grace_s": args.grace_s}, doing, hint)


def _carry_out(args: argparse.Namespace, order: str, body: Mapping[str, object], doing: str, hint: Hint) -> int:
    from greenroom.cli.client import Client

    answer, took_s = move(Client(address.address_of(args)), args.model, order, body, doing)
    if args.json:
        screen.say_json(answer)
    else:
        screen.say(f"{answer['model']} is {answer['tier']} after {screen.seconds(took_s)}")
        screen.hint(hint(answer))
    return Exit.OK


def move(
    client: Client, model: str, order: str, body: Mapping[str, object], doing: str
) -> tuple[Mapping[str, Any], float]:
    """Ask for it and wait. Returns the gateway's answer and the seconds it took. Raises CommandFailed."""
    from greenroom.cli.client import model_path

    began = time.monotonic()
    path = model_path(model, order)
    with screen.spinner(f"{doing} {model}") as show:
        answer = _in_background(
            lambda: client.post(path, dict(body), answer_max_s=MOVE_MAX_S),
            lambda: show(f"{doing} {model}: {outlook(client, model, time.monotonic() - began)}"),
        )
    return answer, time.monotonic() - began


def outlook(client: Client, model: str, waited_s: float) -> str:
    """How far it is, for people; the time alone where the gateway does not say."""
    so_far = screen.seconds(waited_s)
    try:
        models = client.get("/api/v1/status")["models"]
    except CommandFailed:
        # The order itself will tell what is wrong.
        return so_far
    # An alias is not among the ids; it is shown without its outlook.
    moving = next((known["moving"] for known in models if known["id"] == model), None) or {}
    eta_s = moving.get("eta_s")
    return so_far if eta_s is None else f"{so_far}, about {screen.seconds(eta_s)} to go"


def _in_background(call: Callable[[], Any], look: Callable[[], None]) -> Any:
    """What the call returns; meanwhile people see how it goes. An interrupt does not wait for the call."""
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
