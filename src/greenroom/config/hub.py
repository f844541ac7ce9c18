"""Models that are named instead of given as a folder: where the Hugging Face cache keeps them.

Owns the names of Whisper's sizes and the layout of that cache. Looks and never fetches: what is not there fails its own
load, with words that say how to get it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from greenroom.base.plain_file import read_plain

# Of the conversions that faster-whisper itself takes. `large` is the newest large.
WHISPER_SIZES: Final[Mapping[str, str]] = {
    **{size: f"Systran/faster-whisper-{size}" for size in ("tiny", "base", "small", "medium")},
    **{f"{size}.en": f"Systran/faster-whisper-{size}.en" for size in ("tiny", "base", "small", "medium")},
    **{size: f"Systran/faster-whisper-{size}" for size in ("large-v1", "large-v2", "large-v3")},
    "large": "Systran/faster-whisper-large-v3",
    "turbo": "mobiuslabsgmbh/faster-whisper-large-v3-turbo",
    "large-v3-turbo": "mobiuslabsgmbh/faster-whisper-large-v3-turbo",
}
WHISPER_PREFIX: Final = "whisper-"
_PREFIX: Final = "models--"
_REVISION_BYTES_MAX: Final = 256


def whisper_repository(name: str) -> str | None:
    """The repository of the Whisper model that is named by its size, such as `small` or `whisper-small`."""
    return WHISPER_SIZES.get(name.removeprefix(WHISPER_PREFIX))


def whisper_names() -> list[str]:
    """All names by which a size can be said."""
    return [prefix + size for size in WHISPER_SIZES for prefix in ("", WHISPER_PREFIX)]


def hub_folder(repository: str, env: Mapping[str, str]) -> str:
    """Where the cache keeps this repository, whether it is there or not. `env` wins over our own environment."""
    env = {**os.environ, **env}
    caches = env.get("XDG_CACHE_HOME") or "~/.cache"
    home = env.get("HF_HOME") or os.path.join(caches, "huggingface")
    cache = env.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.join(os.path.expanduser(cache), _PREFIX + repository.replace("/", "--"))


def snapshot(path: str) -> Path:
    """The folder with a repository's files, for one of the cache: that of `main`, else the last. Others as they are."""
    folder = Path(path)
    try:
        revision = read_plain(folder / "refs" / "main", _REVISION_BYTES_MAX).decode("ascii").strip()
        if "/" not in revision and (there := folder / "snapshots" / revision).is_dir():
            return there
        return max(
            (one for one in (folder / "snapshots").iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime
        )
    except (OSError, ValueError):
        return folder


def repository_of(path: str) -> str | None:
    """The name of the repository that this folder of the cache is for; None for other folders."""
    name = os.path.basename(path)
    return name.removeprefix(_PREFIX).replace("--", "/", 1) if name.startswith(_PREFIX) else None


def holds_whisper(path: str) -> bool:
    """True for a folder with a Whisper model of CTranslate2, as far as the names of its files tell."""
    try:
        names = os.listdir(snapshot(path))
    except (OSError, ValueError):
        return False
    return "model.bin" in names and any(name.startswith("vocabulary.") for name in names)
