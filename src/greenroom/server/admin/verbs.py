"""HEAD, for an application that knows only GET: asked as GET, and answered without a body by the edge.

A stream has no end to ask the length of, so it is not to be asked with HEAD.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.requests import Request

from greenroom.errors import MethodNotAllowed


def as_get(scope: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if scope["method"] != "HEAD":
        return scope
    return {**scope, "method": "GET", "state": {**scope.get("state", {}), "is_head": True}}


def refuse_head(request: Request) -> None:
    if request.scope.get("state", {}).get("is_head"):
        raise MethodNotAllowed("A stream has no HEAD; it takes GET.")
