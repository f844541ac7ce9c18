"""The headers that say which model of a task answers, and which version of a model."""

from __future__ import annotations

from urllib.parse import quote

from greenroom.http.headers import Headers
from greenroom.library.versions import Version, told_as

MODEL = b"x-model"
VERSION = b"x-model-version"
REPO_ID = b"x-model-repo-id"
# What ids of repositories and paths have, besides letters and digits; anything else is escaped.
_PLAIN = "/:@._-+,= "


def version_headers(version: Version | None, *, to_operator: bool) -> Headers:
    """Two headers; none for a model that is not under version control."""
    if version is None:
        return []
    repo_id = quote(told_as(version.repo_id, to_operator=to_operator), safe=_PLAIN)
    return [(VERSION, b"%d" % version.number), (REPO_ID, repo_id.encode("ascii"))]


def model_header(name: str) -> tuple[bytes, bytes]:
    return MODEL, quote(name, safe=_PLAIN).encode("ascii")
