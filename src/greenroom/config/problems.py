"""What will not work although the file is valid: missing files, more pinned than fits, an address open to everyone.

Owns the warnings of `greenroom check` and of the start. Reads the file system and nothing else; changes nothing. A
missing model file must not stop the other models, so these are warnings, but for what a start fails at (`obstacles`).
Recordings that would overwrite each other or the configuration are refused.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from greenroom.base.plain_file import FileTooLarge, NotPlainFile, read_plain
from greenroom.config.kinds import can_be_run, words
from greenroom.config.reader import Problem
from greenroom.config.schema import Config, Model, Remote, Server
from greenroom.config.sections.governance import quorum_warnings
from greenroom.config.sections.model import TEMPLATE_ENDING
from greenroom.config.sections.remotes import read_remote_key
from greenroom.config.sections.scheduler import rules_of
from greenroom.core.model import ModelId
from greenroom.core.policy.coresidency import coresidency_under


def problems(config: Config) -> list[str]:
    """Warnings, one sentence each, that name the model or key."""
    found = [f"models.{name}: {text}" for name, model in config.models.items() for text in _missing(model)]
    found += [text for name, model in config.models.items() for text in _misplaced(name, model, config)]
    found += _unusable_roots(config)
    found += _hidden_by_ids(config)
    found += _outside_roots(config)
    found += _too_much_pinned(config)
    found += _kept_out(config)
    found += obstacles(config)
    found += _door_of_tokens(config)
    found += _no_admin(config.server)
    found += _unknown_defaults(config)
    found += quorum_warnings(config.governance)
    found += [text for name, remote in config.remotes.items() for text in _unusable_remote(name, remote)]
    return found


def obstacles(config: Config) -> list[str]:
    """Those of these warnings with which a gateway does not start here."""
    found = [*_unwritable_recordings(config.server), *_unusable_state_dir(config.state_dir)]
    found += [text] if (text := open_door(config)) else []
    return [*found, *_one_port_twice(config.server)]


def clashing_recordings(server: Server, file: Path) -> Iterator[Problem]:
    """Recordings that would overwrite each other or `file`, the configuration. Paths are absolute."""
    taken = {os.path.realpath(file): "is the configuration file"}
    for key in ("record_activity", "record_events"):
        path: str | None = getattr(server, key)
        if path is None:
            continue
        # The previous recording is kept under the second name.
        written = [os.path.realpath(path), os.path.realpath(f"{path}.1")]
        if clash := next((name for name in written if name in taken), None):
            yield Problem(("server", key), f"{clash} {taken[clash]}; record to another file")
        taken |= dict.fromkeys(written, f"is used by server.{key}")


def _unwritable_recordings(server: Server) -> Iterator[str]:
    """Recordings that would make a start fail, as far as can be seen without writing."""
    for key in ("record_activity", "record_events"):
        path: str | None = getattr(server, key)
        if path is None:
            continue
        if not os.path.isdir(os.path.dirname(path)):
            yield f"server.{key}: there is no directory {os.path.dirname(path)}"
        elif os.path.exists(path) and not os.path.isfile(path):
            yield f"server.{key}: {path} is no plain file"


def _unusable_state_dir(path: str) -> Iterator[str]:
    """A state directory that would make a start fail, as far as can be seen without writing."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        # A link that leads to itself, a name that is too long.
        yield f"state_dir: {path} cannot be used: {error.strerror}"
        return
    if not os.path.isdir(path):
        yield f"state_dir: {path} is no directory"
    elif not os.access(path, os.W_OK | os.X_OK):
        yield f"state_dir: this user may not write to {path}"
    elif holds_other_files(path):
        yield f"state_dir: {path} {OTHER_FILES}"
    elif (wrong := of_wrong_kind(path)) is not None:
        yield f"state_dir: {wrong}"


# The files of a state directory. Those that are replaced as a whole are drafts first.
_STATE_KEPT: Final = ("learned", "needs", "leases", "library", "spending", "settings", "versions")
_STATE_FOLDERS: Final = frozenset(("run", "jobs", "pictures", "governance"))
_STATE_FILES: Final = frozenset(
    (
        *("lock", "id", "id.new", "leases.jsonl", "usage.db"),
        *(f"{name}.{kind}" for name in _STATE_KEPT for kind in ("json", "new")),
    )
)
_STATE_NAMES: Final = _STATE_FOLDERS | _STATE_FILES | {"checked"}
# Created by a file system in its top directory.
_NOBODYS: Final = frozenset({"lost+found"})
_STATE_ID_BYTES_MAX: Final = 64
_STATE_ID: Final = re.compile(r"[0-9a-f]{16}")
OTHER_FILES: Final = "holds other files; a state directory must be empty or new at first"


def holds_other_files(path: str | Path) -> bool:
    """False if it is new, empty, or already a state directory: opening changes its mode and empties its `run`."""
    try:
        names = frozenset(os.listdir(path)) - _NOBODYS
    except OSError:
        # It does not exist yet, or is not readable, which is told elsewhere.
        return False
    if known_state_id(Path(path) / "id") is not None:
        return False
    return not names <= _STATE_NAMES or ("lock" not in names and bool(names))


def of_wrong_kind(path: str | Path) -> str | None:
    """What lies in a state directory where it has a plain file or a folder of its own: opening a pipe would hang."""
    try:
        names = sorted(_STATE_NAMES.intersection(os.listdir(path)))
    except OSError:
        # As above.
        return None
    # What cannot be looked at, as a link into nothing, hides nothing else.
    for there in filter(os.path.exists, (os.path.join(path, name) for name in names)):
        name = os.path.basename(there)
        if name in _STATE_FILES and not os.path.isfile(there):
            return f"{there} is no plain file; move it away"
        if name in _STATE_FOLDERS and not os.path.isdir(there):
            return f"{there} is no folder; move it away"
    return None


def known_state_id(file: Path) -> str | None:
    """The id of a state directory, from its file."""
    try:
        known = read_plain(file, _STATE_ID_BYTES_MAX).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotPlainFile, FileTooLarge):
        return None
    return known if _STATE_ID.fullmatch(known) else None


def is_reachable_without_keys(server: Server) -> bool:
    """True if other machines can reach the address, no key is required, and nothing says that this is meant."""
    return not (server.has_keys or server.insecure or _is_loopback(server.host))


def open_door(config: Config) -> str | None:
    """Why this address is not served: others can reach it, and need neither a key nor tokens. None if it is safe."""
    if config.governance.is_on or not is_reachable_without_keys(config.server):
        return None
    return (
        f"server.host: {config.server.host} can be reached by others, so it is not served there; "
        "give server.api_keys or server.key_file, sign operations (governance), or say server.insecure: true"
    )


def _door_of_tokens(config: Config) -> Iterator[str]:
    if config.governance.is_on and is_reachable_without_keys(config.server):
        yield (
            f"server.host: {config.server.host} can be reached by others, who may ask models without a key and load "
            "and unload them with tokens; status, logs and leases are closed to all until there are server.api_keys"
        )


def _no_admin(server: Server) -> Iterator[str]:
    # Those of a key file come and go; `greenroom check` looks at them.
    if server.api_keys and server.key_file is None and not any(key.admin for key in server.api_keys):
        yield (
            "server.api_keys: no key has admin: true, so no caller can load, unload, reload, read logs or see why a "
            "load failed; give it to the operator's key"
        )


def _one_port_twice(server: Server) -> Iterator[str]:
    # 0 takes a free one each time.
    if server.metrics and server.port and server.metrics_port == server.port:
        yield f"server.metrics_port: {server.port} is server.port too, so the gateway does not start; choose another"


def _unknown_defaults(config: Config) -> Iterator[str]:
    """Default models that name nothing. Where there are folders of models, only a look into them could tell."""
    said = {"server": config.server.default_model}
    for name, profile in config.profiles.items():
        said[f"profiles.{name}"] = profile.default_model
        said |= {f"profiles.{name}.clients.{one}": part.default_model for one, part in profile.clients.items()}
    known = {*config.models, *config.tasks, *(alias for model in config.models.values() for alias in model.aliases)}
    for key, default in said.items():
        prefix, colon, _ = (default or "").partition(":")
        is_remote = bool(colon) and prefix in config.remotes
        if not (default is None or default in known or is_remote or config.roots):
            yield f"{key}.default_model: there is no model or task {default}; requests that name none are answered 404"


def budget_mib(config: Config, model: Model | None = None) -> int | None:
    """Memory for this model, or for all of them together, as far as the file alone tells."""
    if config.gpus and not (model and model.is_host_only):
        return sum(max(0, gpu.memory_mib - gpu.margin_mib) for gpu in config.gpus)
    if config.host.memory_mib is not None:
        return max(0, config.host.memory_mib - config.host.margin_mib)
    return None


_OF_FOLDERS: Final = ("transformers", "diffusers", "vllm", "sglang", "comfyui", "whisper")
# What `path` must be. Engines of other packages take what they like.
_PATHS = {
    **dict.fromkeys(_OF_FOLDERS, (os.path.isdir, "folder")),
    "llamacpp": (lambda path: os.path.isfile(path) or holds_gguf(path), "file"),
}


def is_empty_folder(path: str) -> bool:
    try:
        return not os.listdir(path)
    except (OSError, ValueError):
        return False


def holds_gguf(path: str) -> bool:
    """True for a folder with a GGUF file in it."""
    try:
        return any(name.lower().endswith(".gguf") for name in os.listdir(path))
    except (OSError, ValueError):
        return False


def _missing(model: Model) -> Iterator[str]:
    is_there, what = _PATHS.get(model.engine or "", (os.path.exists, "file"))
    if model.path is not None and not is_there(model.path):
        is_other = os.path.exists(model.path)
        yield f"path: {model.path} is no {what}" if is_other else f"path: there is no {what} {model.path}"
    elif model.path is not None and is_empty_folder(model.path):
        yield f"path: {model.path} is empty"
    files = {"mmproj": model.mmproj, "draft_model": model.draft_model, "workflow": model.workflow}
    beside = {**files, **{f"lora.{path}": path for path in model.lora}}
    if model.chat_template is not None and model.chat_template.endswith(TEMPLATE_ENDING):
        beside["chat_template"] = model.chat_template
    for key, path in beside.items():
        if path is not None and not os.path.isfile(path):
            yield f"{key}: there is no file {path}"
    if model.cwd is not None and not os.path.isdir(model.cwd):
        yield f"cwd: there is no directory {model.cwd}"
    first = words(model.cmd)[0] if model.cmd else None
    for key, program in (("cmd", first), ("program", model.program), ("python", model.python)):
        if program == "":
            yield f"{key}: is empty; name a program or leave the key out"
        elif program is not None and not can_be_run(program, model.cwd, model.env.get("PATH")):
            yield f"{key}: there is no program {program}" + ("" if "/" in program else " on PATH")


def _unusable_remote(name: str, remote: Remote) -> Iterator[str]:
    try:
        read_remote_key(remote)
    except ValueError as error:
        yield f"remotes.{name}: {error}"
    if remote.ca_file is not None and not os.path.isfile(remote.ca_file):
        yield f"remotes.{name}: ca_file: there is no file {remote.ca_file}"


def _misplaced(name: str, model: Model, config: Config) -> Iterator[str]:
    known = {"host", *(f"gpu{number}" for number in range(len(config.gpus)))}
    if config.gpus and (strange := [device for device in model.devices if device not in known]):
        yield f"models.{name}: devices: there is no {', '.join(strange)} among gpus"
    if "CUDA_VISIBLE_DEVICES" in model.env:
        yield f"models.{name}: env: CUDA_VISIBLE_DEVICES wins over the GPUs planned for it; say devices instead"
    budget = budget_mib(config, model)
    if budget is not None and model.memory_mib is not None and model.memory_mib > budget:
        yield f"models.{name}: memory_mib: {model.memory_mib:,} MiB can never fit into the budget of {budget:,} MiB"


def roots_that_are_files(config: Config) -> Iterator[Problem]:
    """Folders of models that are plain files: a mistake, whereas a folder that is missing may be mounted later."""
    for where, roots in ((("model_roots",), config.model_roots), (("library", "roots"), config.library.roots)):
        for root in roots:
            if os.path.isfile(root):
                yield Problem(where, f"{root} is a file; name the folder that models lie below")


def _unusable_roots(config: Config) -> Iterator[str]:
    for root in config.roots:
        if not os.path.isdir(root):
            yield f"there is no folder {root} (yet); models are looked for there"
        elif not os.access(root, os.R_OK | os.X_OK):
            yield f"{root}, where models are looked for, may not be read by this user"
        elif os.path.realpath(root) == "/":
            yield "/ is a folder of models: everything on this machine is looked at. Name the folder that they lie in"


def _hidden_by_ids(config: Config) -> Iterator[str]:
    """Files below a root that have the name of a model with other files: requests by this name get the model."""
    for name, model in config.models.items():
        for said in (name, *model.aliases):
            hidden = next((path for root in config.roots if os.path.exists(path := os.path.join(root, said))), None)
            own = None if model.path is None else os.path.realpath(model.path)
            is_first = model.versions is not None and model.versions.repo_id == said
            if hidden is not None and os.path.realpath(hidden) != own and not is_first:
                yield f"models.{name}: {said} is also the name of {hidden}, which needs its whole path"


def _outside_roots(config: Config) -> Iterator[str]:
    """Models outside of model_roots. Links inside folders are checked at load."""
    roots = [os.path.realpath(root) for root in config.model_roots]
    for name, model in config.models.items():
        whole = None if model.path is None else os.path.realpath(model.path)
        if roots and whole is not None and not any(os.path.commonpath((whole, root)) == root for root in roots):
            yield f"models.{name}: path: {model.path} lies outside of model_roots and will not be loaded"


def _too_much_pinned(config: Config) -> list[str]:
    pinned = [
        name for name, model in config.models.items() if model.pinned and not (config.gpus and model.is_host_only)
    ]
    needed = sum(config.models[name].memory_mib or 0 for name in pinned)
    budget = budget_mib(config)
    if budget is None or needed <= budget:
        return []
    return [f"pinned models ({', '.join(pinned)}) need {needed:,} MiB together, the budget is {budget:,} MiB"]


def _kept_out(config: Config) -> Iterator[str]:
    """Models that scheduler.company excludes while others are pinned."""
    rules = rules_of(config.scheduler.company)
    if rules is None:
        return
    company = coresidency_under(rules)
    pinned = frozenset(ModelId(name) for name, model in config.models.items() if model.pinned)
    for name in config.models:
        others = pinned - {name}
        if company.leavers(ModelId(name), tuple(others), others) is None:
            yield f"models.{name}: scheduler.company keeps it out while these are pinned: {', '.join(sorted(others))}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
