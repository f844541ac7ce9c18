"""The key of an account at a provider: read from the environment or from a private file, when it is needed.

Owns what a key may look like. What goes wrong is told without any part of what was read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from greenroom.base.plain_file import NotPrivate, read_private, why
from greenroom.config.sections.remotes import Remote

KEY_BYTES_MAX: Final = 8 * 1024


def read_remote_key(remote: Remote, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key; None if the provider needs none. Reads a file, so it may block.

    Raises ValueError, which says what to do and shows nothing of the key.
    """
    if remote.api_key_env is not None:
        said, place = environ.get(remote.api_key_env, ""), f"the environment variable {remote.api_key_env}"
        if not said:
            raise ValueError(f"there is no environment variable {remote.api_key_env}")
    elif remote.api_key_file is not None:
        said, place = _from_file(remote.api_key_file), f"the file {remote.api_key_file}"
    else:
        return None
    said = said.strip()
    # Anything else would break the header, or is no key.
    if not said or not said.isascii() or any(letter <= " " or letter == "\x7f" for letter in said):
        raise ValueError(f"{place} has no key: visible ASCII characters without spaces are wanted")
    return said


def _from_file(path: str) -> str:
    try:
        return read_private(path, KEY_BYTES_MAX).decode("utf-8", "replace")
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except NotPrivate as error:
        raise ValueError(f"the file {path} {error}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"the file {path} cannot be read: {why(error)}") from None
