"""`greenroom serve`: serve the models of a configuration file or of folders, in the foreground. Owns the options that
override the file (`Overrides`), which `greenroom demo` has too."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from greenroom.cli import failures, screen
from greenroom.cli.address import DEFAULT_URL, KEY_NAME, URL_NAME
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed

if TYPE_CHECKING:
    from greenroom.app import App
    from greenroom.cli.serving import ServePlan
    from greenroom.config.schema import Config
    from greenroom.runtime.catalogue import Entry

# More would scroll the address off the screen.
MODELS_SHOWN_MAX: Final = 12
NOTHING_TO_SERVE: Final = (
    "nothing to serve: there is no greenroom.yaml here. Name a configuration with --config or GREENROOM_CONFIG, or a "
    "folder of models with --models or MODEL_BASE_PATH."
)


def add_options(parser: argparse.ArgumentParser, *, has_port: bool = True) -> None:
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="the configuration (default: $GREENROOM_CONFIG or ./greenroom.yaml)"
    )
    parser.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of models, which can be asked for by path or hub id; no configuration is needed",
    )
    parser.add_argument(
        "--lease-store",
        type=_lease_store,
        metavar="URL",
        help="redis://… of gateways that share GPUs (default: the file's)",
    )
    add_override_options(parser, has_port=has_port)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    # Until the gateway handles signals itself.
    with failures.end_at_once():
        from greenroom.cli import serving

        return serving.serve(plan(args, began))


COMMAND = Subcommand(
    "serve", "Serve the models of a configuration file or of folders until Ctrl-C or SIGTERM.", add_options, run
)


def plan(args: argparse.Namespace, began: float = 0.0) -> ServePlan:
    """Raises CommandFailed or ConfigError."""
    from greenroom.cli.serving import ServePlan
    from greenroom.config import loader
    from greenroom.config.problems import open_door, problems

    said = Overrides.of(args)
    file = loader.find_any(args.config)
    loaded = loader.load(file, to_serve=True)
    config = said.applied(loaded.config)
    if file is None and not config.roots:
        raise CommandFailed(NOTHING_TO_SERVE)
    if missing := next((root for root in said.roots if not os.path.isdir(root)), None):
        raise CommandFailed(f"there is no folder {missing}; --models names a folder of models")
    # Warnings are about the configuration that will run, with the overrides applied.
    # An address open to others without keys is no warning here: the start refuses it, in the same words.
    warnings = [text for text in problems(config) if text != open_door(config)]
    return ServePlan(
        config,
        lambda app: _greet(app, time.monotonic() - began),
        loaded.path,
        lambda: said.applied(loader.load(loaded.path, to_serve=True).config),
        warnings,
    )


def _greet(app: App, took_s: float) -> None:
    from greenroom.cli.serving import shown_url

    url, models = shown_url(app), list(app.config.models)
    count = f"{len(models)} model{'s' if len(models) != 1 else ''}"
    roots = app.config.roots
    if roots:
        count = f"{count} and what is below {', '.join(roots)}" if models else f"what is below {', '.join(roots)}"
    screen.say(f"greenroom serves {count} at {url} (started in {screen.seconds(took_s)})")
    if app.config.server.ui:
        screen.say(f"  dashboard: {url}/ui/")
    if models:
        more = f", and {len(models) - MODELS_SHOWN_MAX} more" if len(models) > MODELS_SHOWN_MAX else ""
        screen.say(f"  models: {', '.join(models[:MODELS_SHOWN_MAX])}{more}")
    for line in _next(app, url):
        screen.say(f"  {line}")


def _next(app: App, url: str) -> list[str]:
    """What to type next, in another terminal."""
    lines = [f"export {URL_NAME}={url}"] if url != DEFAULT_URL else []
    if app.config.server.has_keys:
        lines.append(f"export {KEY_NAME}=…")
    model = next((entry.id for entry in app.catalog if _can_chat(entry)), None)
    program = screen.program()
    first = f"{program} models" if app.config.roots else f"{program} ps"
    lines.append(first if model is None else f"{program} chat {model}")
    return ["next, in another terminal:", *(f"  {line}" for line in lines)]


def _can_chat(entry: Entry) -> bool:
    """True if it can, or if only its engine can tell."""
    from greenroom.config.sections.model import Ability

    return entry.facts.abilities is None or Ability.CHAT in entry.facts.abilities


# --- what the command line overrides --------------------------------------------------------------------------------


LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line overrides, now and after every reload. None: the file decides."""

    host: str | None = None
    port: int | None = None
    insecure: bool = False
    state_dir: str | None = None
    log_level: str | None = None
    roots: tuple[str, ...] = ()
    lease_store: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Overrides:
        roots = tuple(os.path.abspath(os.path.expanduser(folder)) for folder in getattr(args, "models", ()))
        store = getattr(args, "lease_store", None)
        return cls(args.host, args.port, args.insecure, args.state_dir, args.log_level, roots, store)

    def applied(self, config: Config) -> Config:
        from greenroom.config import environment
        from greenroom.config.schema import LogLevel

        server: dict[str, Any] = {"host": self.host, "port": self.port, "insecure": self.insecure or None}
        log = {"level": LogLevel(self.log_level)} if self.log_level else {}
        top: dict[str, Any] = {
            "server": config.server.model_copy(update=_said(server)),
            "log": config.log.model_copy(update=log),
            "state_dir": self.state_dir,
            "leases": config.leases.model_copy(update=_said({"store": self.lease_store})),
            "library": config.library.model_copy(update={"roots": (*self.roots, *config.library.roots)}),
        }
        config = config.model_copy(update=_said(top))
        # Beside a folder of models the hub's cache is one too, whatever names that folder.
        if self.roots:
            config = environment.with_folders(config, os.environ)
        return environment.with_cache(config, os.environ)


def add_override_options(parser: argparse.ArgumentParser, *, has_port: bool = True) -> None:
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, or the file's)")
    if has_port:
        parser.add_argument(
            "--port", type=port, help="port to listen on; 0 takes a free one (default: 8210, or the file's)"
        )
    parser.add_argument(
        "--insecure", action="store_true", help="allow an address that others can reach, without any API key"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="the gateway's state; one gateway per directory")
    parser.add_argument("--log-level", choices=LEVELS, help="how much is logged")


def _said(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _lease_store(text: str) -> str:
    from greenroom.config.kinds import store_address_problem

    if why := store_address_problem(text):
        raise argparse.ArgumentTypeError(f"the address {why}")
    return text


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text} is not a port: 0 to 65535")
    return int(text)
