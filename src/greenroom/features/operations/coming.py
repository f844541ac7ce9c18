"""Versions that do not serve yet: only their update moves them."""

from __future__ import annotations

from typing import Protocol

from greenroom.core.model import ModelId
from greenroom.errors import UpdateInProgress
from greenroom.runtime.catalogue import Entry


class ComingVersions(Protocol):
    def moves_only(self, coming: ModelId, name: ModelId) -> UpdateInProgress:
        """The answer to orders for a version of this model that is on its way."""
        ...


def expect_movable(coming: ComingVersions, entry: Entry) -> None:
    """Raises UpdateInProgress for a version that does not serve yet."""
    if (name := entry.spec.version_of) is not None:
        raise coming.moves_only(entry.id, name)
