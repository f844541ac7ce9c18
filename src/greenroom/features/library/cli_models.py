"""`greenroom models` and `greenroom rm`: the models on disk, as a running gateway tells them, or the disk itself."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from greenroom.cli import address, screen
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import CommandFailed, NoGateway

if TYPE_CHECKING:
    from greenroom.cli.client import Client
    from greenroom.config.schema import Config
    from greenroom.library.records import LibraryRecord

TITLES: Final = ("id", "kind", "quant", "size", "context", "memory MiB", "last used")
# An unload and the deletion of many files may take long.
REMOVE_MAX_S: Final = 900.0
PROBLEMS_SHOWN_MAX: Final = 5
CHOICES_MAX: Final = 20
INVENTORY: Final = "/v1/models/inventory"


def _add_models_options(parser: argparse.ArgumentParser) -> None:
    _add_place_options(parser)
    address.add_options(parser, json_help="print all that is known of each model as JSON")


def _add_rm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID|PATH", help="as `greenroom models` shows it, or where it lies")
    parser.add_argument(
        "-f", "--force", action="store_true", help="delete it even if it is loaded or configured; it is unloaded first"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    address.add_token_option(parser)
    _add_place_options(parser)
    address.add_options(parser, json_help="print the answer as JSON")


def _add_place_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", action="append", metavar="DIR", help="look below this folder, without a gateway; may be repeated"
    )
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="look below the roots of this configuration, without a gateway"
    )


def run_models(args: argparse.Namespace) -> None:
    told = _place(args).inventory()
    if args.json:
        screen.say_json(told)
        return
    models, problems = told["data"], told["problems"]
    screen.say_table(TITLES, [row(model, time.time()) for model in models])
    if told.get("looking"):
        screen.note("the folders are still being looked at; ask again for the rest")
    elif not models:
        screen.note("there are no models on disk; `greenroom pull` fetches one")
    for problem in problems[:PROBLEMS_SHOWN_MAX]:
        screen.note(f"no model: {problem['path']}: {problem['why']}")
    if len(problems) > PROBLEMS_SHOWN_MAX:
        screen.note(f"and {len(problems) - PROBLEMS_SHOWN_MAX} more; --json shows them")


def run_rm(args: argparse.Namespace) -> None:
    place = _place(args)
    model, name = _named(args.id, place.inventory()["data"])
    if not (args.yes or _agreed(model)):
        raise CommandFailed("nothing was deleted")
    answer = place.remove(name, force=args.force, token=address.token_of(args))
    if args.json:
        screen.say_json(answer)
    else:
        screen.say(f"{answer['id']} is deleted; {size(answer['bytes_freed'])} came free")


MODELS = Subcommand(
    "models",
    "List the models on disk: kind, quantisation, size, context, memory, last use.",
    _add_models_options,
    run_models,
)
RM = Subcommand("rm", "Delete a model from disk, and say how much came free.", _add_rm_options, run_rm)


def _named(name: str, models: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The model of this id or path, and which of both it is. Raises CommandFailed if it could be several, or none."""
    path = os.path.realpath(os.path.expanduser(name))
    for model in models:
        if model["id"] == name:
            return model, name
        if model.get("path") and path == os.path.realpath(model["path"]):
            return model, model["path"]
    # A repository or a folder that holds several.
    choices = [one["id"] for one in models if one["id"].startswith((f"{name}:", f"{name}@", f"{name.rstrip('/')}/"))]
    choices = choices or [one["id"] for one in models if (one.get("path") or "").startswith(f"{path}/")]
    if choices:
        raise CommandFailed(f"{name} is not one model; say which: {', '.join(choices[:CHOICES_MAX])}")
    raise CommandFailed(f"there is no model {name} on disk; `{screen.program()} models` lists those there are")


def _agreed(model: Mapping[str, Any]) -> bool:
    """Ask at a terminal. Elsewhere nothing is deleted without --yes."""
    if not sys.stdin.isatty():
        raise CommandFailed("say --yes to delete a model without being asked")
    screen.note(f"{model['id']}: {len(model['files'])} files, {size(model['bytes'])}")
    try:
        return input("delete it from disk? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


# --- where the models are -------------------------------------------------------------------------------------------


def _place(args: argparse.Namespace) -> _Gateway | _Disk:
    """The folders that are named; else the gateway; else the folders of the configuration that it would have."""
    from greenroom.cli.client import Client

    if args.models or args.config is not None:
        config = None if args.config is None else _configuration(args.config)
        return _Disk([*(args.models or ()), *(config.roots if config else ())], config)
    client = Client(address.address_of(args))
    try:
        client.get("/health")
    except NoGateway as error:
        config = None if args.url is not None else _configuration(None)
        if config is None:
            raise
        screen.note(f"{error.message.partition(';')[0]}; these are the models below the configured folders")
        return _Disk(config.roots, config)
    except CommandFailed:
        # The inventory itself is asked for with the same key, and tells what is wrong.
        pass
    return _Gateway(client)


def _configuration(file: str | None) -> Config | None:
    """The configuration; None if none is named and there is none. Raises ConfigError."""
    from greenroom.config import loader
    from greenroom.errors import ConfigError

    try:
        path = loader.find(file)
    except ConfigError:
        return None
    return loader.load(path).config


class _Gateway:
    def __init__(self, client: Client) -> None:
        self._client = client

    def inventory(self) -> Mapping[str, Any]:
        """All models. Raises CommandFailed."""
        told: Mapping[str, Any] = self._client.get(INVENTORY)
        return told

    def remove(self, id: str, *, force: bool, token: str | None) -> Mapping[str, Any]:
        """Delete one, with a token where operations are signed. Raises CommandFailed."""
        path = f"{INVENTORY}/{quote(id, safe='')}" + ("?force=true" if force else "")
        answer: Mapping[str, Any] = self._client.delete(path, answer_max_s=REMOVE_MAX_S, token=token)
        return answer


class _Disk:
    """Folders without a gateway, which answer in its shape. `config` says which models are configured."""

    def __init__(self, folders: Sequence[str], config: Config | None) -> None:
        self._folders = [os.path.abspath(os.path.expanduser(folder)) for folder in folders]
        self._config = config
        self._records: Sequence[LibraryRecord] = ()

    def inventory(self) -> Mapping[str, Any]:
        from greenroom.library.library import look_once
        from greenroom.library.records import told, told_problem
        from greenroom.library.roots import Roots

        self._records, problems = look_once(Roots(self._folders))
        return {
            "object": "list",
            "data": [told(record, with_paths=True) for record in self._records],
            "problems": [told_problem(one) for one in problems],
        }

    def remove(self, id: str, *, force: bool, token: str | None) -> Mapping[str, Any]:
        from greenroom.library.removal import remove_files

        record = next(one for one in self._records if id in (one.id, one.path))
        if (other := self._other_meaning(id, record)) is not None:
            raise CommandFailed(
                f"{id} is configured with other files ({other}); name these by their path {record.path}"
            )
        if (name := self._configured_as(record)) is not None and not force:
            raise CommandFailed(f"{id} is configured as {name}; say --force to delete it all the same")
        try:
            freed = remove_files(record, [one for one in self._records if one is not record])
        except OSError as error:
            raise CommandFailed(f"{record.path} could not be deleted: {error.strerror or error}") from None
        return {"id": record.id, "deleted": True, "bytes_freed": freed, "unloaded": []}

    def _other_meaning(self, name: str, record: LibraryRecord) -> str | None:
        """The path of the configured model that a request by this name would get, if it is not this record."""
        models = {} if self._config is None else self._config.models
        meant = next((one for key, one in models.items() if name == key or name in one.aliases), None)
        if meant is None or (meant.path is not None and os.path.realpath(meant.path) == os.path.realpath(record.path)):
            return None
        return meant.path or "none of its own"

    def _configured_as(self, record: LibraryRecord) -> str | None:
        """The model of the configuration that has this path, or lies in its folder."""
        models = {} if self._config is None else self._config.models
        mine = {os.path.realpath(record.path), os.path.realpath(os.path.dirname(record.path))}
        return next((name for name, one in models.items() if one.path and os.path.realpath(one.path) in mine), None)


# --- the table ------------------------------------------------------------------------------------------------------


def row(model: Mapping[str, Any], now: float) -> tuple[str, ...]:
    context, memory, used = model["context_length"], model["memory_mib"], model["last_used"]
    return (
        model["id"],
        model["kind"],
        model["quantization"] or "-",
        size(model["bytes"]),
        "-" if context is None else str(context),
        "-" if memory is None else str(memory),
        "never" if used is None else f"{screen.seconds(now - used)} ago",
    )


def size(count: int) -> str:
    """`512B`, `4.7GB`: in powers of ten, as disks are sold."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1_000 and len(units) > 1:
        value, units = value / 1_000, units[1:]
    return f"{value:.0f}{units[0]}" if units[0] == "B" or value >= 100 else f"{value:.1f}{units[0]}"
