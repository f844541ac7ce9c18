"""`greenroom serve`: serve the models of a configuration file, in the foreground."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from greenroom.cli import failures, overrides, screen
from greenroom.cli.address import DEFAULT_URL, KEY_NAME, URL_NAME
from greenroom.cli.overrides import Overrides

if TYPE_CHECKING:
    from greenroom.app import App
    from greenroom.cli.serving import Plan
    from greenroom.config.schema import Config

NAME = "serve"
HELP = "Serve the models of a configuration file until Ctrl-C or SIGTERM."
# More would scroll the address away.
MODELS_SHOWN_MAX: Final = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="the configuration (default: $GREENROOM_CONFIG or ./greenroom.yaml)"
    )
    overrides.add_options(parser)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    # Until the gateway listens to signals itself.
    with failures.end_at_once():
        from greenroom.cli import serving

        return serving.serve(_plan(args), lambda app: _greet(app, time.monotonic() - began))


def _plan(args: argparse.Namespace) -> Plan:
    from greenroom.cli.serving import Plan
    from greenroom.config import loader
    from greenroom.config.problems import open_door, problems

    said = Overrides.of(args)
    loaded = loader.load(loader.find(args.config))
    config = said.applied(loaded.config)
    # The warnings are those of what will run: the command line may have mended the file, or the other way round.
    # An open door is no warning here: the start will refuse it, in the same words.
    warnings = [text for text in problems(config) if text != open_door(config.server)]
    return Plan(config, loaded.path, lambda: _reread(loaded.path, said), warnings)


def _reread(path: Path, said: Overrides) -> Config:
    from greenroom.config import loader

    return said.applied(loader.load(path).config)


def _greet(app: App, took_s: float) -> None:
    from greenroom.cli.serving import shown_url

    url, models = shown_url(app), list(app.config.models)
    count = f"{len(models)} model{'s' if len(models) != 1 else ''}"
    screen.say(f"greenroom serves {count} at {url} (started in {screen.seconds(took_s)})")
    if models:
        more = f", and {len(models) - MODELS_SHOWN_MAX} more" if len(models) > MODELS_SHOWN_MAX else ""
        screen.say(f"  models: {', '.join(models[:MODELS_SHOWN_MAX])}{more}")
    for line in _next(app, url):
        screen.say(f"  {line}")


def _next(app: App, url: str) -> list[str]:
    """What to type in another terminal."""
    lines = [f"export {URL_NAME}={url}"] if url != DEFAULT_URL else []
    if app.config.server.api_keys:
        lines.append(f"export {KEY_NAME}=…")
    model = next((name for name, model in app.config.models.items() if not model.embedding), None)
    program = screen.program()
    lines.append(f"{program} ps" if model is None else f"{program} chat {model}")
    return ["next, in another terminal:", *(f"  {line}" for line in lines)]
