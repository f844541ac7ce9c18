"""What `load`, `unload`, `sleep` and `prepare` share: asking for a move, and showing how far it is until it is done."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import screen
from greenroom.cli.failures import CommandFailed

if TYPE_CHECKING:
    from greenroom.cli.client import Client

# A load ends at the model's own deadline; this is for a gateway that has died without closing its connections.
MOVE_MAX_S: Final = 7_200.0
LOOK_EVERY_S: Final = 0.5


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
