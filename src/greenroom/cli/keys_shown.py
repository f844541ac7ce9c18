"""Keys as `greenroom key list` and `greenroom check` show them: whose they are, what they may do, until when.

Never shows a key or its hash.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime

    from greenroom.access.key_file import FileKey
    from greenroom.config.schema import Server
    from greenroom.config.sections.keys import ApiKey

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


def row(key: Mapping[str, Any]) -> tuple[str, ...]:
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
