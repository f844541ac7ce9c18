"""`greenroom key`: make, list and revoke API keys, in a key file that the gateway follows.

Works without a gateway. A new key is printed once, after its hash is safely in the file. Where there is no key file,
the lines for the configuration are printed, and nothing is stored.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from greenroom.access.budgets import LIMITS
from greenroom.cli import screen
from greenroom.cli.address import KEY_NAME
from greenroom.cli.commands import Subcommand
from greenroom.cli.failures import WrongUsage
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime

    from greenroom.access.key_file import FileKey
    from greenroom.config.schema import Server
    from greenroom.config.sections.keys import ApiKey


# Those of the configuration, whose schema is too slow to import for a list of commands.
VERBS: Final = ("read", "load", "flush", "download", "delete", "reload", "remote")
_SPAN: Final = re.compile(r"([0-9]{1,5})([hdw])")
_SPANS: Final = {"h": "hours", "d": "days", "w": "weeks"}


def _add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for add in (_add_new, _add_list, _add_revoke):
        add(commands)


def _sub(commands: Any, name: str, about: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("-f", "--file", metavar="FILE", help="the key file (default: server.key_file)")
    parser.add_argument("-c", "--config", metavar="FILE", help="the configuration (default: as for serve)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


COMMAND = Subcommand("key", "API keys: make one, list them, revoke one.", _add_options)


# --- new ------------------------------------------------------------------------------------------------------------


def _add_new(commands: Any) -> None:
    parser = _sub(commands, "new", "Make a key, keep its hash in the key file, and print the key once.", _new)
    parser.add_argument("name", help="the key's name, which is never another key's: in logs, usage and limits")
    parser.add_argument("--tenant", help="the tenant of its requests (default: the name)")
    parser.add_argument("--priority-max", choices=("high", "normal", "low"), help="the best priority it may ask for")
    parser.add_argument("--model", action="append", metavar="PATTERN", help="it may ask these only; may be repeated")
    parser.add_argument("--route", action="append", metavar="PATTERN", help="it may call these only; may be repeated")
    parser.add_argument("--verb", action="append", choices=VERBS, help="what else it may do; may be repeated")
    parser.add_argument("--admin", action="store_true", help="may manage the gateway as well as use models")
    parser.add_argument("--leases", action="store_true", help="may take leases as well as use models")
    for limit in LIMITS:
        option = f"--{limit.key.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"{limit.key} of this key")
    parser.add_argument("--expires", metavar="WHEN", help="a date, as 2027-01-31, or how long from now, as 90d or 12h")


def _new(args: argparse.Namespace) -> None:
    from greenroom.access.key_file import add_key
    from greenroom.access.keys import new_key

    secret, sha256 = new_key()
    server = None if args.file else _server(args)
    key, path = _made(args, sha256), args.file or (None if server is None else server.key_file)
    if path is None:
        _say_lines(secret, key, as_json=args.json)
        return
    if server is not None and any(key.name == other.name for other in server.api_keys):
        raise WrongUsage(f"server.api_keys has a key {key.name} already; choose another name")
    add_key(path, key)
    if args.json:
        screen.say_json({"key": secret, **shown(key)})
        return
    screen.say(f"key: {secret}")
    screen.hint(
        f"keep it now, it cannot be shown again: export {KEY_NAME}=…; a running gateway takes it within seconds"
    )


def _made(args: argparse.Namespace, sha256: str) -> FileKey:
    """The key that was asked for. Raises WrongUsage."""
    from datetime import UTC, datetime

    from pydantic import ValidationError

    from greenroom.access.key_file import FileKey, sentences

    now = datetime.now(UTC).replace(microsecond=0)
    limits = {limit.key: value for limit in LIMITS if (value := getattr(args, limit.key)) is not None}
    said = {
        "tenant": args.tenant,
        "priority_max": args.priority_max,
        "models": args.model,
        "routes": args.route,
        "verbs": args.verb,
        "admin": args.admin or None,
        "leases": args.leases or None,
        "limits": limits or None,
        "expires": _until(args.expires, now),
    }
    given = {name: value for name, value in said.items() if value is not None}
    try:
        key = FileKey.model_validate({"name": args.name, "sha256": sha256, "created": now, **given})
    except ValidationError as error:
        raise WrongUsage("; ".join(sentences(error))) from None
    if key.expires is not None and key.expires <= now:
        raise WrongUsage(f"expires: {args.expires} is past already")
    return key


def _until(said: str | None, now: datetime) -> str | datetime | None:
    from datetime import timedelta

    if said is None or (span := _SPAN.fullmatch(said)) is None:
        return said
    return now + timedelta(**{_SPANS[span.group(2)]: int(span.group(1))})


def _say_lines(secret: str, key: FileKey, *, as_json: bool) -> None:
    """For the configuration, where there is no key file."""
    said = key.model_dump(mode="json", exclude_defaults=True, exclude={"created"})
    if as_json:
        screen.say_json({"key": secret, **said})
        return
    screen.say(f"key: {secret}")
    screen.say("\nFor the configuration, which never holds the key itself:\n")
    # A name may need quotes; JSON's are valid YAML.
    name, *more = (f"{field}: {json.dumps(value, ensure_ascii=False)}" for field, value in said.items())
    screen.say("server:\n  api_keys:\n" + "\n      ".join([f"    - {name}", *more]))
    screen.hint(f"\nkeep the key now, it cannot be shown again: export {KEY_NAME}=…; then `greenroom reload`")


# --- list and revoke ------------------------------------------------------------------------------------------------


def _add_list(commands: Any) -> None:
    _sub(commands, "list", "Show the keys of the key file, without the keys themselves.", _list)


def _list(args: argparse.Namespace) -> None:
    from greenroom.access.key_file import read_keys

    path = _path(args)
    try:
        keys = [shown(key) for key in read_keys(path)]
    except FileNotFoundError:
        raise WrongUsage(f"there is no {path} yet; `greenroom key new` makes it") from None
    if args.json:
        screen.say_json(keys)
    else:
        screen.say_table(TITLES, [key_row(key) for key in keys])


def _add_revoke(commands: Any) -> None:
    parser = _sub(commands, "revoke", "Refuse a key from its next request on; answers that have begun go on.", _revoke)
    parser.add_argument("name", help="the key's name, as `greenroom key list` shows it")


def _revoke(args: argparse.Namespace) -> None:
    from datetime import UTC, datetime

    from greenroom.access.key_file import revoke_key

    key = shown(revoke_key(_path(args), args.name, datetime.now(UTC).replace(microsecond=0)))
    if args.json:
        screen.say_json(key)
    else:
        screen.say(f"{key['name']} is revoked since {key['revoked']}; a running gateway refuses it within seconds")


def _path(args: argparse.Namespace) -> str:
    if args.file:
        return str(args.file)
    server = _server(args)
    if server is None or server.key_file is None:
        raise WrongUsage("no key file: set server.key_file in the configuration, or name one with --file")
    return server.key_file


def _server(args: argparse.Namespace) -> Server | None:
    """The configuration's, if there is one."""
    from greenroom.config import loader

    found = loader.find_any(args.config)
    return None if found is None else loader.load(found).config.server


# --- how keys are shown -----------------------------------------------------------------------------------------------


TITLES: Final = ("key", "tenant", "from", "state", "expires", "may")


def shown(key: ApiKey) -> dict[str, Any]:
    """All of a key but its hash."""
    from greenroom.access.key_file import FileKey

    of_file = key if isinstance(key, FileKey) else None
    return {
        "name": key.name,
        "tenant": key.tenant or key.name,
        "from": "configuration" if of_file is None else "file",
        "state": _state(key),
        "priority_max": key.priority_max,
        "models": None if key.models is None else list(key.models),
        "routes": None if key.routes is None else list(key.routes),
        "verbs": [verb.value for verb in key.verbs],
        "admin": key.admin,
        "leases": key.admin or key.leases,
        "limits": None if key.limits is None else key.limits.model_dump(exclude_none=True),
        "expires": _moment(key.expires),
        "created": None if of_file is None else _moment(of_file.created),
        "revoked": None if of_file is None else _moment(of_file.revoked),
    }


def all_keys(server: Server) -> tuple[list[dict[str, Any]], list[str]]:
    """The keys of configuration and key file, without the keys themselves, and what is wrong with the file."""
    from greenroom.access.key_file import joined, read_keys

    found: tuple[FileKey, ...] = ()
    wrong: list[str] = []
    if server.key_file is not None:
        try:
            found = read_keys(server.key_file)
        except FileNotFoundError:
            wrong.append(f"server.key_file: there is no {server.key_file}; `greenroom key new` makes it")
        except ConfigError as error:
            wrong.append(f"server.key_file: {error.message}")
    keys, left_out = joined(server.api_keys, found)
    told = [shown(key) for key in keys]
    if server.key_file is not None and not any(key["admin"] and key["state"] == "valid" for key in told):
        wrong.append("server.key_file: no valid key, of the configuration or of the file, has admin: true")
    return told, [*wrong, *(f"server.key_file: {text}" for text in left_out)]


def key_row(key: Mapping[str, Any]) -> tuple[str, ...]:
    return (key["name"], key["tenant"], key["from"], key["state"], key["expires"] or "never", _may(key))


def _state(key: ApiKey) -> str:
    from greenroom.access.keys import is_revoked

    if is_revoked(key):
        return "revoked"
    return "expired" if key.expires is not None and key.expires.timestamp() <= time.time() else "valid"


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.replace(tzinfo=None).isoformat(timespec='seconds')}Z"


def _may(key: Mapping[str, Any]) -> str:
    """`models llama-*; verbs load; requests_per_minute 60`."""
    limits: Mapping[str, int] = key["limits"] or {}
    words = [
        "admin" if key["admin"] else "",
        "leases" if key["leases"] and not key["admin"] else "",
        *(f"{what} {', '.join(key[what]) or 'none'}" for what in ("models", "routes") if key[what] is not None),
        f"verbs {', '.join(key['verbs'])}" if key["verbs"] else "",
        f"priority {key['priority_max']}" if key["priority_max"] != "high" else "",
        *(f"{limit} {count}" for limit, count in limits.items()),
    ]
    return "; ".join(word for word in words if word) or "ask models"
