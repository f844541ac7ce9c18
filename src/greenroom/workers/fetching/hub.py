"""What a repository of the hub holds: its commit, and its files with sizes and hashes.

Owns the meaning of the hub's refusals, and which of the files are fetched. What the hub says is bounded and checked: a
path that would leave its folder, a size that is none or a hash that is none is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.client import HTTPMessage
from pathlib import PurePosixPath
from typing import Any, Final, TypeGuard
from urllib.parse import quote

from .failures import FetchError
from .transfer import FetchPatience, RemoteFile
from .web import HubOrigin, Web, retry_after_s

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
FILES_MAX: Final = 20_000
# A question about a repository and its whole answer; a hub that takes longer is asked again.
LOOK_MAX_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 32 * 1024 * 1024
# In the answer: a file has eight.
VALUES_MAX: Final = 1_000_000
# Of the paths of all files: they are reported in one line.
PATHS_CHARS_MAX: Final = 2 * 1024 * 1024
# Of all files. Larger numbers lose digits in JSON.
BYTES_MAX: Final = 2**53
PATH_CHARS_MAX: Final = 512
# A part of it has a longer one, and 255 is what disks take.
NAME_BYTES_MAX: Final = 200
# Of files in an error.
NAMED_MAX: Final = 20
# The same weights in formats that run code when they are read, or that no engine here reads.
_OTHER_WEIGHTS: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".ot")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHA1: Final = re.compile(r"[0-9a-f]{40}")
_NO_NAME: Final = frozenset(("", ".", ".."))


@dataclass(frozen=True, slots=True)
class Repository:
    id: str
    commit: str
    files: tuple[RemoteFile, ...]
    new_name: str | None = None
    """What the hub calls it, if it was asked for by the name that it had before."""


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or DEFAULT_ENDPOINT


def token() -> str | None:
    """The user's, from HF_TOKEN or where `hf auth login` has put it. Raises FetchError."""
    try:
        return _package().get_token() or None
    except OSError as error:
        name = next((name for name in ("HF_TOKEN_PATH", "HF_HOME") if os.environ.get(name)), "HF_HOME")
        why = f"{error.filename} cannot be read: {error.strerror}. {name} says so: set it to what can be used."
        raise FetchError("disk_error", why) from error


def look(repo: str, revision: str | None, answer_max_s: float, patience: FetchPatience) -> Repository:
    """Raises FetchError."""
    hub, package = _origin(), _package()
    if package.constants.HF_HUB_OFFLINE:
        raise FetchError("offline", "HF_HUB_OFFLINE is set: nothing is fetched.")
    try:
        package.utils.validate_repo_id(repo)
    except package.errors.HFValidationError:
        raise FetchError("bad_repo", f"{repo} is no name of a repository.") from None
    web = Web(endpoint(), token(), min(answer_max_s, LOOK_MAX_S))
    failures = 0
    while True:
        try:
            return _repository(_asked(web, hub.host, repo, revision), repo, package)
        except FetchError as error:
            failures += 1
            patience.wait(failures, error)


def _asked(web: Web, host: str, repo: str, revision: str | None) -> dict[str, Any]:
    """What the hub says of it. Raises FetchError."""
    of = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    try:
        status, headers, body = web.whole(f"{endpoint()}/api/models/{repo}{of}?blobs=true", ANSWER_BYTES_MAX)
    except FetchError as error:
        if not error.passes:
            raise
        why = f"{host} cannot be asked: {error.message}" + _endpoint_hint()
        raise FetchError(error.code, why, passes=True) from None
    if status != 200:
        raise _refusal(status, headers, host, repo, revision)
    return _read(body, host)


def _read(body: bytes, host: str) -> dict[str, Any]:
    # Counted first: an empty object is two bytes here, and many more in memory.
    if body.count(b",") <= VALUES_MAX:
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(body)
            if isinstance(said, dict):
                return said
    raise FetchError("bad_repo", f"What {host} says of the repository cannot be read." + _endpoint_hint())


def _origin() -> HubOrigin:
    """Raises FetchError."""
    try:
        return HubOrigin.of(endpoint())
    except FetchError:
        why = f"HF_ENDPOINT is {endpoint()!r:.200}, which is no address such as {DEFAULT_ENDPOINT}."
        raise FetchError("bad_url", why) from None


def _package() -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise FetchError(
            "hub_missing", "The package huggingface_hub is not installed. Type: pip install 'greenroom[hub]'"
        ) from None
    return huggingface_hub


def _refusal(status: int, headers: HTTPMessage, host: str, repo: str, revision: str | None) -> FetchError:
    told = headers.get("x-error-code")
    if told == "GatedRepo":
        why = f"{repo} is given only to users that its owner has let in: ask at {endpoint()}/{repo}, set HF_TOKEN."
        return FetchError("gated", why)
    if told == "RevisionNotFound":
        return FetchError("revision_not_found", f"{repo} has no revision {revision}.")
    if told == "RepoNotFound" or status == 404:
        why = f"{host} has no {repo}, or it is private and HF_TOKEN does not open it."
        return FetchError("repo_not_found", why + _endpoint_hint())
    if status in (401, 403):
        return FetchError("not_authorised", f"{host} does not let us see {repo} ({status}); set HF_TOKEN.")
    wait_s = retry_after_s(headers.get("retry-after"))
    code = "hub_busy" if status == 429 else "hub_error"
    why = f"{host} answers {status}." + _endpoint_hint()
    return FetchError(code, why, passes=status == 429 or status >= 500, retry_after_s=wait_s)


def _endpoint_hint() -> str:
    """Where another hub is set, that may be the mistake."""
    return f" HF_ENDPOINT is {endpoint()}." if endpoint() != DEFAULT_ENDPOINT else ""


# --- what it holds ----------------------------------------------------------------------------------------------------


def _repository(said: Mapping[str, Any], repo: str, package: Any) -> Repository:
    siblings, commit = said.get("siblings") or [], said.get("sha")
    if not isinstance(siblings, list) or len(siblings) > FILES_MAX:
        raise FetchError("bad_repo", f"{repo} has more than {FILES_MAX:,} files.")
    if not isinstance(commit, str) or not _SHA1.fullmatch(commit):
        raise FetchError("bad_repo", f"The hub does not say which commit of {repo} this is.")
    # A repository that was renamed answers to its old name.
    id = said.get("id")
    name, new_name = repo, None
    if isinstance(id, str):
        name, new_name = (id, None) if id.lower() == repo.lower() else (repo, id)

    files = [_file(sibling, name, commit, package) for sibling in siblings]
    if sum(len(file.path) for file in files) > PATHS_CHARS_MAX or sum(file.size or 0 for file in files) > BYTES_MAX:
        raise FetchError("bad_repo", f"{repo} has files of more bytes, or with longer names, than can be.")
    return Repository(name, commit, tuple(file for file in files if not is_hidden(file.path)), new_name)


def _file(sibling: Any, repo: str, commit: str, package: Any) -> RemoteFile:
    said = sibling if isinstance(sibling, dict) else {}
    path, lfs = said.get("rfilename"), said.get("lfs")
    if not is_inside(path):
        raise FetchError("bad_repo", f"The hub names a file that no folder could hold: {path!r:.100}.")
    told = said if lfs is None else lfs if isinstance(lfs, dict) else {}
    size = told.get("size")
    sha256, git_sha1 = (None, said.get("blobId")) if lfs is None else (told.get("sha256"), None)
    if type(size) is not int or not 0 <= size <= BYTES_MAX or not _is_hash(sha256, git_sha1):
        raise FetchError("bad_repo", f"The hub does not say how large {path} is, or what hash it has.")
    url = str(package.hf_hub_url(repo, path, revision=commit, endpoint=endpoint()))
    return RemoteFile(path, url, size, sha256, git_sha1)


def _is_hash(sha256: object, git_sha1: object) -> bool:
    if isinstance(sha256, str):
        return _SHA256.fullmatch(sha256) is not None
    return isinstance(git_sha1, str) and _SHA1.fullmatch(git_sha1) is not None


def is_inside(path: object) -> TypeGuard[str]:
    """True for a relative path of names that a folder can hold, also in the other forms that Unicode has for them."""
    if not isinstance(path, str) or len(path) > PATH_CHARS_MAX or not path.isprintable():
        return False
    names = {*path.split("/"), *_plain(path).split("/")}
    return "\\" not in path and not _NO_NAME & names and all(len(name.encode()) <= NAME_BYTES_MAX for name in names)


def is_hidden(path: str) -> bool:
    """True if a name in it begins with a dot. Such files are of no model, and some are of Greenroom: its marks, locks
    and parts."""
    return any(name.startswith(".") for name in _plain(path).split("/"))


def _plain(path: str) -> str:
    """The path as a volume may read it that does not tell forms of a character apart."""
    return unicodedata.normalize("NFKC", path)


# --- which files ------------------------------------------------------------------------------------------------------


def choose(
    files: Sequence[RemoteFile], quantization: str | None, include: Sequence[str], exclude: Sequence[str]
) -> list[RemoteFile]:
    """The files to fetch. `quantization` picks GGUF files, to which `include` adds. Raises FetchError if none is."""
    if quantization is not None:
        chosen = _quantized(files, quantization)
        known = set(chosen)
        chosen += [file for file in files if file not in known and _matches(file.path, include)]
    elif include:
        chosen = [file for file in files if _matches(file.path, include)]
    else:
        chosen = _usual(files)
    chosen = [file for file in chosen if not _matches(file.path, exclude)]
    if not chosen:
        raise FetchError("no_files", f"No file is left by these patterns. There are: {_named(files)}.")
    _expect_apart(chosen)
    return chosen


def _expect_apart(files: Sequence[RemoteFile]) -> None:
    """Raises FetchError if a name is given twice, or is also that of a folder."""
    seen: set[str] = set()
    folders = {str(folder) for file in files for folder in PurePosixPath(file.path).parents}
    for file in files:
        if file.path in seen or file.path in folders:
            why = f"Two files cannot both be at {file.path}, by what the hub says; name one of them in `exclude`."
            raise FetchError("bad_repo", why)
        seen.add(file.path)


def _quantized(files: Sequence[RemoteFile], quantization: str) -> list[RemoteFile]:
    """Those with this word in their name; if there are none, those with it as part of a word."""
    ggufs = [file for file in files if file.path.lower().endswith(".gguf")]
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(quantization.lower())}(?![a-z0-9_])")
    chosen = [file for file in ggufs if word.search(file.path.lower())]
    chosen = chosen or [file for file in ggufs if quantization.lower() in file.path.lower()]
    if not chosen:
        raise FetchError(
            "no_such_quantization",
            f"There is no GGUF file of {quantization}. There are: {_named(ggufs)}."
            if ggufs
            else f"The repository has no GGUF files, and so none of {quantization}.",
        )
    return chosen


def _usual(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """All; where there are safetensors, without the same weights in other formats."""
    if not any(file.path.endswith(".safetensors") for file in files):
        return list(files)
    return [file for file in files if not file.path.lower().endswith(_OTHER_WEIGHTS)]


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """As huggingface_hub does: a pattern that ends with a slash is a folder."""
    return any(fnmatchcase(path, pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)


def _named(files: Sequence[RemoteFile]) -> str:
    names = [PurePosixPath(file.path).name for file in files[:NAMED_MAX]]
    return ", ".join(names) + (f" and {len(files) - NAMED_MAX:,} more" if len(files) > NAMED_MAX else "")
